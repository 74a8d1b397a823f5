"""Settings of kvarve's connector in an engine's configuration."""

from typing import Any

import pytest

from kvarve.errors import ConfigError
from kvarve.integrations.extra_config import extra_config

WHERE = "kv_connector_extra_config"


def test_names_are_those_of_kvarves_settings() -> None:
    given = {
        "host_memory": "1GiB",
        "storage": ["file:///fast", "mooncake://far"],
        "write_policy": "write_back",
        "prefetch_base_s": 3,
        "verify_host": False,
        "weights": "mine",
    }
    found = extra_config(given, WHERE)
    assert found.cache.host_memory == 1 << 30 and found.cache.device_memory == 0
    assert found.cache.storages == ("file:///fast", "mooncake://far")
    policies = found.cache.policies
    assert (policies.write_policy, policies.prefetch_base_s) == ("write_back", 3.0)
    assert not policies.verify_host and found.weights == "mine"
    assert extra_config({"host_memory": 1 << 20, "storage": "file:///x"}, WHERE).cache.storages == ("file:///x",)
    assert extra_config({"host_memory": 1 << 20}, WHERE).cache.storages == ()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "'host_memory' is missing: give"),
        ({"host_memory": "1GiB", "host_memroy": 1}, "unknown setting 'host_memroy'; did you mean 'host_memory'"),
        ({"host_memory": "1GiB", "zzz": 1}, "unknown setting 'zzz'; known: host_memory, storage"),
        ({"host_memory": "much"}, "much"),
        ({"host_memory": 0}, "'host_memory' is 0"),
        ({"host_memory": True}, "'host_memory' is True"),
        ({"host_memory": [1]}, "it has to be a size"),
        ({"host_memory": "1GiB", "storage": []}, "it has to be a URL"),
        ({"host_memory": "1GiB", "storage": [1]}, "it has to be a URL"),
        ({"host_memory": "1GiB", "write_policy": 1}, "'write_policy' is 1; it has to be a str"),
        ({"host_memory": "1GiB", "selective_uses": True}, "it has to be a int"),
        ({"host_memory": "1GiB", "prefetch_base_s": "2"}, "it has to be a float"),
        ({"host_memory": "1GiB", "write_policy": "now"}, "unknown write policy 'now'"),
        ({"host_memory": "1GiB", "weights": 3}, "it has to be a text"),
        ({"host_memory": "1GiB", "snapshot_gap": 3}, "unknown setting 'snapshot_gap'"),
    ],
)
def test_a_setting_that_cannot_work_is_one_clear_error(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        extra_config(given, WHERE)
    assert str(error.value).startswith(f"{WHERE}: ") and told in str(error.value)
