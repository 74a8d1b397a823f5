"""Three formats of traces become the same requests; the trace in docs/ is what the generator makes."""

import json
from pathlib import Path
from typing import Any

import pytest
from traces import command, trace

from kvarve.errors import ConfigError
from kvarve.planner import TraceRequest, read_trace
from tests.sim.conversations import conversations

SMALL = Path(__file__).parent.parent.parent / "docs" / "small-trace.jsonl"
PAGE = 4


def read(folder: Path, *lines: dict[str, Any] | str) -> list[TraceRequest]:
    return [*read_trace(trace(folder, *lines), PAGE)]


def shared(left: TraceRequest, right: TraceRequest) -> int:
    """How many blocks two requests have in common, from the first on."""
    pairs = [one == other for one, other in zip(left.ids, right.ids, strict=False)]
    return pairs.index(False) if False in pairs else len(pairs)


def test_prompts_of_tokens_share_blocks_as_far_as_their_tokens_do(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "tokens": tokens, "output_length": 3} for at, tokens in enumerate(PROMPTS)]
    one, longer, other, behind = read(tmp_path, *rows)
    assert (one.input_length, one.output_length, one.timestamp_ms) == (9, 3, 0)
    assert shared(one, longer) == 2 == len(one.ids)
    assert shared(one, other) == 1
    assert shared(one, behind) == 0, "an id stands for all tokens before it too"
    assert one.ids[1] not in behind.ids


PROMPTS = [[*range(9)], [*range(14)], [0, 1, 2, 3, 9, 5, 6, 7], [9, 1, 2, 3, 4, 5, 6, 7]]


def test_prompts_under_different_salts_share_nothing(tmp_path: Path) -> None:
    row = {"timestamp": 0, "tokens": PROMPTS[0]}
    plain, salted, same, body = read(tmp_path, row, row | {"salt": "a"}, row | {"salt": "a"}, row | {"salt": "b"})
    assert shared(plain, salted) == shared(salted, body) == 0
    assert shared(salted, same) == 2


def test_a_log_of_completions_may_have_texts_or_tokens(tmp_path: Path) -> None:
    rows = [
        {"created": 5, "body": {"model": "m", "prompt": "x" * 17}, "usage": {"completion_tokens": 8}},
        {"created": 6.5, "prompt": "x" * 40, "cache_salt": None},
        {"created": 7, "prompt": [1, 2, 3, 4, 5]},
    ]
    one, longer, tokens = read(tmp_path, *rows)
    assert (one.timestamp_ms, one.input_length, one.output_length) == (5000, 5, 8), "four bytes count as a token"
    assert shared(one, longer) == 1 and len(longer.ids) == 2
    assert tokens.input_length == 5 and len(tokens.ids) == 1


def test_a_log_of_chats_shares_what_messages_have_in_common(tmp_path: Path) -> None:
    def chat(*texts: str, **more: Any) -> dict[str, Any]:
        return {"body": {"messages": [{"role": "user", "content": text} for text in texts]} | more}

    first, second, with_tools, salted = read(
        tmp_path,
        chat("Hello, how are you? " * 4),
        chat("Hello, how are you? " * 4, "And now? " * 9),
        chat("Hello, how are you? " * 4, tools=[{"name": "clock"}]),
        chat("Hello, how are you? " * 4, cache_salt="mine"),
    )
    assert shared(first, second) >= len(first.ids) - 1 > 4, "a block at the end may be filled up"
    assert shared(first, with_tools) == shared(first, salted) == 0
    assert first.timestamp_ms == 0


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"at": 1}, "no hash_ids (Mooncake), tokens (kvarve), messages, prompt or body (OpenAI): see docs/planning.md"),
        ({"tokens": [1]}, "no timestamp"),
        ({"timestamp": 0, "tokens": [1, -1]}, "tokens has what is not a token"),
        ({"timestamp": 0, "tokens": [1 << 40]}, "tokens has what is not a token"),
        ({"timestamp": 0, "tokens": [1], "salt": 7}, "salt is not a text"),
        ({"body": 7}, "body is not a JSON object"),
        ({"messages": ["hello"]}, "messages is not a list of JSON objects"),
        ({"prompt": "hello", "created": "now"}, "created is 'now', not seconds"),
        ({"prompt": "hello", "usage": {"completion_tokens": "many"}}, "output_length is 'many'"),
    ],
    ids=str,
)
def test_a_line_of_no_known_format_is_named(tmp_path: Path, bad: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, bad)
    assert str(error.value).startswith(f"trace {tmp_path / 'trace.jsonl'}, line 1: {complaint}")


# --- the small one


def test_the_small_trace_is_what_the_generator_makes() -> None:
    assert SMALL.read_text() == "".join(json.dumps(row) + "\n" for row in conversations())
    assert SMALL.stat().st_size < 8000


def test_the_small_trace_tells_how_much_memory_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    flags = ("--kv-bytes-per-token", "24KiB", "--json", out)
    rates = []
    for memory in ("200MB", "1GB", "10GB"):
        assert command(SMALL, "--device-memory", memory, *flags) == 0
        rates.append(json.loads(out.read_text())["hit_rate"])
    assert 0 < rates[0] < rates[1] < rates[2] == json.loads(out.read_text())["infinite_hit_rate"]
    assert f"{rates[2]:.1%}" in capsys.readouterr().out
