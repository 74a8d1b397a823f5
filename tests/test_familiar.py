"""Flags of SGLang and vLLM mean the same here, are explained, or are refused."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kvarve.cli.main import main
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError, ModelError
from kvarve.reference.server.serve_settings import Settings
from kvarve.settings.engine_flags import FLAGS
from kvarve.settings.translate import command_of, in_words, translated
from kvarve.storage.urls import shown

DEVICE = 1 << 28
OUR_FLAGS = {"--" + each.name.replace("_", "-") for kind in (Settings, Policies) for each in fields(kind)}

COMMANDS = tomllib.loads((Path(__file__).parent / "published_commands.toml").read_text())["command"]


@dataclass
class Machine:
    """One on which a token takes two bytes, a state 100, and a GPU of 1,000 bytes has 100 of weights."""

    gpu: bool = True
    known: bool = True

    def pages_bytes(self, words: Sequence[str], tokens: int) -> int:
        if not self.known:
            raise ModelError("no such folder")
        return 2 * tokens + 100 * ("--states" in words)

    def gpu_bytes(self, words: Sequence[str]) -> tuple[int, int] | None:
        return (1000, 100) if self.gpu else None


def ours(*words: str, on: Machine = Machine()) -> tuple[list[str], list[str]]:  # noqa: B008 - frozen by its tests
    """The words in our flags, and the notes."""
    notes = list[str]()
    return translated(words, OUR_FLAGS | {"--config"}, DEVICE, lambda: on, notes.append, shown), notes


def test_each_flag_is_one_of_ours_or_says_why_not() -> None:
    for name, flag in FLAGS.items():
        assert name not in OUR_FLAGS or flag.ours == name, "with other values"
        assert (flag.ours in OUR_FLAGS) if flag.ours else flag.why, name
        if flag.ours is None and flag.fine is None:
            with pytest.raises(ConfigError, match=f"^{name}.* is not supported: "):
                ours(name) if flag.switch else ours(name, "x")


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("--page-size 32 --tp-size=2", "--page-tokens 32 --tp 2"),
        ("--block-size 32 --tensor-parallel-size 2", "--page-tokens 32 --tp 2"),
        ("--max-model-len 4096 --max-num-seqs 8", "--context-length 4096 --max-running 8"),
        ("--hicache-size 30", "--host-memory 30GB"),
        ("--kv-offloading-size 4", "--host-memory 4GiB"),
        ("--kv-offloading-size 4 -tp 8", f"--tp 8 --host-memory {1 << 29}B"),
        ("--hicache-ratio 2", f"--host-memory {DEVICE * 2}B"),
        ("--hicache-ratio 1.5 --device-memory 1GiB", f"--device-memory 1GiB --host-memory {3 << 29}B"),
        ("--device-memory=1GiB --hicache-ratio=0", "--device-memory=1GiB --host-memory 0B"),
        ("--hicache-ratio 2 --hicache-size 1", "--host-memory 1GB"),
        ("--hicache-ratio 3 --hicache-size 0", f"--host-memory {DEVICE * 3}B"),
        ("--hicache-size 0", f"--host-memory {DEVICE * 2}B"),
        ("--hicache-size None --tp-size None --chunked-prefill-size -1 --max-model-len -1", ""),
        ("--max-mamba-cache-size 9 --mamba-scheduler-strategy no_buffer", "--states 9 --keep-states ends"),
        ("--max-total-tokens 300", "--device-memory 600B"),
        ("--max-total-tokens 300 --max-mamba-cache-size 1", "--states 1 --device-memory 700B"),
        ("--max-total-tokens 300 --mem-fraction-static 0.5", "--device-memory 400B"),
        ("--max-total-tokens 300 --hicache-ratio 2", "--device-memory 600B --host-memory 1200B"),
        ("--gpu-memory-utilization 0.5 --device-memory 7B", "--device-memory 7B"),
        ("--hicache-write-policy write_back", "--write-policy back"),
        ("--hicache-storage-prefetch-policy timeout", f"--storage-wait {Policies.storage_wait}"),
        ("--radix-eviction-policy lfu --admin-api-key k", "--eviction lfu --admin-key k"),
        ("--hicache-storage-backend file", "--storage file://?capacity=10GiB"),
        (
            '--hicache-storage-backend mooncake --hicache-storage-backend-extra-config {"master_server_address":"m:1"}',
            "--storage mooncake://m:1",
        ),
        ("--port 7 --model x", "--port 7 --model x"),
        (
            "--max_model_len 4096 --tensor_parallel_size=2 --kv_cache_dtype auto",
            "--context-length 4096 --tp 2 --kv-cache-dtype auto",
        ),
        ("-tp 2 -pp 1 -dp=1 -n 2 -r 0 -ep -O3 -O 2 -O.mode=3 -cc.mode 3", "--tp 2 --nnodes 2 --node-rank 0"),
        ("--master-addr a --headless", "--dist-init-addr a:29501"),
        ("--served_model_name a_b --tp_size 2", "--served-model-name a_b --tp 2"),
        ("--max-model-len -1 --port 7", "--port 7"),
        ("--max-model-len 32k --max-num-batched-tokens=1.5K", "--context-length 32000 --turn-tokens 1536"),
        ("--max-model-len .k --max-num-batched-tokens K", "--context-length .k --turn-tokens K"),
        ("--kv-cache-memory-bytes 4G", f"--device-memory {4 << 30}B"),
        ("--load-format auto --dp-size 1 --schedule-policy lpm --trust-remote-code", ""),
        ("--kv-cache-dtype auto", "--kv-cache-dtype auto"),
        ("--kv-cache-dtype=fp8", "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_a_flag_of_theirs_is_one_of_ours(theirs: str, told: str) -> None:
    assert ours(*theirs.split())[0] == told.split()


def test_a_flag_without_meaning_is_explained_in_a_line() -> None:
    words = ["--enable-hierarchical-cache", "--hicache-io-backend=kernel", "--hicache-mem-layout=page_first"]
    left, notes = ours(*words, "--port", "7")
    assert left == ["--port", "7"]
    assert [note.partition(" changes nothing here: ")[0] for note in notes] == [
        word.partition("=")[0] for word in words
    ]


def test_what_takes_a_gpu_or_a_model_to_know_is_left_out_in_a_line_without_it() -> None:
    words, notes = ours("--mem-fraction-static", "0.8", "--max-total-tokens", "9", on=Machine(gpu=False, known=False))
    assert words == [] and [note.partition(": ")[0] for note in notes] == [
        "--max-total-tokens is left out, as the model is not known here",
        "--mem-fraction-static changes nothing here",
    ]


def test_all_that_is_wrong_with_a_command_is_said_at_once_with_the_command_that_is_left() -> None:
    theirs = "--tp-size 2 --pp-size 2 --fooo 3 --page-syze=9 --schedule-policy fcfs --api-key hush --enable-lora"
    theirs += " --kv-cache-dtype fp8_e5m2"
    with pytest.raises(ConfigError) as caught:
        ours(*theirs.split())
    *wrong, left = str(caught.value).split("; ")
    assert [each.partition(":")[0] for each in wrong] == [
        "--pp-size 2 is not supported",
        "unknown option '--fooo'",
        "unknown option '--page-syze'",
        "--schedule-policy fcfs is not supported",
        "--enable-lora is not supported",
        "--kv-cache-dtype must be one of auto, fp8, fp8_e4m3, got 'fp8_e5m2'",
    ]
    assert left == "without them: kvarve serve --tp 2 --api-key ...", "and no key is shown"


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("--seed --port 1", "--seed needs a value"),
        ("--port 1 --seed -tp 2", "--seed needs a value; without them: kvarve serve --port 1 --tp 2"),
        ("--dp 8 --enable-dp-attention", "--dp 8, --enable-dp-attention are not supported: start several servers"),
        ("-dp 8 --data-parallel-address a", "-dp 8, --data-parallel-address a are not supported: start several"),
        ("--speculative-algo EAGLE --speculative-x", "--speculative-algo EAGLE, --speculative-x are not supported: "),
        ("--speculative-config.method mtp", "--speculative-config.method mtp is not supported: there is no specul"),
        ("-q fp8 -v 3", "-q fp8 is not supported: how weights are quantized is read from the checkpoint; unknown "),
        ("--tp_size 2 --gpus all", "unknown option '--gpus'; without them: kvarve serve --tp 2"),
    ],
)
def test_flags_are_read_as_the_engines_read_them_and_a_reason_is_said_once(theirs: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ours(*theirs.split())
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("published", COMMANDS)
def test_a_published_command_is_one_of_ours(published: dict[str, str]) -> None:
    variables, flags = command_of(published["theirs"])
    try:
        found = in_words(ours(*flags, on=Machine(gpu=False, known=False))[0], shown, variables)
    except ConfigError as e:
        found = str(e)
    assert found == published["ours"]


@pytest.mark.parametrize(
    "text",
    ["vllm serve /m --block-size 32", "VLLM_X=1 Y=1 python -m sglang.launch_server --model-path /m --page-size=32"],
)
def test_a_command_is_printed_as_ours(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "from-vllm", text]) == 0
    told = capsys.readouterr().out.strip()
    assert told.removeprefix("Y=1 ") == "kvarve serve --model /m --page-tokens 32"
    assert told.startswith("Y=1 ") == ("Y=1" in text), "variables of theirs alone are left out"
    assert main(["config", "from-sglang", "vllm serve 'open"]) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("vllm serve /m \\\n  --tp 2 \\\n--block-size 32  # small", "kvarve serve --model /m --tp 2 --page-tokens 32"),
        ("A='b c' vllm serve /m --api-key ab#cd | tee log", "A='b c' kvarve serve --model /m --api-key ..."),
        ("vllm serve /m --api-key=hush > log", "kvarve serve --model /m --api-key=..."),
        ("vllm serve /m --storage=redis://u:hush@h:1", "kvarve serve --model /m '--storage=redis://***@h:1'"),
        ("HF_TOKEN=hush vllm serve /m", "HF_TOKEN=... kvarve serve --model /m"),
        ("vllm serve --port=8 -tp 2 /m", "kvarve serve --port=8 --tp 2 --model /m"),
        (
            "openai_api_key=hush A_PASSWORD_FILE=hush B_SECRET=hush M=redis://u:hush@h:1 KEYS=3 vllm serve /m",
            "openai_api_key=... A_PASSWORD_FILE=... B_SECRET=... M=redis://***@h:1 KEYS=3 kvarve serve --model /m",
        ),
        ("vllm serve $MODEL --port ${PORT} &", 'kvarve serve --model "$MODEL" --port "${PORT}"'),
    ],
)
def test_a_command_is_read_as_a_shell_reads_it_and_no_secret_is_printed(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "from-vllm", text]) == 0
    assert capsys.readouterr().out.strip() == told
    assert main(["config", "from-vllm", "vllm serve /m --hf-token hush"]) == 2, "also if no other flag is known"
    assert main(["config", "from-vllm", "docker run -e HF_TOKEN=hush vllm/vllm-openai --model /m"]) == 2
    assert main(["serve", "--storage=redis://u:hush@h:1", "--tp-size", "2", "--enable-lora"]) == 2
    assert "hush" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "vllm serve /m --config serve.yaml --port 7",
            "--config serve.yaml is not supported: it is a file of that engine",
        ),
        (
            "docker run -p 8000:8000 vllm/vllm-openai --model /m",
            "the command must run sglang.launch_server or vllm serve",
        ),
        ("vllm serve /m --served-model-name a b", "a value belongs to no option"),
        ("python -m dynamo.sglang --model-path /m", "vllm serve, got 'python -m dynamo.sglang'; of a container give"),
    ],
)
def test_what_is_no_command_of_a_server_is_said(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "from-vllm", text]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("--mem-fraction-static 8", "--mem-fraction-static must be above 0 and at most 1, got '8'"),
        ("--mem-fraction-static 0.01", "--mem-fraction-static leave no memory for pages"),
        ("--max-total-tokens many", "--max-total-tokens must be a number of tokens, got 'many'"),
        (
            "--schedule-policy fcfs",
            "--schedule-policy fcfs is not supported: the engine begins with the request",
        ),
        ("--data-parallel-size=2", "--data-parallel-size 2 is not supported: start several servers behind a router"),
        ("--hicache-ratio", "--hicache-ratio needs a value"),
        (
            "--hicache-write-policy later",
            "hicache_write_policy must be one of write_through, write_through_selective, ",
        ),
        ("--kv-offloading-size many -tp 2", "manyGiB"),
        ("--hicache-ratio two", "--hicache-ratio must be a number, got 'two'"),
        ("--hicache-ratio 1/0", "--hicache-ratio must be a number, got '1/0'"),
        ("--hicache-ratio 1e99999999", "--hicache-ratio must be a ratio of host memory"),
        ("--mem-fraction-static 1e99999999", "--mem-fraction-static must be above 0 and at most 1"),
        ("--hicache-ratio -1", "--hicache-ratio must be a ratio of host memory"),
        ("--hicache-ratio 2 --config x.toml", "needs --device-memory beside it"),
        ("--hicache-storage-backend-extra-config {}", "needs --hicache-storage-backend"),
        ("--hicache-storage-backend nixl", "unknown storage 'nixl'"),
        ("--hicache-storage-backend file --hicache-storage-backend-extra-config @/nowhere", "cannot be read"),
    ],
)
def test_what_would_mean_something_else_is_refused(theirs: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ours(*theirs.split())
    assert told in str(caught.value)


def test_the_config_of_a_backend_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "extra.json").write_text('{"path": "/pages", "capacity": "1TiB"}')
    extra = f"--hicache-storage-backend-extra-config=@{tmp_path}/extra.json"
    assert ours("--hicache-storage-backend", "file", extra)[0] == ["--storage", "file:///pages?capacity=1TiB"]


def test_serve_takes_them_and_no_other_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--enable-cache-report", "--page-size", "no"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("kvarve: --enable-cache-report changes nothing here: ")
    assert told[1].startswith("kvarve: --page-tokens: 'no' is not a whole number")
    assert main(["models", "--page-size", "32"]) == 2
    assert "unknown option '--page-size'" in capsys.readouterr().err
