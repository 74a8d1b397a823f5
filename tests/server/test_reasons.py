"""Why a prompt's tokens were cached or not: in its answer, the log and the metrics, and under its own salt alone."""

from typing import Any

import httpx
from talk import COMPLETIONS, complete, stream


def reasons(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["kvarve"]["reasons"]
    return found


def test_an_answer_says_why_its_prompt_was_cached_or_not(client: httpx.Client, song: str, salt: str) -> None:
    body = {"prompt": song * 3, "cache_salt": salt, "max_tokens": 2}
    cold, warm = (reasons(complete(client, **body)) for _ in range(2))
    assert warm == {"hit_device": 128, "below_grid": cold["below_grid"]}
    assert cold.pop("below_grid") and sum(cold.values()) == 128 and {*cold} <= {"never_seen", "unknown"}
    client.post("/flush_cache", params={"tiers": "device"})
    assert reasons(complete(client, **body))["hit_host"] == 128
    assert reasons(complete(client, **body, skip_reading_prefix_cache=True))["not_read"] == 128
    client.post("/flush_cache", params={"tiers": "device,host"})
    last = stream(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})[-1]
    assert reasons(last)["hit_storage"] == 128


def test_a_salt_is_told_nothing_of_what_another_one_asked(client: httpx.Client, song: str, salt: str) -> None:
    """A prompt that another salt has asked is as new as one that none has."""
    asked, new = song * 3, song[::-1] * 3
    for _ in range(2):
        complete(client, asked, cache_salt=f"{salt} another", max_tokens=2)
    told = [reasons(complete(client, text, cache_salt=salt, max_tokens=2)) for text in (asked, new)]
    client.post("/flush_cache")
    complete(client, asked, cache_salt=f"{salt} another", max_tokens=2)
    told.append(reasons(complete(client, asked, cache_salt=f"{salt} a third", max_tokens=2)))
    for found in told:
        assert {*found} <= {"never_seen", "unknown", "below_grid"}
