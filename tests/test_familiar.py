"""Flags of SGLang and vLLM mean the same here, are explained, or are refused."""

from dataclasses import fields
from pathlib import Path

import pytest

from kvarve.cli.main import main
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.reference.server.serve_settings import Settings
from kvarve.settings.engine_flags import FLAGS, translated

DEVICE = 1 << 28


def ours(*words: str) -> tuple[list[str], list[str]]:
    """The words in our flags, and the notes."""
    notes = list[str]()
    return translated(words, DEVICE, notes.append), notes


OUR_FLAGS = {"--" + each.name.replace("_", "-") for kind in (Settings, Policies) for each in fields(kind)}


def test_each_flag_is_one_of_ours_or_says_why_not() -> None:
    for name, flag in FLAGS.items():
        assert name not in OUR_FLAGS
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
        ("--hicache-ratio 2", f"--host-memory {DEVICE * 2}B"),
        ("--hicache-ratio 1.5 --device-memory 1GiB", f"--device-memory 1GiB --host-memory {3 << 29}B"),
        ("--device-memory=1GiB --hicache-ratio=0", "--device-memory=1GiB --host-memory 0B"),
        ("--hicache-ratio 2 --hicache-size 1", "--host-memory 1GB"),
        ("--hicache-write-policy write_back", "--write-policy back"),
        ("--hicache-storage-prefetch-policy timeout", f"--storage-wait {Policies.storage_wait}"),
        ("--radix-eviction-policy lfu --admin-api-key k", "--eviction lfu --admin-key k"),
        ("--hicache-storage-backend file", "--storage file://?capacity=10GiB"),
        (
            '--hicache-storage-backend mooncake --hicache-storage-backend-extra-config {"master_server_address":"m:1"}',
            "--storage mooncake://m:1",
        ),
        ("--port 7 --model x", "--port 7 --model x"),
        ("--load-format auto --kv-cache-dtype=auto --dp-size 1", ""),
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


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ("--mem-fraction-static 0.8", "--mem-fraction-static is not supported: memory for pages is given in bytes"),
        ("--trust-remote-code", "--trust-remote-code is not supported: no code of a checkpoint"),
        ("--data-parallel-size=2", "--data-parallel-size 2 is not supported: start several servers behind a router"),
        ("--hicache-ratio", "--hicache-ratio needs a value"),
        (
            "--hicache-write-policy later",
            "hicache_write_policy must be one of write_through, write_through_selective, ",
        ),
        ("--hicache-ratio two", "--hicache-ratio must be a number, got 'two'"),
        ("--hicache-ratio 1/0", "--hicache-ratio must be a number, got '1/0'"),
        ("--hicache-ratio -1", "must be a ratio of host memory"),
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
