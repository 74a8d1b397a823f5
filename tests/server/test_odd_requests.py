"""Every request is answered or refused, whatever its values: none is a bug, and none ends the engine."""

import json
import random

import httpx
import pytest
from fields_of_others import OTHERS
from odd_clients import ODD
from talk import CHAT, COMPLETIONS, Body, complete

SEED = 11
NAMES = sorted({name for names in OTHERS.values() for name in names} | {"cache_priority", "skip_reading_prefix_cache"})
MESSAGES = [{"role": "user", "content": "hei"}]
OF_TOKENS = ["prompt", "messages", "tokens", "tools", "chat_template_kwargs", "model", "add_special_tokens", "tiers"]


@pytest.mark.parametrize("draws", [12, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("path", "least", "names"),
    [
        (COMPLETIONS, {"prompt": "hei", "max_tokens": 2}, NAMES),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2}, NAMES),
        ("/generate", {"text": "hei", "sampling_params": {"max_new_tokens": 2}}, NAMES),
        ("/tokenize", {}, OF_TOKENS),
        ("/detokenize", {}, OF_TOKENS),
        ("/reset_prefix_cache", {}, OF_TOKENS),
        ("/flush_cache", {}, OF_TOKENS),
    ],
)
def test_no_values_of_fields_are_a_bug(
    client: httpx.Client, path: str, least: Body, names: list[str], draws: int
) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    for _ in range(draws):
        given = {name: dice.choice(ODD) for name in dice.sample(names, dice.randrange(1, 5))}
        told(client.post(path, content=json.dumps(least | given)), given)
    for body in (b"", b"[]", b"null", b"7", b"{", b"\xff", b'{"prompt": "\\ud800"}', b'{"tokens": [1e999]}'):
        told(client.post(path, content=body), {path: body.decode("latin-1")})
    assert client.get("/health").status_code == 200
    assert complete(client, "hei", max_tokens=1)


def told(response: httpx.Response, given: Body) -> None:
    """In the form of OpenAI's, and no bug of ours."""
    assert response.status_code < 500, (given, response.text)
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text, (given, response.text)
    elif response.status_code != 200:
        error = response.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error", given
