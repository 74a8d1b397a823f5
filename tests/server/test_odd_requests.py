"""Every request is answered or refused, whatever its values: none is a bug, and none ends the engine."""

import json
import random
from typing import Any

import httpx
import pytest
from fields_of_others import OTHERS
from odd_clients import PLAIN
from talk import CHAT, COMPLETIONS, Body, complete

SEED = 11
ODD: list[Any] = [
    *PLAIN,
    *("", "a", "\0", "\ud7ff", "\U0010ffff", "a" * 2000, "{{ 1 }}", "<|end|>", "null", "١", "\u2028\n\r"),
    *([], [[]], [0], ["a"], ["\0"], [None], [1.5], [True], [{}], [1 << 70], {}, {"a": 1}, {"1": 1}, {"1": 1e308}),
    *(
        {"type": "text"},
        {"type": 7},
        {"type": "text", "text": "\0"},
        {"role": "user", "content": "\0"},
        {"function": None},
    ),
    [
        {"role": "user", "content": [{"type": "text", "text": "hei"}]},
        {"role": "tool", "content": "", "tool_call_id": ""},
    ],
    [{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "hei", "name": "\0"}],
]
NAMES = sorted({name for names in OTHERS.values() for name in names} | {"cache_priority", "skip_reading_prefix_cache"})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_value_of_any_field_is_a_bug(client: httpx.Client, path: str) -> None:
    least: Body = {"max_tokens": 2, "temperature": 0.5}
    least |= {"prompt": "hei"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hei"}]}
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    for name in NAMES:
        for value in dice.sample(ODD, 2):  # all of them found nothing, and took minutes
            told(client.post(path, content=json.dumps(least | {name: value})), {name: value})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_values_together_are_a_bug(client: httpx.Client, path: str) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    least: Body = {"prompt": "hei"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hei"}]}
    for _ in range(200):
        given = {name: dice.choice(ODD) for name in dice.sample(NAMES, dice.randrange(1, 5))}
        told(client.post(path, content=json.dumps(least | {"max_tokens": 2} | given)), given)


def test_no_values_of_a_request_of_sglangs_are_a_bug(client: httpx.Client) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    for _ in range(200):
        given: Body = {"text": "hei"} | {name: dice.choice(ODD) for name in dice.sample(NAMES, dice.randrange(1, 4))}
        params = {"max_new_tokens": 2} | {name: dice.choice(ODD) for name in dice.sample(NAMES, dice.randrange(3))}
        told(client.post("/generate", content=json.dumps({"sampling_params": params} | given)), given | params)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/reset_prefix_cache", "/flush_cache"])
def test_no_body_of_another_endpoint_is_a_bug(client: httpx.Client, path: str) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    names = ["prompt", "messages", "tokens", "tools", "chat_template_kwargs", "model", "add_special_tokens", "tiers"]
    for _ in range(60):
        given = {name: dice.choice(ODD) for name in dice.sample(names, dice.randrange(1, 4))}
        told(client.post(path, content=json.dumps(given)), given)
    for body in (b"", b"[]", b"null", b"7", b"{", b"\xff", b'{"prompt": "\\ud800"}', b'{"tokens": [1e999]}'):
        told(client.post(path, content=body), {path: body.decode("latin-1")})


def told(response: httpx.Response, given: Body) -> None:
    """In the form of OpenAI's, and no bug of ours."""
    assert response.status_code < 500, (given, response.text)
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text, (given, response.text)
    elif response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error", given


def test_the_engine_has_seen_none_of_it(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert complete(client, "hei", max_tokens=1)
