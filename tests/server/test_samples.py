"""n answers to one prompt: it is counted once, as the first of them found it, wherever it is told."""

import json
from typing import Any

import httpx
from talk import COMPLETIONS, complete, metrics, stream, until

from kvarve.keys import group_name, root_key
from kvarve.server.live import Live
from kvarve.server.serve import Server

HITS, PROMPTS = "kvarve_cached_tokens_total", "kvarve_prompt_tokens_total"
WHY = "kvarve_explained_tokens_total."
SAMPLES = 4


def generate(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    params = {"temperature": 1, "max_new_tokens": 3, "n": SAMPLES}
    response = client.post("/generate", json={"sampling_params": params} | body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = [each["meta_info"] for each in response.json()]
    return found


def test_each_of_four_answers_says_what_was_cached_of_their_prompt(client: httpx.Client, song: str, salt: str) -> None:
    cold, warm = (generate(client, text=song * 3, cache_salt=salt) for _ in range(2))
    assert [each["cached_tokens"] for each in cold] == [0] * SAMPLES
    assert [each["cached_tokens_details"]["device"] for each in cold] == [0] * SAMPLES
    assert [each["cached_tokens"] for each in warm] == [128] * SAMPLES


def test_the_metrics_count_a_prompt_once_as_its_client_saw_it(client: httpx.Client, song: str, salt: str) -> None:
    before = metrics(client)
    asked = {"cache_salt": salt, "n": SAMPLES, "max_tokens": 3, "temperature": 1}
    usages = [complete(client, song * 3, **asked)["usage"] for _ in range(2)]
    *_, last = stream(client, COMPLETIONS, asked | {"prompt": song * 3, "stream_options": {"include_usage": True}})
    usages.append(last["usage"])
    now = until(client, lambda now: now["kvarve_requests_running"] == 0)
    grown = {name: now[name] - before[name] for name in now if name in before}
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert grown[PROMPTS] == grown["kvarve_request_prompt_tokens_sum"] == prompts
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert sum(grown[f"{HITS}.{tier}"] for tier in ("device", "host", "storage")) == cached == 2 * 128
    assert grown["kvarve_request_computed_tokens_sum"] == prompts - cached
    told = {name.removeprefix(WHY): tokens for name, tokens in grown.items() if name.startswith(WHY) and tokens}
    assert told.pop("another_sample") == (SAMPLES - 1) * prompts
    assert told == {reason: sum(usage["kvarve"]["reasons"].get(reason, 0) for usage in usages) for reason in told}
    assert sum(told.values()) == prompts


def test_the_live_page_shows_the_share_that_its_clients_saw(
    server: Server, client: httpx.Client, song: str, salt: str
) -> None:
    def shown() -> tuple[int, int]:
        live.sample()
        history = live.told()["history"]
        return sum(history["prompt_tokens"]), sum(history["cached_tokens"]["device"])

    live = Live(server.engine, "singer", tokenizing=lambda: 0, rejected=dict)
    prompts, cached = shown()
    asked = {"cache_salt": salt, "n": SAMPLES, "max_tokens": 2}
    usages = [complete(client, song * 3, **asked)["usage"] for _ in range(3)]
    until(client, lambda now: now["kvarve_requests_running"] == 0)
    after = shown()
    assert (after[0] - prompts, after[1] - cached) == (sum(each["prompt_tokens"] for each in usages), 2 * 128)
    own = json.dumps([salt, None])  # as the server combines `cache_salt` and `extra_key`
    group = group_name(root_key(server.engine.cache.identity.fingerprint(), own))
    assert [each["hits"] for each in live.told()["hottest"] if each["group"] == group] == [2]
