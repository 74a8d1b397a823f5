"""How the tests send requests to a server, and parse its answers."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

Body = dict[str, Any]
LONG_S = 45.0  # less than a test of a mutant has
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def complete(client: httpx.Client, prompt: str | list[int], **more: Any) -> Body:
    response = client.post(COMPLETIONS, json={"prompt": prompt, "temperature": 0} | more)
    assert response.status_code == 200, response.text
    return explained(dict(response.json()))


def explained(answer: Body) -> Body:
    """An answer, or a chunk of one; if it has a usage, every token of its prompt has one reason."""
    if usage := answer.get("usage"):
        reasons = usage["kvarve"]["reasons"]
        assert sum(reasons.values()) == usage["prompt_tokens"] and all(tokens > 0 for tokens in reasons.values())
        hits = {tier: reasons.get(f"hit_{tier}", 0) for tier in ("device", "host", "storage")}
        assert hits == usage["kvarve"]["cached_tokens"]
    return answer


def text(client: httpx.Client, prompt: str | list[int], **more: Any) -> str:
    return str(complete(client, prompt, **more)["choices"][0]["text"])


def cached(answer: Body) -> dict[str, int]:
    tiers: dict[str, int] = answer["usage"]["kvarve"]["cached_tokens"]
    assert sum(tiers.values()) == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return {tier: tokens for tier, tokens in tiers.items() if tokens}


def events(response: httpx.Response) -> Iterator[Body]:
    """The events of a stream, which has to end as OpenAI's do."""
    last = ""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ")
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                yield explained(json.loads(last))
    assert last == "[DONE]"


def stream(client: httpx.Client, path: str, body: Body) -> list[Body]:
    with client.stream("POST", path, json={"temperature": 0, "stream": True} | body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def metrics(client: httpx.Client) -> dict[str, float]:
    """Every sample, by its name and the values of its labels in the order of their names."""
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]
    return {
        ".".join([sample.name, *(value for _, value in sorted(sample.labels.items()))]): sample.value
        for sample in samples
    }


def until(client: httpx.Client, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Ask for the metrics until something holds."""
    end = time.monotonic() + LONG_S
    while not holds(now := metrics(client)):
        assert time.monotonic() < end, f"it does not come: {now}"
        time.sleep(0.01)
    return now


def refused(response: httpx.Response, status: int) -> str:
    """The message of an error, which is in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["code"] and "\n" not in error["message"]
    return str(error["message"])
