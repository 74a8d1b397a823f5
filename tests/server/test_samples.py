"""n answers to one prompt: it is counted once, as the first of them found it, wherever it is told."""

import httpx
from talk import COMPLETIONS, complete, metrics, stream, until

HITS, PROMPTS = "kvarve_cached_tokens_total", "kvarve_prompt_tokens_total"
WHY = "kvarve_explained_tokens_total."
SAMPLES = 4


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
