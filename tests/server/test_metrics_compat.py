"""vLLM's and SGLang's metrics, by name: each moves when what it counts happens to a real server, or has a reason."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from names_of_others import CONSTANT, NONE_HERE, SGLANG, VLLM
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from servers import settings
from talk import COMPLETIONS, LONG_S, complete, events

from kvarve.core.policies import Policies
from kvarve.errors import ConfigError
from kvarve.metrics import parse_compat
from kvarve.reference.server.serve import Server
from kvarve.testing.faulty_storage import FaultyStorage, Rule

FEW = {  # memory for little more than one long answer, and for the fetch of one prompt at a time
    "device_memory": 400 << 10,
    "host_memory": 4 << 20,
    "max_running": 2,
    "deterministic": False,
    "metrics_compat": "vllm,sglang",
    "policies": Policies(storage_wait="all", host_share=0.025),
}


class Life:
    """A server's life, and all values that each of its series had."""

    def __init__(self, client: httpx.Client, song: str) -> None:
        self.client, self.song = client, song
        self.values: dict[str, set[float]] = defaultdict(set)
        self.labels: dict[str, list[dict[str, str]]] = defaultdict(list)

    def look(self) -> list[Sample]:
        text = self.client.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        for sample in samples:
            self.labels[sample.name].append(sample.labels)
            for series in (sample.name, *(f"{sample.name} {name}={value}" for name, value in sample.labels.items())):
                self.values[series].add(sample.value)
        return samples

    def until(self, name: str, least: float = 1.0, **labels: str) -> None:
        """Look until a series has a value of at least this."""
        end = time.monotonic() + LONG_S
        while not any(
            sample.name == name and labels.items() <= sample.labels.items() and sample.value >= least
            for sample in self.look()
        ):
            assert time.monotonic() < end, f"{name} {labels} does not come"
            time.sleep(0.01)

    def complete(self, salt: str, times: int = 3, **more: Any) -> dict[str, Any]:
        answer = complete(self.client, self.song * times, cache_salt=salt, **{"max_tokens": 4} | more)
        self.look()
        return answer

    def flush(self, tiers: str = "device,host") -> None:
        self.client.post("/flush_cache", params={"tiers": tiers})
        self.look()

    @contextmanager
    def streams(self, salt: str, tokens: int) -> Iterator[list[httpx.Response]]:
        """Two long answers under way."""
        body = {"prompt": self.song, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        with ExitStack() as ends:
            yield [
                ends.enter_context(
                    self.client.stream("POST", COMPLETIONS, json=body | {"cache_salt": f"{salt} {number}"})
                )
                for number in range(2)
            ]


@pytest.fixture(scope="module")
def life(checkpoint: Path, song: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    storage = tmp_path_factory.mktemp("compat") / "pages"
    with (
        Server(settings(checkpoint, storage, **FEW)) as server,
        httpx.Client(base_url=server.url, timeout=LONG_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        attached = server.engine.cache.worker.attached
        assert attached is not None
        faulty = FaultyStorage(attached.storage.inner)  # type: ignore[union-attr]
        attached.storage.inner = faulty  # type: ignore[union-attr]
        life = Life(client, song)
        life.look()
        _hits_from_each_tier(life)
        _requests_that_wait(life, faulty, pool.submit)
        _rejections_and_failures(life, faulty)
        life.look()
        yield life


def _hits_from_each_tier(life: Life) -> None:
    life.complete("a")
    life.complete("a")
    life.flush("device")
    life.complete("a")
    life.flush()
    usage = life.complete("a", stop=[life.song[2]])["usage"]
    assert usage["kvarve"]["cached_tokens"]["storage"] == 128
    with life.streams("long", 950) as (first, second):  # more than fits, so that one is preempted
        [*events(second)], [*events(first)]


def _requests_that_wait(life: Life, faulty: FaultyStorage, begin: Callable[..., Any]) -> None:
    for salt in ("b", "c"):
        life.complete(salt)
    life.flush()
    waiting = "vllm:num_requests_kv_fetch_by_stage"
    faulty.stall("exists")
    asked = [begin(life.complete, "b")]
    life.until(waiting, stage="in_progress")
    asked.append(begin(life.complete, "c"))  # its question waits for the one under way
    life.until(waiting, stage="waiting_to_start")
    life.until("vllm:num_requests_waiting_by_reason", reason="deferred")
    faulty.release()
    for each in asked:
        each.result()
    life.flush()
    faulty.stall("get")
    asked = [begin(life.complete, salt) for salt in ("b", "c")]
    life.until("sglang:storage_prefetch_deferred_tokens_total")
    life.until("vllm:kv_offload_cpu_cache_usage_perc", 1e-9)
    faulty.release()
    for each in asked:
        each.result()
    life.flush()
    with life.streams("shorter", 600):  # every place is taken
        life.until("vllm:num_requests_running", 2.0)
        asked = [begin(life.complete, "b"), begin(life.complete, "new")]
        life.until("vllm:num_requests_waiting_by_reason", reason="capacity")
        life.until(waiting, stage="completed_waiting")
    for each in asked:  # the clients of the long answers have gone
        each.result()


def _rejections_and_failures(life: Life, faulty: FaultyStorage) -> None:
    assert life.client.post(COMPLETIONS, json={"prompt": 5.5}).status_code == 400
    life.until("vllm:request_success_total", finished_reason="abort")
    life.flush()
    for name in [*faulty._stored_names]:
        faulty.flip(name, 200)
    life.complete("c")
    life.flush()
    faulty.dead = True
    life.complete("d")  # what it stores fails
    life.until("vllm:kv_offload_tiering_cascade_job_failures_total")
    faulty.dead = False
    life.until("kvarve_storage_up")
    life.complete("e")
    life.flush()
    faulty.rules = [Rule("raise", "get")]
    life.complete("e")
    faulty.rules = []


@pytest.mark.parametrize(("prefix", "names"), [("vllm:", VLLM), ("sglang:", SGLANG)])
def test_a_metric_of_theirs_moves(life: Life, prefix: str, names: dict[str, tuple[str, ...]]) -> None:
    for name, labels in names.items():
        base = f"{prefix}{name}"
        series = base if base in life.values else f"{base}_count"
        assert series in life.values, f"{base} is not told"
        for label in labels or ("",):
            found = life.values[f"{series} {label}" if label else series]
            assert len(found) > 1, f"{series} {label} was always {found}"


def test_no_name_of_theirs_is_told_that_is_not_in_the_lists(life: Life) -> None:
    ends = ("_bucket", "_sum", "_count")
    told = {name for name in life.values if " " not in name and name.startswith(("vllm:", "sglang:"))}
    told -= {name for name in told if name.endswith(ends) and not name.endswith("_total")}
    known = {f"vllm:{name}" for name in VLLM} | {f"sglang:{name}" for name in SGLANG} | CONSTANT.keys()
    assert told <= known
    assert not known & NONE_HERE.keys() and not life.values.keys() & NONE_HERE.keys()
    assert all(NONE_HERE.values()) and all(CONSTANT.values())


def test_their_samples_have_their_labels(life: Life) -> None:
    for name, labels in life.labels.items():
        if name.startswith("vllm:"):
            assert all(each["model_name"] == "singer" and each["engine"] == "0" for each in labels), name
        elif name.startswith("sglang:"):
            assert all(each["model_name"] == "singer" for each in labels), name
    (facts, *_) = life.labels["vllm:cache_config_info"]
    assert facts["block_size"] == "16" and facts["enable_prefix_caching"] == "True"
    assert {each["status"] for each in life.labels["http_requests_total"]} >= {"2xx", "4xx"}


def test_what_never_changes_is_one_series_of_one_value(life: Life) -> None:
    for name in CONSTANT:
        assert len(life.values[name]) == 1 and all(each == life.labels[name][0] for each in life.labels[name])


@pytest.mark.parametrize("what", ["%s_tokens", "mamba_%s_states"])
def test_a_host_that_pools_share_is_not_full_after_the_first_prompt(life: Life, what: str) -> None:
    """A dashboard divides what is used by the whole, which does not grow with it."""
    used, total = (life.values[f"sglang:hicache_host_{what % part}"] for part in ("used", "total"))
    assert 0 < max(used) < max(total)


def test_prompts_have_the_same_tokens_under_all_names(life: Life) -> None:
    last: dict[str, float] = {}
    by_source = defaultdict[str, float](float)
    for sample in life.look():
        last[sample.name] = sample.value
        by_source[sample.name] += sample.value
    prompts = last["kvarve_prompt_tokens_total"]
    assert last["vllm:prompt_tokens_total"] == last["sglang:prompt_tokens_total"] == prompts
    assert by_source["vllm:prompt_tokens_by_source_total"] == by_source["kvarve_explained_tokens_total"] == prompts
    assert by_source["vllm:prompt_tokens_cached_by_source_total"] == last["vllm:prompt_tokens_cached_total"]
    assert by_source["kvarve_cached_tokens_total"] == last["vllm:prompt_tokens_cached_total"]
    assert by_source["vllm:request_success_total"] == by_source["kvarve_finished_requests_total"]


def test_a_server_without_the_setting_has_kvarves_names_alone(client: httpx.Client) -> None:
    text = client.get("/metrics").text
    assert "\nkvarve_" in text and "vllm:" not in text and "sglang:" not in text and "\nhttp_" not in text


def test_an_unknown_server_is_refused() -> None:
    assert parse_compat("sglang, vllm") == ("sglang", "vllm") and parse_compat("") == ()
    with pytest.raises(ConfigError, match="known: vllm, sglang"):
        parse_compat("vllm,tgi")
