"""`kvarve serve` as an operator meets it: a line that says what is wrong, or a server that starts and ends whole."""

import json
import logging
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from servers import SHAPE, serving, settings

from kvarve import __version__
from kvarve.cli import main
from kvarve.errors import ConfigError, StorageError
from kvarve.reference.server import serve as serve_module
from kvarve.reference.server.serve import Server
from kvarve.reference.server.starting import Starting
from kvarve.storage import Storage
from plugged import plug_in
from tests.sim.models import tiny_config

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `kvarve` with these words in this process: the exit code, standard output and standard error."""
    # What a process sets up for itself is pytest's here.
    monkeypatch.setattr(main, "begin_log", lambda level, form: None)
    monkeypatch.setattr(serve_module, "OncePerSecond", logging.Filter)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def say(*argv: object) -> tuple[int, str, str]:
        code = main.main([*map(str, argv)])
        return code, *capsys.readouterr()  # type: ignore[return-value]

    return say


@pytest.fixture
def serve(say: Run, checkpoint: Path) -> Run:
    return lambda *argv: say("serve", "--model", checkpoint, "--port", 0, *SHAPE, *argv)


def one_line(result: tuple[int, str, str]) -> str:
    code, out, error = result
    assert (code, out) == (2, "")
    assert error.startswith("kvarve: ")
    assert error.endswith("\n") and error.count("\n") == 1, error
    return error


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder below a folder: its time of change and content."""
    return {
        str(path): (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes())
        for path in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "which command? known: serve, demo"),
        ("srve", "unknown command 'srve': did you mean serve?"),
        ("serve --device-memori=1GiB", "unknown option '--device-memori': did you mean --device-memory?"),
        ("serve extra", "an argument that belongs to no option: put a value that has a space into quotes"),
        ("serve --model", "--model: expected one argument"),
        ("serve --device-memory 10XB", "--device-memory: '10XB' cannot be read as a size"),
        ("serve --device-memory 1KiB", "1 KiB of device memory is too little for this model: two chunks of a prompt"),
        ("serve --host-memory 1KiB", "1 KiB of host memory is too little for this model"),
        ("serve --host-memory 900TiB", "must be at most this machine's"),
        ("serve --host-memory 0", "storage needs host memory"),
        ("serve --page-tokens 48", "a page of 48 tokens does not fit the model's prefill grid of 64"),
        ("serve --served-model-name=", "served_model_name must be a text, got ''"),
        ("serve --served-model-name a\udcff", r"served_model_name must be UTF-8, got 'a\udcff'"),
        ("serve --model /tmp/\udcff", r"model must be UTF-8, got '/tmp/\udcff'"),
        ("serve --storage file:///tmp/\udcff?capacity=1GiB", "storage must be UTF-8, got"),
        ("serve --api-key one --admin-key one", "the admin key must not be the API key"),
        ("serve --hits rounded --deterministic", "deterministic needs exact hits"),
        ("serve --page-tokens=-1", "page_tokens must be at least 0, got -1"),
        ("serve --chunk-tokens many", "--chunk-tokens: 'many' is not a whole number"),
        ("serve --write-policy later", "write_policy must be through, through:N (after N uses) or back, got 'later'"),
        ("serve --write-policy through:0", "write_policy must be through, through:N"),
        ("serve --storage-wait hope", "storage_wait must be none, all, or seconds"),
        ("serve --keep-states sometimes", "keep_states must be none, or a list such as ends,branches"),
        ("serve --storage-deadline-s 0", "storage_deadline_s must be above 0 and finite, got 0.0"),
        ("serve --dtype int4", "--dtype must be one of auto, float32, bfloat16, float16, got 'int4'"),
        ("serve --device abacus", "device must be auto or one that torch can use, got 'abacus': "),
        ("serve --device meta", "device must be auto or one that torch can use, got 'meta': "),
        ("serve --model /no/such/folder", "/no/such/folder: no such folder"),
        ("serve --model builtin:huge", "there is no builtin:huge"),
        ("serve --port 65536", "port must be at least 0 and at most 65535, got 65536"),
        ("serve --host 192.0.2.1", "cannot listen on 192.0.2.1"),
        ("serve --max-running 0", "max_running must be at least 1, got 0"),
        ("serve --max-waiting 0", "max_waiting must be at least 1, got 0"),
        ("serve --threads 0", "threads must be at least 1 and at most 1024, got 0"),
        (
            "serve --port 65536 --threads 0 --storage file:///pages?capacity=lots --chat-template /no/file",
            "threads must be at least 1 and at most 1024, got 0; port must be at least 0 and at most 65535, got 65536; "
            "file:///pages?capacity=lots: capacity: 'lots' cannot be read as a size: ",
        ),
        ("serve --log-level loud", "--log-level must be one of debug, info, warning, error, got 'loud'"),
        ("serve --ready-file /no/such/folder/ready", "--ready-file: /no/such/folder/ready cannot be written"),
        (
            "serve --admin-key=a\x01b",
            "an admin key must have no spaces or line ends around it",
        ),
        ("serve --api-key=", "an API key cannot be empty"),
        ("serve --storage tape:///dev/st0", "unknown storage 'tape'"),
        ("serve --storage relative/path", "must be an absolute path or a storage URL"),
        ("serve --storage file:///pages?capacity=0", "capacity must be above zero"),
        ("serve --storage /proc/pages", "/proc"),
        ("serve --storage /dev/null/pages?", "parameters need a URL"),
        ("serve --storage /pages --storage file:///pages?capacity=1GiB", "is the same place as /pages"),
        ("demo --out /dev/null", "--out: /dev/null: "),
        ("verify --json /", "--json: / cannot be written as a file"),
        ("models --model builtin:tiny-hybrid --page-tokens 48 --chunk-tokens 64", "must be whole pages of 48"),
        ("models --page-tokens 0", "--page-tokens: Must be > 0"),
        ("models --model builtin:tiny-hybrid --json /", "--json: / cannot be written as a file"),
    ],
)
def test_a_bad_setting_is_one_clear_line_and_nothing_is_touched(
    say: Run, checkpoint: Path, tmp_path: Path, words: str, complaint: str
) -> None:
    storage = tmp_path / "storage"
    argv = words.split()
    if argv[:1] == ["serve"]:
        good = {"--model": checkpoint, "--storage": storage, "--port": 0, "--page-tokens": 16, "--chunk-tokens": 64}
        absent = {flag: value for flag, value in good.items() if flag != "--storage" or flag not in words}
        argv[1:1] = [str(word) for flag, value in absent.items() for word in (flag, value)]
    assert complaint in one_line(say(*argv))
    assert not storage.exists()


def test_a_model_is_described_by_its_config_alone(say: Run, checkpoint: Path, tmp_path: Path) -> None:
    bare, answer = tmp_path / "bare", tmp_path / "facts.json"
    bare.mkdir()
    shutil.copy(checkpoint / "config.json", bare)
    code, out, error = say("models", "--model", bare, "--json", answer)
    assert (code, error) == (0, "")
    assert "reads all pages" in out and "prompts of 257 tokens and more; a token takes 256 B, a snapshot" in out
    (facts,) = json.loads(answer.read_text())["models"]
    assert facts["supported"] and facts["model_type"] == "qwen3_5_text" and facts["dtype"] == "float32"
    assert [pool["name"] for pool in facts["pools"]] == ["attention", "state"]
    assert (facts["page_tokens"], facts["chunk_tokens"], facts["shortest_hit"]) == (64, 256, 257)
    assert facts["bytes_per_token"] == 2 * 2 * 16 * 4  # keys and values of two heads in one layer


@pytest.mark.parametrize(("command", "page"), [("serve", 64), ("models", 192)])
def test_a_model_whose_pages_have_to_be_larger_says_so_before_its_weights_are_read(
    say: Run, tmp_path: Path, command: str, page: int
) -> None:
    tiny_config("deepseek_v4").save_pretrained(tmp_path)
    line = one_line(say(command, "--model", tmp_path, "--page-tokens", page, "--chunk-tokens", 2 * page))
    assert f"compresses 128 tokens into one entry, which a page of {page} tokens would cut in two" in line


def test_without_a_page_size_a_model_gets_the_one_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config("deepseek_v4").save_pretrained(tmp_path)
    monkeypatch.setattr(serve_module, "check_model", lambda *given, **more: None)  # there are no weights
    assert serve_module._settled(settings(tmp_path, page_tokens=0)).page_tokens == 128
    assert serve_module._settled(settings(tmp_path, page_tokens=256)).page_tokens == 256


def test_memory_too_small_for_large_weights_is_said_before_they_are_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "SLOW_WEIGHTS_BYTES", 1)
    told = list[str]()
    with pytest.raises(ConfigError, match="1 KiB of storage memory is too little for this model"):
        small = f"file://{tmp_path}/pages?capacity=1KiB"
        Server(settings(checkpoint, storage=(small,)), starting=Starting(told.append))
    assert told == [], "no phase has begun"


def test_a_port_in_use_is_refused_before_the_storage_is_touched(serve: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(serve("--port", port, "--storage", tmp_path / "storage"))
    assert f"port {port}: Address already in use" in line
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("notes.txt", "do not lose", "not empty and not a kvarve storage folder"),
        ("kvarve.json", '{"format": "kvarve-slabs/999"}', "another version of kvarve ('kvarve-slabs/999')"),
    ],
)
def test_a_folder_with_something_else_is_refused_and_left_as_it_was(
    serve: Run, tmp_path: Path, file: str, content: str, complaint: str
) -> None:
    folder = tmp_path / "storage"
    folder.mkdir()
    (folder / file).write_text(content)
    before = tree(folder)
    assert complaint in one_line(serve("--storage", folder))
    assert tree(folder) == before


def test_a_bug_in_a_backend_is_one_line_at_the_start_too(serve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(label: bytes, description: str) -> Storage:
        raise RuntimeError("half way")

    plug_in(monkeypatch, "odd", fails)
    error = one_line(serve("--storage", "odd://x?capacity=64MiB"))
    assert error == "kvarve: odd://x?capacity=64MiB: it cannot be opened: RuntimeError: half way\n"


def test_a_broken_checkpoint_is_named(serve: Run, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors: truncated" in one_line(serve("--model", folder))


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "its weights are quantized (bitsandbytes), which this version cannot load"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "quantized (gptq): bits 3 is not read, only 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "quantized (awq): it holds no packed weight"),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_all_commands_in_the_same_line(
    say: Run, checkpoint: Path, tmp_path: Path, quantization: dict[str, object], complaint: str
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "quantized"))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    lines = {one_line(say(command, "--model", folder)) for command in ("models", "serve", "verify")}
    assert len(lines) == 1 and complaint in lines.pop()


def test_help_is_short_and_shows_an_example_and_the_defaults(say: Run) -> None:
    code, out, error = say("serve", "--help")
    assert (code, error) == (0, "")
    assert "[default: 256MiB]" in out and "example:" in out
    assert say("--version") == (0, f"kvarve {__version__}\n", "")


def test_ctrl_c_ends_it_whole_and_what_it_knew_is_there_after_a_restart(
    checkpoint: Path, tmp_path: Path, song: str
) -> None:
    ready = tmp_path / "ready"
    argv = ["--model", checkpoint, "--ready-file", ready]
    argv += ["--storage", tmp_path / "storage", "--storage", f"file://{tmp_path}/far?capacity=64MiB"]
    prompt = {"prompt": song * 3, "temperature": 0, "max_tokens": 12}
    answers = []
    with serving(tmp_path, *argv) as (process, client):
        assert httpx.URL(ready.read_text().strip()) == client.base_url
        answers.append(client.post("/v1/completions", json=prompt).json())
        endless = {"prompt": song, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-2:]
        assert '"finish_reason":"abort"' in last[0]
        assert last[1] == "data: [DONE]"
        assert process.wait() == 0
        assert not ready.exists()
        told = (tmp_path / "log").read_text().splitlines()
        said = [line.partition(" INFO kvarve.reference.server.")[2].partition(": ")[::2] for line in told]
        phases = [text.partition(":")[0] for part, text in said if part == "starting"]
        assert phases[:3] == ["loading weights", "dividing memory", "opening storage"]
        assert phases[3].startswith("listening on http") and len(phases) == 4
        assert ["prompt tokens" in text for part, text in said if part == "request_log"] == [True, True]
        assert [text for part, text in said if part == "serve"] == ["stopping: ending requests, finishing backups"]
    for _ in range(2):  # this process finds pages stored by another: the same model on the same machine
        tiers = str(tmp_path / "storage"), f"file://{tmp_path}/far?capacity=64MiB"
        with Server(settings(checkpoint, storage=tiers)) as again:
            answers.append(httpx.post(f"{again.url}/v1/completions", json=prompt, timeout=60).json())
        shutil.rmtree(tmp_path / "storage")
    cold, warm, from_afar = answers
    assert cold["usage"]["kvarve"]["cached_tokens"] == {"device": 0, "host": 0, "storage": 0}
    assert warm["usage"]["kvarve"]["cached_tokens"] == {"device": 0, "host": 0, "storage": 128}
    assert from_afar["usage"]["kvarve"]["cached_tokens"] == {"device": 0, "host": 0, "storage": 128}
    assert cold["choices"] == warm["choices"] == from_afar["choices"]


def test_at_the_start_it_says_what_is_kept_and_what_can_hit(server: Server) -> None:
    said = server.describe().splitlines()
    pools = [line.split()[1] for line in said if line.split()[0] == "pool"]
    assert pools == ["attention", "state"]
    assert any("reads all pages" in line and "on the host" in line for line in said)
    (hits,) = [line for line in said if line.split()[0] == "hits"]
    assert f"prompts of {64 + 1} tokens and more; a token takes 256 B, a snapshot 4 KiB" in hits


def test_a_storage_that_is_slow_to_say_what_it_holds_keeps_no_server_from_starting(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow() -> None:
        raise StorageError("this storage has not said yet what it holds")

    monkeypatch.setattr(server.engine.cache.worker, "usage", slow)
    assert any(line.split()[0] == "storage" for line in server.describe().splitlines())
