"""README's command for SGLang: its own parser takes it, and a HiCache with these settings restores what it saved.

A whole server needs a GPU. Only the model and the folder of the storage differ from what stands there.
"""

import json
import sys
from pathlib import Path

from sglang.srt.server_args import prepare_server_args
from sglang_engines import KINDS, MakeFixtures

sys.path.insert(0, str(Path(__file__).parents[2]))

from doc_blocks import command, stored_in


def test_the_command_of_readme_starts_a_hicache_that_restores_what_it_saved(make: MakeFixtures, tmp_path: Path) -> None:
    python, module, name, *words = command("README.md", "python -m sglang.launch_server")
    assert (python, module, name) == ("python", "-m", "sglang.launch_server")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    words[words.index("--model-path") + 1] = str(tmp_path)
    args = prepare_server_args([stored_in(word, tmp_path) for word in words])
    assert args.enable_hierarchical_cache and args.hicache_storage_backend == "dynamic"
    assert args.hicache_io_backend == "direct"
    extra = json.loads(args.hicache_storage_backend_extra_config)
    fixtures = make(KINDS[0], args.hicache_mem_layout, **extra)
    prompt = fixtures.prompt(fixtures.pages)
    fixtures.engine().produce(prompt)
    assert type(fixtures.engines[0].backend).__name__ == extra["class_name"]
    assert fixtures.engine().consume(prompt) == len(prompt)
