"""The replayer runs the product's own core, so the results of small traces can be worked out by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from traces import BLOCK, PAGE_BYTES, RECORD_BYTES, branching, command, line, settings, trace

from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.planner import SimulationConfig, replay


def test_with_room_for_everything_the_core_finds_what_a_set_of_ids_finds(tmp_path: Path) -> None:
    report = replay(trace(tmp_path, *branching(300)), settings(10_000))
    assert report.requests == 300
    assert report.hit_tokens == {"device": report.infinite_hit_tokens, "host": 0, "storage": 0}
    assert 0.3 < report.hit_rate == report.infinite_hit_rate < 0.9
    assert report.slots == {"device.kv": 10_000}
    assert report.evicted == {"device.kv": 0}
    assert report.moved_bytes == {}


def test_a_short_last_block_has_an_id_or_has_none(tmp_path: Path) -> None:
    lines = [line([1], 100, hash_ids=[1, 2]), line([1], 100), line([1], 100), line([1], 100, hash_ids=[1, 2])]
    report = replay(trace(tmp_path, *lines), settings(64, page_tokens=64, chunk_tokens=64))
    # Of the 612 tokens nine pages are full, and only the id says that the ninth was here before.
    assert report.hit_tokens["device"] == 512 + 512 + 576
    assert report.infinite_hit_tokens == 3 * 512
    assert report.unique_blocks == 1


def test_the_least_recently_used_prompt_goes_first_and_from_its_tail(tmp_path: Path) -> None:
    lines = [line([1, 2, 3]), line([4, 5, 6]), line([1, 2, 3]), line([7, 8]), line([1, 2, 3]), line([4, 5, 6])]
    report = replay(trace(tmp_path, *lines), settings(6))
    # 7 and 8 take the slots of 6 and 5; then 4 is still here, and needs 5 and 6 anew.
    assert report.hit_tokens["device"] == (3 + 3 + 1) * BLOCK
    assert report.evicted == {"device.kv": 4}


def test_what_left_the_device_is_found_on_the_host_and_then_in_storage(tmp_path: Path) -> None:
    a, b, c = line([1, 2]), line([3, 4]), line([5, 6])
    on_host = replay(trace(tmp_path, a, b, a), settings(2, host=4))
    assert on_host.hit_tokens == {"device": 0, "host": 2 * BLOCK, "storage": 0}
    assert on_host.moved_bytes == {"device_to_host": 4 * PAGE_BYTES, "host_to_device": 2 * PAGE_BYTES}
    in_storage = replay(trace(tmp_path, a, b, c, a), settings(2, host=4, storage=6))
    assert in_storage.hit_tokens == {"device": 0, "host": 0, "storage": 2 * BLOCK}
    assert in_storage.moved_bytes["host_to_storage"] == 6 * RECORD_BYTES
    assert in_storage.moved_bytes["storage_to_host"] == 2 * RECORD_BYTES
    assert in_storage.evicted == {"device.kv": 6, "host.kv": 4, "storage": 0}
    assert in_storage.asked == {"exists": 8, "put": 6, "get": 2} and in_storage.storage_price is None
    priced = replay(trace(tmp_path, a, b, c, a), settings(2, host=4, storage=6, storage_prices=f"1000,100,{1 << 30}"))
    assert priced.storage_price == pytest.approx(6 * 1 + (8 + 2) * 0.1 + 2 * RECORD_BYTES)


def test_a_page_far_into_a_prompt_saves_more_computing_than_a_first_one(tmp_path: Path) -> None:
    path = trace(tmp_path, line([1, 2, 3]), line([1, 2, 4]))
    assert replay(path, settings(9)).saved_rate == 2 / 6
    assert replay(path, settings(9, cost_doubles_at=BLOCK)).saved_rate == (1 + 2) / (2 * (1 + 2 + 3))


def test_a_recurrent_model_resumes_only_where_a_state_was_kept(tmp_path: Path) -> None:
    lines = [line([1, 2, 3, 4]), line([1, 2, 5]), line([1, 2, 6]), line([1, 2, 3, 4])]
    room = {"device_memory": 1 << 30, "kv_bytes_per_token": 1024}
    without_chunks = Policies(keep_states="ends,branches")
    attention = replay(trace(tmp_path, *lines), SimulationConfig(**room))
    assert attention.hit_tokens["device"] == (2 + 2 + 4) * BLOCK
    hybrid = replay(trace(tmp_path, *lines), SimulationConfig(**room, state_bytes=1 << 17, policies=without_chunks))
    assert hybrid.hit_tokens["device"] == (0 + 2 + 4) * BLOCK, "the branch is known after the first that took it"
    small = replay(trace(tmp_path, *lines), SimulationConfig(**room, state_bytes=4096, policies=without_chunks))
    assert small.hit_tokens["device"] == (2 + 2 + 4) * BLOCK, "states that take little are kept on the way"
    roomy = replay(trace(tmp_path, *lines), SimulationConfig(**room, state_bytes=4096))
    assert roomy.hit_tokens["device"] == (2 + 2 + 4) * BLOCK, "there is room for the states of all chunks"
    every = Policies(keep_states=f"ends,branches,every:{BLOCK}")
    often = replay(trace(tmp_path, *lines), SimulationConfig(**room, state_bytes=4096, policies=every))
    assert often.hit_tokens["device"] == (2 + 2 + 4) * BLOCK
    assert {*often.slots} == {"device.kv", "device.state"}


def test_pages_are_shared_and_kept_in_whole_chunks_as_by_a_server(tmp_path: Path) -> None:
    config = settings(4, chunk_tokens=2 * BLOCK)
    apart = replay(trace(tmp_path, *(line(ids) for ids in ([1, 2], [1, 3], [1, 4], [1, 2]))), config)
    assert apart.hit_tokens["device"] == 0, "a block is known only in its chunk, so four slots hold two of the prompts"
    lines = [line([1, 2, 3]), line([4, 5, 6]), line([1, 2, 3])]
    again = replay(trace(tmp_path, *lines), config)
    assert again.hit_tokens["device"] == 2 * BLOCK, "four slots hold the whole chunks of both"


@pytest.mark.parametrize("policy", ["through", "through:2", "back"])
def test_no_policy_finds_more_than_there_ever_was_and_replays_are_equal(tmp_path: Path, policy: str) -> None:
    path = trace(tmp_path, *branching(60))
    beside = {"state_bytes": 2048, "window_tokens": 600, "window_bytes_per_token": 64}
    config = settings(12, host=24, storage=100, policies=Policies(write_policy=policy), **beside)
    report = replay(path, config)
    assert 0 < sum(report.hit_tokens.values()) <= report.infinite_hit_tokens
    assert replay(path, config) == report


def test_a_trace_may_be_packed_and_cut_short(tmp_path: Path) -> None:
    lines = branching(50)
    plain = replay(trace(tmp_path, *lines), settings(100))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace.jsonl").read_bytes()))
    steps: list[tuple[int, int]] = []
    assert replay(packed, settings(100), advance=lambda done, size: steps.append((done, size))) == plain
    assert len(steps) == 50
    assert steps[-1][0] == packed.stat().st_size
    assert replay(packed, settings(100), limit=20).requests == 20


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{]\n", "not JSON"),
        ('{"timestamp": 1}\n', "no input_length, hash_ids"),
        (line([1], timestamp="soon"), "timestamp is 'soon'"),
        (line([1], input_length=0), "input_length is 0"),
        (line([1], input_length=10**18), "input_length is 1000000000000000000"),
        (line([1], output_length=-1), "output_length is -1"),
        (line([1], hash_ids=["a"]), "hash_ids is not a list of whole numbers"),
        (line([1], hash_ids=[0, 1, 2]), "3 hash_ids do not stand for 513 tokens"),
        (line([0, 5, 5]), "hash id 5 follows another block here than in a line above"),
        ('{"timestamp": 1, "input_length": \udcff}\n', "not JSON"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, bad: dict[str, Any] | str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    text = json.dumps(line([0])) + "\n" + (bad if isinstance(bad, str) else json.dumps(bad) + "\n")
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as error:
        replay(path, settings(16))
    assert str(error.value).startswith(f"trace {path}, line 2: {complaint}")


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: cannot be read: No such file or directory"):
        replay(tmp_path / "nowhere", settings(16))
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path, settings(16))
    with pytest.raises(ConfigError, match="must hold requests, and has none"):
        replay(trace(tmp_path, "\n"), settings(16))
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(json.dumps(line(range(300))).encode())[:-12])
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(broken, settings(16))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"device_memory": 1}, "1 B of device memory is too little"),
        ({"host_memory": 1}, "1 B of host memory is too little"),
        ({"storage_memory": 1 << 30}, "storage needs host memory"),
        ({"kv_bytes_per_token": 0}, "needs something to cache"),
        ({"window_tokens": 100}, "a window needs both"),
        ({"state_bytes": -1}, "state bytes cannot be below zero"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"page_tokens": 64, "chunk_tokens": 100}, "chunks of 100 tokens must be whole pages of 64"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SimulationConfig(**({"device_memory": 1 << 40} | wrong))


@pytest.mark.parametrize(
    "setting", [{"storage_wait": "none"}, {"storage_deadline_s": 1.0}, {"hash_sample": 0.5}], ids=str
)
def test_a_setting_that_changes_nothing_in_a_replay_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"a replay cannot depend on the setting {min(setting)}"):
        settings(16, policies=Policies(**setting))


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = trace(tmp_path, *branching(60)), tmp_path / "report.json"
    memory = ("--device-memory", "1GiB", "--host-memory", "2GiB", "--storage-memory", "1TiB")
    assert command(path, *memory, "--kv-bytes-per-token", "1KiB", "--limit", "40", "--json", out) == 0
    report = json.loads(out.read_text())
    assert report["requests"] == 40
    assert report["config"]["kv_bytes_per_token"] == 1024
    assert report["hit_rate"] == report["infinite_hit_rate"] > 0
    printed = capsys.readouterr()
    assert f"{report['hit_rate']:.1%}" in printed.out
    assert "storage" in printed.out
    assert printed.err == ""


def test_storing_pages_that_no_request_uses_pauses_and_the_report_says_so(tmp_path: Path) -> None:
    path = trace(tmp_path, *(line([10 * at + block for block in range(4)], at=at) for at in range(150)))
    always = replay(path, settings(8, host=8, storage=64, policies=Policies(offload_pays_at=0.0)))
    governed = replay(path, settings(8, host=8, storage=64))
    assert always.paused_requests == always.used_bytes == 0 and always.stored_bytes == 600 * PAGE_BYTES
    assert governed.paused_requests > 80
    assert governed.stored_bytes < always.stored_bytes / 2
    assert governed.moved_bytes["host_to_storage"] < always.moved_bytes["host_to_storage"] / 2
