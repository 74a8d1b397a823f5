"""Several answers to one prompt, logprobs, and tools passed to the chat template."""

import json
from collections import defaultdict
from collections.abc import Iterator
from math import exp
from typing import Any

import httpx
import pytest
from talk import CHAT, COMPLETIONS, Body, cached, complete, metrics, refused, stream, text, until

from kvarve.reference.engine import turns as turns_module
from kvarve.reference.engine.batch import Batch
from kvarve.reference.server.serve import Server

# --- several answers


def test_n_answers_are_those_of_the_seeds_from_the_one_given(client: httpx.Client, song: str) -> None:
    heated = {"temperature": 2.0, "max_tokens": 6, "ignore_eos": True}
    answer = complete(client, song, n=3, seed=5, **heated)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [text(client, song, seed=seed, **heated) for seed in (5, 6, 7)]
    assert len(set(texts)) > 1
    unseeded = complete(client, song, n=8, **heated)["choices"]
    assert len({choice["text"] for choice in unseeded}) > 1


def test_the_prompt_of_n_answers_is_computed_and_counted_once(client: httpx.Client, song: str, salt: str) -> None:
    prompt = song * 3
    tokens, shared = len(prompt.encode()), 128  # the last chunk is not whole, so each answer begins with its own
    before = metrics(client)
    answer = complete(client, prompt, n=4, cache_salt=salt, max_tokens=7)
    after = metrics(client)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, 28)
    assert usage["total_tokens"] == tokens + 28
    assert cached(answer) == {}
    computed = after["kvarve_computed_tokens_total"] - before["kvarve_computed_tokens_total"]
    assert computed == tokens + 3 * (tokens - shared)
    assert after["kvarve_requests_total.done"] - before["kvarve_requests_total.done"] == 4
    assert cached(complete(client, prompt, n=2, cache_salt=salt)) == {"device": shared}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_streamed_answers_are_the_whole_ones_in_pieces(client: httpx.Client, song: str, path: str) -> None:
    asks = {"prompt": song} if path == COMPLETIONS else {"messages": [{"role": "user", "content": song}]}
    body = asks | {"n": 3, "seed": 1, "temperature": 2.0, "max_tokens": 6, "ignore_eos": True}
    whole = client.post(path, json=body).json()
    *chunks, closing = stream(client, path, body | {"stream_options": {"include_usage": True}})
    assert closing["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 18
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks) and not any(chunk["usage"] for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = [each["usage"]["completion_tokens"] for each in stream(client, path, body | {"stream_options": options})]
    assert counted == sorted(counted) and counted[0] < 6 and counted[-1] == 18 and len(set(counted)) > 6, (
        "as it goes on"
    )
    said: dict[int, str] = defaultdict(str)
    for choice in choices:
        delta = choice if path == COMPLETIONS else choice["delta"]
        said[choice["index"]] += delta.get("text") or delta.get("content") or ""
    expected = [one["text"] if path == COMPLETIONS else one["message"]["content"] for one in whole["choices"]]
    assert [said[index] for index in range(3)] == expected
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        if path == CHAT:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)  # they come side by side


DONE, FAILED, ABORTED = (f"kvarve_requests_total.{how}" for how in ("done", "failed", "aborted"))


def ends(client: httpx.Client, before: dict[str, float], requests: int) -> dict[str, float]:
    """How these requests ended, once all have: a count for each way."""

    def grown(now: dict[str, float]) -> dict[str, float]:
        return {how: now[how] - before[how] for how in (DONE, FAILED, ABORTED)}

    after = until(client, lambda now: sum(grown(now).values()) >= requests)
    assert after["kvarve_requests_running"] == after["kvarve_requests_waiting"] == after["kvarve_leases"] == 0
    return grown(after)


def test_a_client_that_disconnects_ends_all_n_answers(client: httpx.Client, song: str) -> None:
    before = metrics(client)
    body = {"prompt": song, "stream": True, "max_tokens": 900, "ignore_eos": True, "n": 3}
    with client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()  # dropping the generator closes the connection
        assert next(lines).startswith("data: ")
    assert ends(client, before, 3) == {DONE: 0, FAILED: 0, ABORTED: 3}


def test_one_of_n_that_fails_fails_them_all(
    server: Server, client: httpx.Client, song: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = turns_module.forward
    prompts: list[int] = []

    def fails_together(*args: Any) -> Any:
        raise MemoryError("no room for all of them")

    def fails(model: Any, workspace: Any, ids: Any) -> Any:
        if ids.shape[1] > 1:
            prompts.append(ids.shape[1])
            if len(prompts) == 2:
                raise MemoryError("no room for that")
        return forward(model, workspace, ids)

    monkeypatch.setattr(Batch, "forward", fails_together)  # so each is computed alone
    monkeypatch.setattr(turns_module, "forward", fails)
    body = {"prompt": song, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "n": 3}
    before = metrics(client)
    assert "no room for that" in refused(client.post(COMPLETIONS, json=body), 500)
    assert ends(client, before, 3) == {DONE: 0, FAILED: 1, ABORTED: 2}
    prompts.clear()
    before = metrics(client)
    chunks = stream(client, COMPLETIONS, body)
    assert "no room for that" in chunks[-1]["error"]["message"]
    assert ends(client, before, 3) == {DONE: 0, FAILED: 1, ABORTED: 2}


@pytest.mark.parametrize("own_server", [{"max_running": 2, "max_waiting": 1}], indirect=True)
def test_n_answers_are_all_taken_or_none(own_client: httpx.Client, song: str) -> None:
    assert "must be at most 3" in refused(own_client.post(COMPLETIONS, json={"prompt": song, "n": 4}), 400)
    body = {"prompt": song, "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 2}
    with own_client.stream("POST", COMPLETIONS, json=body) as first:
        lines = first.iter_lines()  # dropping the generator closes the connection
        next(lines)
        assert "try again later" in refused(own_client.post(COMPLETIONS, json={"prompt": song, "n": 2}), 503)
        now = metrics(own_client)
        assert now["kvarve_requests_running"] + now["kvarve_requests_waiting"] <= 2
    until(own_client, lambda now: now["kvarve_requests_total.aborted"] == 2)
    assert len(complete(own_client, song, n=3, max_tokens=1)["choices"]) == 3


# --- how likely


def test_a_completions_logprobs_are_as_openai_writes_them(client: httpx.Client, song: str, ids: list[int]) -> None:
    song_letters, size = song[:13], len(song[:13].encode())
    answer = complete(client, song * 2, max_tokens=size, logprobs=3)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(column) for column in logprobs.values()} == {size}
    letters = [letter for letter in song_letters for _ in letter.encode()]
    assert logprobs["tokens"] == [letter if len(letter.encode()) == 1 else "\ufffd" for letter in letters]
    assert logprobs["text_offset"] == [i for i, letter in enumerate(song_letters) for _ in letter.encode()]
    for token, logprob, top in zip(
        *[logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")], strict=True
    ):
        assert logprob <= 0
        assert max(top.values()) == top[token] == logprob  # it is greedy
        assert len(top) <= 3
        assert sum(map(exp, top.values())) <= 1 + 1e-6
    assert complete(client, song * 2, max_tokens=size)["choices"][0] == choice | {"logprobs": None}


def test_a_token_that_is_none_of_the_likeliest_is_named_beside_them(client: httpx.Client, song: str) -> None:
    answer = complete(client, song * 2, max_tokens=12, temperature=5.0, seed=2, logprobs=1, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    tops = logprobs["top_logprobs"]
    assert {len(top) for top in tops} == {1, 2}
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True):
        assert token in top
        assert top[token] == logprob or token == "\ufffd"  # two tokens may read alike
    alone = complete(client, song, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [
        {token: logprob} for token, logprob in zip(alone["tokens"], alone["token_logprobs"], strict=True)
    ]


def test_logprobs_are_the_models_own_whatever_the_temperature(client: httpx.Client, song: str) -> None:
    def first(**settings: Any) -> list[dict[str, float]]:
        found: list[dict[str, float]] = complete(client, song * 2, max_tokens=1, logprobs=5, **settings)["choices"][0][
            "logprobs"
        ]["top_logprobs"]
        return found

    assert first() == first(temperature=0.3, top_k=1) == first(temperature=4.0, top_p=0.01)


def chat_logprobs(client: httpx.Client, song: str, **more: Any) -> list[Body]:
    body = {"messages": [{"role": "user", "content": song * 2}], "temperature": 0, "max_tokens": 6} | more
    answer = client.post(CHAT, json=body).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert set(logprobs) == {"content", "refusal"}
    assert len(logprobs["content"]) == answer["usage"]["completion_tokens"]
    return list(logprobs["content"])


@pytest.mark.parametrize("alternatives", [0, 4])
def test_a_chats_logprobs_are_as_openai_writes_them(client: httpx.Client, song: str, alternatives: int) -> None:
    for entry in chat_logprobs(client, song, logprobs=True, top_logprobs=alternatives):
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == alternatives
        if alternatives:
            assert entry["top_logprobs"][0] == {key: entry[key] for key in ("token", "logprob", "bytes")}
            falling = [other["logprob"] for other in entry["top_logprobs"]]
            assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("stop", ["åkern", "never; "])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_logprobs_are_the_whole_ones_and_none_is_lost_or_said_twice(
    client: httpx.Client, song: str, path: str, stop: str | None
) -> None:
    asks = {"prompt": song * 2, "logprobs": 2}
    if path == CHAT:
        asks = {"messages": [{"role": "user", "content": song * 2}], "logprobs": True, "top_logprobs": 2}
    body = asks | {"max_tokens": 16, "temperature": 0, "stop": stop}
    whole = client.post(path, json=body).json()["choices"][0]["logprobs"]
    found = [chunk["choices"][0]["logprobs"] or {} for chunk in stream(client, path, body)]
    for key in ["content"] if path == CHAT else whole:
        assert [entry for logprobs in found for entry in logprobs.get(key, ())] == whole[key]


# --- tools

TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool.function.name }}: {{ tool.function.description }}]{{ "\\n" }}{% endfor %}
{%- for message in messages %}{{ message.role }}
{%- if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}: {{ message.content or "nothing" }}
{%- for call in message.tool_calls or [] %}
{%- if call.function.arguments is mapping %}<{{ call.id }} {{ call.function.name }}
{%- for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>
{%- else %}<{{ call.function.name }} '{{ call.function.arguments }}'>{% endif %}
{%- endfor %}{{ "\\n" }}{% endfor %}
{%- if thoughtful is defined %}({{ thoughtful }}) {% endif %}assistant:"""

TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"says {name}", "parameters": {"type": "object"}}}
    for name in ("depth", "tide")
]
OFFERED = "[depth: says depth]\n[tide: says tide]\n"
QUESTION = {"role": "user", "content": "How deep is the river, and how deep was it when the tide was in?"}


@pytest.fixture
def teller(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, with a template that writes of tools."""
    monkeypatch.setattr(server.engine.model.tokenizer, "chat_template", TEMPLATE)
    yield server


def rendered(client: httpx.Client, expected: str, **body: Any) -> None:
    """A chat is rendered as this very prompt: it has as many tokens, and the next token has the same chances."""
    answer = client.post(CHAT, json={"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 5} | body)
    assert answer.status_code == 200, answer.text
    same = complete(client, expected, max_tokens=1, logprobs=5)
    assert answer.json()["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    (found,) = answer.json()["choices"][0]["logprobs"]["content"]
    (known,) = same["choices"][0]["logprobs"]["top_logprobs"]
    assert {one["logprob"] for one in found["top_logprobs"]} >= {*known.values()}
    assert found["logprob"] in known.values()


def test_tools_are_offered_to_the_template_unless_none_is_wanted(teller: Server, client: httpx.Client) -> None:
    expected = f"user: {QUESTION['content']}\nassistant:"
    rendered(client, OFFERED + expected, messages=[QUESTION], tools=TOOLS)
    rendered(client, expected, messages=[QUESTION], tools=TOOLS, tool_choice="none")


def test_a_conversation_with_tools_reaches_the_template(teller: Server, client: httpx.Client) -> None:
    def call(number: int, arguments: str) -> Body:
        return {"id": f"c{number}", "type": "function", "function": {"name": "depth", "arguments": arguments}}

    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call(1, json.dumps({"at": "noon", "å": 3}))]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"fathoms": 2}'},
        {"role": "assistant", "content": "Hm.", "tool_calls": [call(2, "{at: noon"), call(3, "[1]"), call(4, "{}")]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "no such place"}]},
    ]
    expected = (
        f'user: {QUESTION["content"]}\nassistant: nothing<c1 depth at=noon å=3>\ntool(c1): {{"fathoms": 2}}\n'
        "assistant: Hm.<depth '{at: noon'><depth '[1]'><c4 depth>\ntool(c2): no such place\n(very) assistant:"
    )
    rendered(client, expected, messages=messages, chat_template_kwargs={"thoughtful": "very"})
