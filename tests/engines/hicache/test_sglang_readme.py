"""The commands on SGLang's page: its own parser takes them, and what was saved is restored so.

A whole server needs a GPU. Only the model and the folder of the storage differ from what stands there.
"""

import json
import re
import shlex
import sys
from pathlib import Path

from linker_bed import MakeEngine, prompt
from sglang.srt.server_args import prepare_server_args
from sglang_engines import KINDS, MakeFixtures

sys.path.insert(0, str(Path(__file__).parents[2]))

from doc_blocks import ROOT, stored_in


def words_of(part: str) -> list[str]:
    """The options of the one command with that part."""
    page = (ROOT / "docs/sglang.md").read_text()
    blocks = re.findall(r"(?ms)^    python -m sglang.launch_server.*?$\n\n", page)
    (block,) = [block for block in blocks if part in block]
    return shlex.split(block.replace("\\\n", " "))[3:]


def test_the_command_of_hicache_starts_one_that_restores_what_it_saved(make: MakeFixtures, tmp_path: Path) -> None:
    words = words_of("--enable-hierarchical-cache")
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


def test_the_command_of_the_linker_starts_one_that_restores_what_it_saved(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}))
    words = words_of("external-linker")
    words[words.index("--model-path") + 1] = str(tmp_path)
    args = prepare_server_args([stored_in(word, tmp_path) for word in words])
    assert args.enable_unified_cache_external_linker and args.unified_cache_external_linker_backend == "dynamic"
    config = args.unified_cache_external_linker_config
    extra = config.pop("linker_extra_config")
    assert config == {"linker": "KvarveLinker", "linker_module_path": "kvarve.connectors.sglang.linker"}
    engine = make_engine("FULL", 16, **extra | {"host_memory": "8MiB"})
    engine.serve(asked := prompt(4, 16))
    engine.forget()
    assert engine.serve(asked) == (0, 4, 0)
