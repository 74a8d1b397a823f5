"""SGLang's endpoints, as its clients call them."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fields_of_others import OTHERS
from talk import CHAT, COMPLETIONS, Body, cached, complete, refused, stream, text

from kvarve import __version__
from kvarve.reference.server.api import Refused, parse
from kvarve.reference.server.fields import HARMLESS
from kvarve.reference.server.generate import GenerateRequest, SamplingParams
from kvarve.reference.server.serve import Server

GENERATE = "/generate"
GREEDY = {"temperature": 0, "max_new_tokens": 4}


def generate(client: httpx.Client, **body: Any) -> Any:
    response = client.post(GENERATE, json={"sampling_params": GREEDY} | body)
    assert response.status_code == 200, response.text
    return response.json()


def pieces(client: httpx.Client, **body: Any) -> list[Body]:
    """The events of a stream, which has to end as SGLang's do."""
    with client.stream("POST", GENERATE, json={"sampling_params": GREEDY, "stream": True} | body) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# --- /generate


def test_a_text_is_continued_and_the_meta_info_counts_its_tokens(
    client: httpx.Client, song: str, ids: list[int], salt: str
) -> None:
    said, tokens = text(client, song * 2, max_tokens=4), len(ids) * 2
    cold = generate(client, text=song * 2, cache_salt=salt, rid="mine")
    assert (cold["text"], len(cold["output_ids"])) == (said, 4)
    meta = cold["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", tokens, 4)
    assert (meta["finish_reason"], meta["cached_tokens"]) == ({"type": "length", "length": 4}, 0)
    assert meta["e2e_latency"] > 0
    warm = generate(client, input_ids=ids * 2, cache_salt=salt)
    assert (warm["text"], warm["output_ids"]) == (said, cold["output_ids"])
    assert warm["meta_info"]["cached_tokens"] == 64
    assert warm["meta_info"]["cached_tokens_details"] == {"device": 64, "host": 0, "storage": 0}


def test_each_event_of_a_stream_has_the_whole_answer_so_far(client: httpx.Client, song: str, salt: str) -> None:
    whole = generate(client, text=song * 2, extra_key=salt)
    events = pieces(client, text=song * 2, extra_key=salt, stream_options={"include_usage": True})
    assert events[-1]["text"] == whole["text"] and events[-1]["output_ids"] == whole["output_ids"]
    assert all(after["text"].startswith(before["text"]) for before, after in pairwise(events))
    assert [event["meta_info"]["completion_tokens"] for event in events] == [*range(1, 5)]
    assert {event["meta_info"]["cached_tokens"] for event in events} == {64}
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 3
    assert "index" not in events[0]


def test_a_batch_is_answered_by_a_list_in_its_order(client: httpx.Client, song: str, ids: list[int]) -> None:
    prompts = [song * 2, song[:20]]
    alone = [text(client, prompt, max_tokens=4) for prompt in prompts]
    assert [one["text"] for one in generate(client, text=prompts)] == alone
    assert generate(client, input_ids=[ids * 2, ids[:5]])[0]["text"] == alone[0]
    each = generate(client, text=prompts, sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2}], rid=["a", "b"])
    assert [one["meta_info"]["completion_tokens"] for one in each] == [4, 2]
    assert [one["meta_info"]["id"] for one in each] == ["a", "b"]
    twice = generate(client, text=prompts, sampling_params=GREEDY | {"n": 2})
    assert [one["text"] for one in twice] == [alone[0], alone[0], alone[1], alone[1]]
    last = {event["index"]: event["text"] for event in pieces(client, text=prompts)}
    assert [last[0], last[1]] == alone


def test_a_prompt_of_no_new_tokens_is_computed_for_later_ones(client: httpx.Client, song: str, salt: str) -> None:
    nothing = generate(client, text=song * 2, cache_salt=salt, sampling_params={"max_new_tokens": 0})
    assert (nothing["text"], nothing["output_ids"], nothing["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert cached(complete(client, song * 2, cache_salt=salt)) == {"device": 64}


def test_an_answer_says_what_ended_it(client: httpx.Client, song: str, ids: list[int]) -> None:
    def ended(**params: Any) -> Any:
        return generate(client, text=song, sampling_params=GREEDY | params)["meta_info"]["finish_reason"]

    assert ended(stop=["never", "rn, "], max_new_tokens=30) == {"type": "stop", "matched": "rn, "}
    assert ended(stop_token_ids=[ids[4]]) == {"type": "stop", "matched": ids[4]}


def test_logprobs_are_those_of_the_completions(client: httpx.Client, song: str) -> None:
    asked = {"text": song, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
    meta = generate(client, **asked)["meta_info"]
    theirs = complete(client, song, max_tokens=4, logprobs=2)["choices"][0]["logprobs"]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(theirs["token_logprobs"])
    assert meta["output_token_logprobs_length"] == 4
    assert all(entry[2] is None for entry in meta["output_token_logprobs"])
    spelt = generate(client, **asked, return_text_in_logprobs=True)["meta_info"]
    assert [entry[2] for entry in spelt["output_token_logprobs"]] == theirs["tokens"]
    for top, best in zip(spelt["output_top_logprobs"], theirs["top_logprobs"], strict=True):
        assert len(top) == 2 and {entry[2] for entry in top} <= best.keys()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "a request has text or input_ids, one of them"),
        ({"text": "a", "input_ids": [1]}, "a request has text or input_ids, one of them"),
        ({"input_ids": [[1], "a"]}, "the input_ids has texts and token ids"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.0.temperature"),
        (
            {"text": "a", "sampling_params": {"max_tokens": 5}},
            "sampling_params.max_tokens is not supported: max_new_to",
        ),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_tokens must be at least 1, got -1"),
        ({"text": "a", "sampling_params": [{}, {}]}, "2 sampling_params for 1 prompts"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same for all prompts"),
        ({"text": "a", "max_new_tokens": 5}, "max_new_tokens is not supported: sampling_params.max_new_tokens is its"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len is not supported"),
        ({"text": "a", "stream_options": {"continuous_usage_stats": True}}, "stream_options is not supported"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num needs return_logprob"),
        ({"text": "a", "rid": ["a", "b"]}, "rid must be a text, or a list of one for each answer"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "with max_tokens 5000 the prompt is too long"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_line(client: httpx.Client, body: Body, told: str) -> None:
    assert told in refused(client.post(GENERATE, json=body), 400)


def test_every_field_of_theirs_has_one_fate() -> None:
    known = {*GenerateRequest.model_fields, *SamplingParams.model_fields}
    for name in OTHERS["sglang_generate"]:
        fates = [name in known, name in GenerateRequest.refused or name in SamplingParams.refused, name in HARMLESS]
        assert any(fates), name
    for kind in (GenerateRequest, SamplingParams):
        assert not {*kind.model_fields} & {*kind.refused} and not {*kind.refused} & HARMLESS
    ignored = parse(GenerateRequest, b'{"text": "a", "session_id": "7", "sampling_params": {"odd": 1}}').unread()
    assert [*ignored] == ["session_id", "sampling_params.odd"]
    with pytest.raises(Refused):
        parse(GenerateRequest, b"[]")


# --- chats and completions


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_of_openais_form_say_where_tokens_were_cached(
    client: httpx.Client, song: str, salt: str, path: str
) -> None:
    body: Body = {"max_tokens": 2, "cache_salt": salt, "temperature": 0, "return_cached_tokens_details": True}
    body |= {"prompt": song * 2} if path == COMPLETIONS else {"messages": [{"role": "user", "content": song * 2}]}
    nothing = {"cached_tokens_details": {"device": 0, "host": 0, "storage": 0}}
    assert client.post(path, json=body).json()["sglext"] == nothing
    first, *_, usage = stream(client, path, body | {"stream_options": {"include_usage": True}})
    assert "sglext" not in first and "sglext" not in usage
    *_, last = stream(client, path, body)
    nothing_said = [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]
    assert last["choices"] == (nothing_said if path == COMPLETIONS else [])
    assert last["sglext"] == {"cached_tokens_details": {"device": 64, "host": 0, "storage": 0}}
    assert "sglext" not in client.post(path, json=body | {"return_cached_tokens_details": False}).json()


# --- what the server is


def test_the_model_and_the_server_tell_what_they_are(client: httpx.Client, server: Server) -> None:
    for path in ("/model_info", "/get_model_info"):
        told = client.get(path).json()
        assert told["model_path"] == told["tokenizer_path"] == server.settings.model
        facts = told["served_model_name"], told["is_generation"], told["model_type"]
        assert facts == ("singer", True, "qwen3_5_text")
    assert client.get("/health_generate").status_code == 200
    for path in ("/server_info", "/get_server_info"):
        told = client.get(path).json()
        assert (told["page_size"], told["context_length"], told["version"]) == (16, 1024, __version__)
        assert told["hicache_storage_backend"].startswith("file:///")
        assert told["internal_states"] == [{"num_running_reqs": 0, "num_waiting_reqs": 0}]
