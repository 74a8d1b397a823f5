"""Numbers in, Prometheus' text out."""

from collections import defaultdict
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from kvarve.core.observe.histograms import Ages, Histogram
from kvarve.core.observe.reasons import Reason
from kvarve.metrics import Metrics, Snapshot
from kvarve.storage import StorageUsage
from kvarve.transfer.flows import LANES, Flow

CACHE = dict.fromkeys(
    (
        *(
            "leases",
            "fetched",
            "loaded",
            "backed_up",
            "stored",
            "bad_storage",
            "bad_host",
            "failed",
            "late",
            "given_up",
        ),
        *("strays", "dropped_failed", "dropped_down", "dropped_evicted", "dropped_unpaying", "dropped_full"),
        *("dropped_read_only", "stored_bytes", "used_bytes", "used_tokens", "fetching_tokens", "deferred_tokens"),
        *("offload_paused", "offload_used_share", "stores_backing_off", "stores_refused"),
        *("lane_stuck_s.host-to-storage", "memory_bytes.device", "memory_bytes.host", "page_bytes.window-24"),
        *("slot_bytes.device.window-24", "pinned.device.window-24", "lookback.window-24"),
    ),
    1.0,
) | dict.fromkeys(
    ("duplicates", "uncached", "over_share", "page_tokens", "slots.device.window-24", "used.device.window-24"), 2.0
)


def a_snapshot(storage: StorageUsage | None) -> Snapshot:
    ttft = Histogram((0.5, 1.0))
    for seconds in (0.1, 0.5, 0.7, 9.0):
        ttft.observe(seconds)
    return Snapshot(
        model='a "model"\n',
        version="1",
        up=True,
        running=1,
        waiting={"admission": 2},
        ends={"stop": 3},
        prompt_tokens=4,
        computed_tokens=5,
        recomputed_tokens=7,
        output_tokens=6,
        preempted=1,
        reasons={Reason.HIT_HOST: 7, Reason.NEVER_SEEN: 3},
        histograms=defaultdict(Histogram, ttft_s=ttft),
        cache=CACHE,
        ages=Ages(1, 2, lambda: 0.0),
        flows={lane: Flow(()) for lane in LANES.values()},
        storage=storage,
    )


def test_every_metric_is_ours_and_says_what_it_means() -> None:
    text = Metrics(lambda: a_snapshot(StorageUsage(1, 2, 3, 4))).text().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families) > 20
    for family in families:
        assert family.name.startswith("kvarve")
        assert family.documentation.endswith(".")
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert samples["kvarve_info"].labels["model"] == 'a "model"\n'
    assert samples["kvarve_slots"].labels == {"tier": "device", "pool": "window-24"}
    assert 'kvarve_cached_tokens_total{tier="host"} 7.0\n' in text
    assert 'kvarve_explained_tokens_total{reason="never_seen"} 3.0\n' in text
    assert samples["kvarve_ttft_seconds_sum"].value == 10.3


def test_without_a_storage_nothing_is_said_of_one() -> None:
    assert b"kvarve_storage" not in Metrics(lambda: a_snapshot(None)).text()
    assert b"kvarve_storage_capacity" not in Metrics(lambda: a_snapshot(StorageUsage(1, 2, None, 4))).text()


def test_sources_of_vllm_sum_to_the_prompts() -> None:
    reasons = {Reason.HIT_DEVICE: 1, Reason.HIT_HOST: 2, Reason.HIT_STORAGE: 4, Reason.NEVER_SEEN: 8}
    snapshot = replace(a_snapshot(None), reasons=reasons, prompt_tokens=15, storage_kinds=("redis",))
    text = Metrics(lambda: snapshot, "vllm").text().decode()
    labels = 'engine="0",model_name="a \\"model\\"\\n",source='
    for source, tokens in {"local_compute": 8, "local_cache_hit": 1, "external_kv_transfer": 6}.items():
        assert f'vllm:prompt_tokens_by_source_total{{{labels}"{source}"}} {tokens}.0' in text
    for source, tokens in {"device": 1, "host": 2, "disk": 0, "external_unspecified": 4}.items():
        assert f'vllm:prompt_tokens_cached_by_source_total{{{labels}"{source}"}} {tokens}.0' in text
