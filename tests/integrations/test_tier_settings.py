"""What an operator writes about a tier is read as meant, or refused with what to do."""

from typing import Any

import pytest

from kvarve.errors import ConfigError
from kvarve.integrations.tier_settings import TierSettings, read_settings

URL = "file:///var/kvarve?capacity=10GiB"
MORE = "memory://m?capacity=1GiB"


def test_one_url_is_enough_and_several_are_tiers() -> None:
    assert read_settings({"storage": URL}) == TierSettings((URL,))
    given = {"storage": [URL, MORE], "deadline_s": 2, "weights": "v3", "identity": "lora 7"}
    assert read_settings(given) == TierSettings((URL, MORE), 2, "v3", "lora 7")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "a kvarve tier: 'storage' is missing: give a URL"),
        ({"storage": URL, "deadline": 5}, "unknown setting 'deadline'; did you mean 'deadline_s'"),
        ({"storage": URL, "frobnicate": 5}, "unknown setting 'frobnicate'; known: storage, deadline_s"),
        ({"storage": 7}, "has to be a URL"),
        ({"storage": [URL, 7]}, "has to be a URL"),
        ({"storage": []}, "has to be a URL"),
        ({"storage": [URL, URL]}, "the same place"),
        ({"storage": "gopher://host"}, "no storage of the kind 'gopher'"),
        ({"storage": "file:///x?capactiy=1GiB"}, "unknown parameter 'capactiy'"),
        ({"storage": URL, "deadline_s": 0}, "above 0"),
        ({"storage": URL, "deadline_s": "5"}, "above 0"),
        ({"storage": URL, "deadline_s": True}, "above 0"),
        ({"storage": URL, "deadline_s": float("nan")}, "above 0"),
        ({"storage": URL, "weights": 3}, "'weights' is 3; it has to be a text"),
        ({"storage": URL, "identity": None}, "'identity' is None; it has to be a text"),
        ({"storage": URL, "enable_kv_events": "yes"}, "true or false"),
        ({"storage": URL, "locality": "NEAR"}, "LOCAL or REMOTE"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(given)


def test_arguments_that_the_engine_adds_are_ignored_and_those_of_the_operator_are_not() -> None:
    assert read_settings({"storage": URL, "new_in_vllm": object()}, written={"storage"}) == TierSettings((URL,))
    with pytest.raises(ConfigError, match="new_in_vllm"):
        read_settings({"storage": URL, "new_in_vllm": 1}, written={"storage", "new_in_vllm"})
