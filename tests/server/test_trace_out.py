"""The trace that a server writes of its prompts is one that the planner reads, and has no text in it."""

import json
from pathlib import Path

import httpx
import pytest
from servers import CHUNK, PAGE, settings
from talk import complete

from kvarve.errors import ConfigError
from kvarve.planner import SimulationConfig, read_trace
from kvarve.planner.replayer import replay
from kvarve.reference.server.serve import Server
from kvarve.reference.server.trace_out import TraceOut

PROMPT = [3 + at % 50 for at in range(5 * CHUNK + 3)]


def test_prompts_share_as_many_blocks_as_they_begin_alike_under_one_salt(tmp_path: Path) -> None:
    traces = []
    for run in range(2):
        out = TraceOut(tmp_path / f"{run}.jsonl", PAGE)
        for prompt, salt in ((PROMPT, ""), (PROMPT[:100], ""), (PROMPT, "theirs"), ([1, *PROMPT], "")):
            out.add([prompt], salt)
        out.close()
        traces.append([json.loads(line) for line in (tmp_path / f"{run}.jsonl").read_text().splitlines()])
    first, shorter, theirs, other = (row["hash_ids"] for row in traces[0])
    assert len(first) == len(PROMPT) // PAGE and shorter == first[: 100 // PAGE]
    assert not {*first} & {*theirs} and not {*first} & {*other}
    assert not {*first} & {*traces[1][0]["hash_ids"]}, "each run has a key of its own"
    assert {key for row in traces[0] for key in row} == {"timestamp", "input_length", "hash_ids", "block_tokens"}


def test_a_trace_replays_to_the_hits_that_the_server_had(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "trace.jsonl"
    prompts = [PROMPT, PROMPT[: 3 * CHUNK + 9], [7, *PROMPT]]
    with (
        Server(settings(checkpoint, trace_out=path)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        usages = [complete(client, prompt, max_tokens=1)["usage"] for prompt in prompts]
    hit = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    config = SimulationConfig(64 << 20, kv_bytes_per_token=1024, page_tokens=PAGE, chunk_tokens=CHUNK)
    report = replay(path, config)
    assert report.requests == len(prompts) and report.prompt_tokens == sum(map(len, prompts))
    assert sum(report.hit_tokens.values()) == hit == 3 * CHUNK


def test_a_foreign_file_stays_and_a_full_disk_ends_it_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "old").write_text("kept")
    for name in ("old", "no/folder"):
        with pytest.raises(ConfigError, match=r"--trace-out: .* cannot be written"):
            TraceOut(tmp_path / name, PAGE)
    assert (tmp_path / "old").read_text() == "kept"
    for blocks in (PAGE, PAGE):
        again = TraceOut(tmp_path / "again", blocks)
        again.add([PROMPT], "")
        again.close()
    assert len([*read_trace(tmp_path / "again", PAGE)]) == 2, "a server that starts again goes on with it"
    with (tmp_path / "again").open("a") as cut:
        cut.write('{"timesta')
    again = TraceOut(tmp_path / "again", PAGE)
    again.add([PROMPT], "")
    again.close()
    assert (tmp_path / "again").read_text().splitlines()[2:-1] == ['{"timesta'], "no line is joined to what was cut"
    with pytest.raises(ConfigError, match="no trace in blocks of 32 tokens"):
        TraceOut(tmp_path / "again", 2 * PAGE)
    out = TraceOut(Path("/dev/full"), PAGE)
    for _ in range(3):
        out.add([PROMPT], "")
    assert caplog.text.count("ends here") == 1
