"""vLLM's endpoints, as its clients call them."""

from typing import Any

import httpx
import pytest
from talk import CHAT, cached, complete, refused

from kvarve import __version__
from kvarve.reference.server.serve import Server


def told(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_the_tokens_of_a_text_are_those_of_the_prompt(client: httpx.Client, song: str, ids: list[int]) -> None:
    answer = told(client.post("/tokenize", json={"prompt": song, "model": "singer", "return_token_strs": True}))
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 1024)
    assert len(answer["token_strs"]) == len(ids)
    assert told(client.post("/detokenize", json={"tokens": ids})) == {"prompt": song}
    assert told(client.post("/detokenize", json={"tokens": []})) == {"prompt": ""}
    assert told(client.get("/version")) == {"version": __version__}


def test_the_tokens_of_a_chat_are_those_that_it_is_charged_for(client: httpx.Client, song: str) -> None:
    messages = [{"role": "user", "content": song}]
    answer = told(client.post("/tokenize", json={"messages": messages}))
    usage = told(client.post(CHAT, json={"messages": messages, "max_tokens": 1}))["usage"]
    assert answer["count"] == usage["prompt_tokens"]
    assert told(client.post("/detokenize", json={"tokens": answer["tokens"]}))["prompt"].endswith("assistant:")


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("/tokenize", {}, "a request has prompt or messages, one of them"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt is not supported"),
        ("/tokenize", {"prompt": "a" * 2000}, "the prompt is too long"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ("/detokenize", {}, "tokens: Field required"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must be a list of token ids"),
        ("/detokenize", {"tokens": [300]}, "must be in the model's vocabulary of 300"),
    ],
)
def test_what_has_no_tokens_is_refused(client: httpx.Client, path: str, body: Any, complaint: str) -> None:
    assert complaint in refused(client.post(path, json=body), 400)
    assert "no model 'other'" in refused(client.post(path, json={"prompt": "a", "tokens": [], "model": "other"}), 404)


def test_a_reset_of_the_prefix_cache_is_a_flush(client: httpx.Client, server: Server, song: str, salt: str) -> None:
    complete(client, song * 2, cache_salt=salt)
    answer = told(client.post("/reset_prefix_cache"))
    assert answer["success"] is True and answer["flushed_pages"] > 0
    assert "device" not in cached(complete(client, song * 2, cache_salt=salt))
    for given in ("true", "1", "maybe", ""):
        response = client.post("/reset_prefix_cache", params={"reset_external": given})
        assert "reset_external" in refused(response, 400)
    assert told(client.post("/reset_prefix_cache", params={"reset_running_requests": "false"}))["success"]
