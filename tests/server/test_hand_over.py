"""One server prefills, another decodes: the ticket goes over in `kv_transfer_params`, the pages through a storage."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import CHUNK, settings
from talk import CHAT, COMPLETIONS, Body, cached, complete, refused, stream

from kvarve.reference.server.api import LONGEST_HAND_OVER_S
from kvarve.reference.server.serve import Server

SHARED = 2 * CHUNK  # tokens of three songs, in whole chunks
PREFILL: Body = {"max_tokens": 1, "kv_transfer_params": {"hand_over_s": 60}}


def handed_over(client: httpx.Client, prompt: str, **more: Any) -> Body:
    """The ticket of the prefill server for the one that decodes; stores of its pages may still be in flight."""
    return dict(complete(client, prompt, **PREFILL | more)["kv_transfer_params"])


def test_what_one_server_prefills_another_decodes_with_the_same_answer(
    checkpoint: Path, tmp_path: Path, song: str, salt: str
) -> None:
    with ExitStack() as opened:
        servers = [opened.enter_context(Server(settings(checkpoint, tmp_path / "pages"))) for _ in range(2)]
        client, decode = (opened.enter_context(httpx.Client(base_url=each.url, timeout=60)) for each in servers)
        alone = complete(client, song * 3, max_tokens=4, cache_salt="another")
        given = handed_over(client, song * 3, cache_salt=salt)
        assert {*given} == {"ticket"}
        answer = complete(decode, song * 3, max_tokens=4, cache_salt=salt, kv_transfer_params=given)
    assert answer["choices"] == alone["choices"]
    assert cached(answer) == {"storage": SHARED}
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_the_ticket_beside_the_reason_why_it_ended(client: httpx.Client, song: str, path: str) -> None:
    asks = {"prompt": song * 3} if path == COMPLETIONS else {"messages": [{"role": "user", "content": song * 3}]}
    whole = client.post(path, json=asks | PREFILL).json()["kv_transfer_params"]["ticket"]
    *chunks, last = stream(client, path, asks | PREFILL)
    assert last["choices"][0]["finish_reason"] == "length"
    ticket = last["kv_transfer_params"]["ticket"]
    assert ticket | {"until_s": 0} == whole | {"until_s": 0}
    assert not any("kv_transfer_params" in chunk for chunk in chunks)


def test_a_long_answer_does_not_change_for_which_prompt_its_ticket_is(client: httpx.Client, song: str) -> None:
    short = complete(client, song * 3, **PREFILL)["kv_transfer_params"]["ticket"]
    long = complete(client, song * 3, **PREFILL | {"max_tokens": 110, "ignore_eos": True})
    assert long["kv_transfer_params"]["ticket"] | {"until_s": 0} == short | {"until_s": 0}


def test_a_prompt_of_several_answers_is_handed_over_once(client: httpx.Client, song: str) -> None:
    body = {"prompt": song * 3, "n": 3} | PREFILL
    tickets = [
        chunk["kv_transfer_params"]["ticket"]
        for chunk in stream(client, COMPLETIONS, body)
        if "kv_transfer_params" in chunk
    ]
    assert len(tickets) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ranks": 2}, "another sharding"),
        ({"model": "ab" * 32}, "another model"),
        ({"key": "ab" * 32}, "another beginning"),
        ({"more": 1}, "exactly these fields"),
        ({"until_s": 1e300}, "until_s must be a smaller number"),
    ],
    ids=str,
)
def test_a_ticket_of_something_else_is_one_clear_error(
    client: httpx.Client, song: str, changes: Body, told: str
) -> None:
    ticket = complete(client, song * 3, **PREFILL)["kv_transfer_params"]["ticket"]
    body = {"prompt": song * 3, "max_tokens": 1, "kv_transfer_params": {"ticket": ticket | changes}}
    for streaming in (False, True):
        response = client.post(COMPLETIONS, json=body | {"stream": streaming})
        assert told in refused(response, 400)
        assert response.json()["error"]["param"] == "kv_transfer_params"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"do_remote_decode": True}, "has no 'do_remote_decode' here: send {\"hand_over_s\": SECONDS}"),
        ({"hand_over_s": LONGEST_HAND_OVER_S + 1}, "should be less than or equal to 86400"),
        ({"ticket": "of paper"}, "a ticket must be an object"),
        ([], "kv_transfer_params: Input should be"),
    ],
    ids=str,
)
def test_what_is_no_hand_over_is_refused(client: httpx.Client, given: Any, told: str) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "hei", "max_tokens": 1, "kv_transfer_params": given})
    assert told in refused(response, 400)
    assert response.json()["error"]["param"] == "kv_transfer_params"


def test_a_request_that_does_not_ask_for_a_ticket_gets_none(client: httpx.Client) -> None:
    for given in (None, {}, {"ticket": None, "hand_over_s": None}):
        assert "kv_transfer_params" not in complete(client, "hei", max_tokens=1, kv_transfer_params=given)


@pytest.mark.parametrize("own_server", [{"deterministic": False}], indirect=True)
def test_a_ticket_is_refused_where_nothing_can_be_read_with_it(
    client: httpx.Client, own_client: httpx.Client, song: str
) -> None:
    """Else the prompt would be computed cold, and nothing would tell."""
    body = {"prompt": song * 3, "max_tokens": 1, "kv_transfer_params": handed_over(client, song * 3)}
    assert "attach one" in refused(own_client.post(COMPLETIONS, json=body), 400)
    assert "attach one" in refused(own_client.post(COMPLETIONS, json={"prompt": "hei"} | PREFILL), 400)
    response = client.post(COMPLETIONS, json=body | {"skip_reading_prefix_cache": True})
    assert "leave out skip_reading_prefix_cache" in refused(response, 400)
