"""Why a prompt's tokens were cached or not: in its answer, the log and the metrics, and under its own salt alone."""

import logging
from typing import Any

import httpx
import pytest
from talk import COMPLETIONS, complete, metrics, stream

PREFIX = "kvarve_explained_tokens_total."


def reasons(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["kvarve"]["reasons"]
    return found


def explained(client: httpx.Client) -> dict[str, float]:
    return {name.removeprefix(PREFIX): count for name, count in metrics(client).items() if name.startswith(PREFIX)}


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


def test_the_metrics_sum_to_the_prompts(client: httpx.Client, song: str, salt: str) -> None:
    before, tokens = explained(client), metrics(client)["kvarve_prompt_tokens_total"]
    usages = [complete(client, song * more, cache_salt=salt, max_tokens=2)["usage"] for more in (1, 3, 3, 2)]
    grown = {reason: count - before[reason] for reason, count in explained(client).items()}
    assert sum(grown.values()) == metrics(client)["kvarve_prompt_tokens_total"] - tokens
    for reason, count in grown.items():
        assert count == sum(usage["kvarve"]["reasons"].get(reason, 0) for usage in usages)


def test_a_request_is_one_line_in_the_log_without_its_salt_or_text(
    client: httpx.Client, song: str, salt: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvarve"):
        answer = complete(client, song * 3, cache_salt=salt, max_tokens=2)
        client.get("/health")  # by now its line is written
    (line,) = (record.getMessage() for record in caplog.records if "prompt tokens" in record.getMessage())
    assert f"{answer['usage']['prompt_tokens']} prompt tokens" in line and "2 answered" in line
    for reason, tokens in reasons(answer).items():
        assert f"{tokens} {reason}" in line
    assert salt not in line and song[:20] not in line


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
