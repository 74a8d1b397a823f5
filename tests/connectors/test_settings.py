"""What an operator writes in an engine's configuration is read as meant, or refused with what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from doc_blocks import ROOT
from kvarve.connectors.engine_settings import ConnectorSettings, HiCacheSettings, TierSettings
from kvarve.errors import ConfigError
from kvarve.settings.values import settings_of

URL = "file:///var/kvarve?capacity=10GiB"
MORE = "memory://m?capacity=1GiB"
connector = partial(ConnectorSettings.read, where="kv_connector_extra_config")


def test_a_connectors_names_are_those_of_kvarves_settings() -> None:
    policies = {"write_policy": "back", "storage_wait": "3s", "verify_host": False}
    urls = ["file:///fast", "mooncake://far"]
    found = connector({"host_memory": "1GiB", "storage": urls, "weights": "v1"} | policies)
    assert (found.cache.host_memory, found.cache.device_memory, found.weights) == (1 << 30, 0, "v1")
    assert found.cache.storages == tuple(urls)
    assert {name: getattr(found.cache.policies, name) for name in policies} == policies
    assert connector({"host_memory": 1 << 20}).cache.storages == ()


@pytest.mark.parametrize(
    ("page", "kind"), [("vllm", ConnectorSettings), ("vllm", TierSettings), ("sglang", HiCacheSettings)]
)
def test_each_key_of_an_engines_config_has_a_row_on_its_page(page: str, kind: Any) -> None:
    rows = (ROOT / "docs" / f"{page}.md").read_text().split("## Settings")
    wanted = {f"`{name}`" for name in settings_of(kind)}
    assert any(all(name in part.partition("\n## ")[0] for name in wanted) for part in rows[1:])


def test_one_url_of_a_tier_is_enough_and_several_are_tiers() -> None:
    assert TierSettings.read({"storage": URL}) == TierSettings((URL,))
    given = {"storage": [URL, MORE], "deadline_s": 2, "weights": "v3", "identity": "lora 7"}
    assert TierSettings.read(given) == TierSettings((URL, MORE), 2, "v3", "lora 7")
    assert TierSettings.read({"storage": URL, "new_in_vllm": object()}, written={"storage"}) == TierSettings((URL,))
    with pytest.raises(ConfigError, match="new_in_vllm"):
        TierSettings.read({"storage": URL, "new_in_vllm": 1}, written={"storage", "new_in_vllm"})


def test_sglangs_own_keys_are_accepted_and_ours_are_read() -> None:
    names = ["backend_name", "module_path", "class_name", "interface_v1", "hicache_storage_pass_prefix_keys"]
    theirs = dict.fromkeys([*names, "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token"], 1)
    assert HiCacheSettings.read({**theirs, "storage": URL}) == HiCacheSettings((URL,))
    ours = {"storage": [URL, "mooncake://m:1"], "deadline_s": 2, "weights": "w", "model": "m", "buffer_memory": "8MiB"}
    assert HiCacheSettings.read({**theirs, **ours}) == HiCacheSettings(
        (URL, "mooncake://m:1"), 2.0, "m", "w", "", 8 << 20
    )


@pytest.mark.parametrize(
    ("read", "given", "told"),
    [
        *(
            (connector, given if given == {} else {"host_memory": "1GiB"} | given, f"kv_connector_extra_config: {told}")
            for given, told in (
                ({}, "'host_memory' is missing: it must be"),
                ({"host_memroy": 1}, "unknown setting 'host_memroy': did you mean host_memory"),
                ({"zzz": 1}, "unknown setting 'zzz'; known: host_memory, storage"),
                ({"host_memory": "much"}, ".*much"),
                ({"host_memory": 0}, "'host_memory' is 0"),
                ({"host_memory": True}, "'host_memory' is True"),
                ({"host_memory": [1]}, ".* it must be a size"),
                ({"storage": []}, ".* it must be a URL"),
                ({"storage": [1]}, ".* it must be a URL"),
                ({"write_policy": 1}, "'write_policy' is 1; it must be a text"),
                ({"fetch_at_least": True}, ".* it must be a whole number"),
                ({"host_share": "2"}, ".* it must be a number"),
                ({"write_policy": "now"}, "write_policy must be through, .*, got 'now'"),
                ({"keep_states": 3}, "unknown setting 'keep_states'"),
            )
        ),
        *(
            (TierSettings.read, given if given == {} else {"storage": URL} | given, f"a kvarve tier: .*{told}")
            for given, told in (
                ({}, "'storage' is missing: it must be a URL"),
                ({"deadline": 5}, "unknown setting 'deadline': did you mean deadline_s"),
                ({"storage": [URL, URL]}, "the same place"),
                ({"storage": "gopher://host"}, "unknown storage 'gopher'"),
                ({"storage": "file:///x?capactiy=1GiB"}, "unknown parameter 'capactiy'"),
                ({"deadline_s": 0}, "above 0"),
                ({"deadline_s": float("nan")}, "above 0"),
                ({"identity": None}, "'identity' is None; it must be a text"),
                ({"enable_kv_events": "yes"}, "true or false"),
                ({"locality": "NEAR"}, "LOCAL or REMOTE"),
            )
        ),
        (HiCacheSettings.read, None, "extra config: 'storage' is missing: it must be a URL, such as 'file:///"),
        (HiCacheSettings.read, {"storage": [URL, 3]}, "or a list"),
        (HiCacheSettings.read, {"storage": URL, "deadline_s": 10}, "above 0 and below 10"),
        (HiCacheSettings.read, {"storage": URL, "deadline_s": True}, "'deadline_s' is True"),
        (HiCacheSettings.read, {"storage": URL, "weights": 7}, "'weights' is 7; it must be a text"),
        (HiCacheSettings.read, {"storage": URL, "buffer_memory": 7}, "at least 1 MiB"),
        (
            HiCacheSettings.read,
            {"file_path_prefix": "/3fs", "file_size": 1, "numjobs": 2, "entries": 8, "metadata_server_url": "h:1"},
            'file_path_prefix, file_size, numjobs, entries, metadata_server_url cannot be set .*"storage": "hf3fs:///',
        ),
        (
            HiCacheSettings.read,
            {"master_server_address": "m:50051", "prefetch_threshold": 64, "protocol": "rdma"},
            'master_server_address, protocol cannot be set .*"storage": "mooncake://',
        ),
    ],
)
def test_what_cannot_be_is_one_error_that_says_what_to_do(read: Callable[[Any], Any], given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(given)
