"""The server from outside: requests of a client, and their answers."""

from typing import Any

import httpx
import pytest
from talk import CHAT, COMPLETIONS, Body, cached, complete, metrics, refused, stream, text

# --- answers


def test_a_completion_has_the_form_that_openai_gives_it(client: httpx.Client, song: str, salt: str) -> None:
    answer = complete(client, song * 2, max_tokens=10, cache_salt=salt, model="singer", user="me", unheard_of=1)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "singer"
    assert answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert choice == {"index": 0, "text": song[:9], "logprobs": None, "finish_reason": "length"}
    usage = answer["usage"]
    tokens = len((song * 2).encode())
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (tokens, 10, tokens + 10)
    assert 0 < usage["kvarve"]["ttft_ms"] <= usage["kvarve"]["total_ms"]
    assert complete(client, song)["usage"]["completion_tokens"] == 16, "unless it asks for more or less"


def test_a_text_and_its_tokens_are_the_same_prompt(client: httpx.Client, song: str, ids: list[int], salt: str) -> None:
    first = text(client, song * 2, cache_salt=salt, max_tokens=4)
    for prompt in (ids * 2, [ids * 2], [song * 2]):
        answer = complete(client, prompt, cache_salt=salt, max_tokens=4)
        assert answer["choices"][0]["text"] == first
        assert cached(answer) == {"device": 64}


def test_a_chat_is_written_by_the_models_template(client: httpx.Client, song: str, salt: str) -> None:
    body = {"temperature": 0, "max_tokens": 8, "cache_salt": salt}
    messages = [{"role": "system", "content": song}, {"role": "user", "content": song}]
    response = client.post(CHAT, json=body | {"messages": messages})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    rendered = f"system: {song}\nuser: {song}\nassistant:"
    assert answer["usage"]["prompt_tokens"] == len(rendered.encode())
    assert answer["choices"][0]["message"]["content"] == text(client, rendered, max_tokens=8)
    parts = [{"type": "text", "text": song[:5]}, {"type": "text", "text": song[5:]}]
    messages[0]["content"] = parts  # type: ignore[assignment]
    joined = client.post(CHAT, json=body | {"messages": messages}).json()
    assert joined["usage"]["prompt_tokens"] == len(rendered.encode()) + 1


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_completion_is_the_whole_one_in_pieces(
    client: httpx.Client, song: str, salt: str, include_usage: bool
) -> None:
    body = {"prompt": song * 2, "max_tokens": 12, "cache_salt": salt}
    whole = complete(client, **body)
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = stream(client, COMPLETIONS, body | options)
    if include_usage:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        assert cached(last) == {"device": 64}
    assert all("usage" not in chunk or chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len(choices) > 6


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: httpx.Client, song: str) -> None:
    body = {"messages": [{"role": "user", "content": song * 2}], "max_completion_tokens": 10, "temperature": 0}
    whole = client.post(CHAT, json=body).json()
    chunks = stream(client, CHAT, body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    said = "".join(delta.get("content", "") for delta in deltas)
    assert said == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("extra_tokens", [1, 8, 22, 29])
def test_a_stream_never_yields_half_a_character(
    client: httpx.Client, song: str, ids: list[int], extra_tokens: int
) -> None:
    prompt = (ids * 3)[: len(ids) + extra_tokens]  # it may end within a character, and so may the answer
    chunks = stream(client, COMPLETIONS, {"prompt": prompt, "max_tokens": 16})
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    within = song.encode()[extra_tokens % len(song.encode())] & 0xC0 == 0x80  # the rest of a character is not one
    assert not any("\ufffd" in piece for piece in pieces[1 if within else 0 : -1])
    assert "".join(pieces) == text(client, prompt, max_tokens=16)
    assert within or "".join(pieces).rstrip("\ufffd") in song * 5


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("åkern", "hvarv på "),  # 6 tokens, the first of them half a character
        (["never", "ern"], "hvarv på åk"),
        ("h", ""),
    ],
)
def test_an_answer_ends_before_its_stop_text(client: httpx.Client, song: str, stop: Any, said: str) -> None:
    answer = complete(client, song * 2, max_tokens=100, stop=stop)
    assert answer["choices"][0]["text"] == said
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = stream(client, COMPLETIONS, {"prompt": song * 2, "max_tokens": 100, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said


def test_top_k_and_min_p_can_leave_only_the_likeliest_token(client: httpx.Client, song: str) -> None:
    greedy = text(client, song * 2, max_tokens=8)
    for limit in ({"top_k": 1}, {"top_k": 3, "min_p": 0.99}):
        assert text(client, song * 2, max_tokens=8, temperature=5.0, seed=1, **limit) == greedy
    assert text(client, song * 2, max_tokens=8, temperature=5.0, seed=1) != greedy


def test_a_stop_token_ends_an_answer_and_is_no_text(client: httpx.Client, song: str, ids: list[int]) -> None:
    size = len(song.partition(";")[0].encode())
    answer = complete(client, song * 2, max_tokens=100, stop_token_ids=[ids[size]], ignore_eos=True)
    assert answer["choices"][0]["text"] == song.partition(";")[0]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == size + 1


def test_an_answer_cannot_end_before_its_min_tokens(client: httpx.Client, song: str, ids: list[int]) -> None:
    body = {"max_tokens": 100, "stop_token_ids": [ids[0]], "logit_bias": {str(ids[0]): 100}}
    assert text(client, song * 2, **body) == ""
    answer = complete(client, song * 2, min_tokens=5, **body)
    assert answer["usage"]["completion_tokens"] == 6
    assert song[0] not in answer["choices"][0]["text"]


def test_a_bias_and_penalties_change_what_is_said(client: httpx.Client, song: str, ids: list[int]) -> None:
    first, second = (str(token) for token in ids[:2])
    assert song[0] not in text(client, song * 2, max_tokens=4, logit_bias={first: -100})
    assert text(client, song * 2, max_tokens=4, logit_bias={second: 100}) == 4 * song[1]
    heated = {"max_tokens": 8, "temperature": 2.0, "seed": 1}
    said = text(client, song * 2, **heated)
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 100.0}):
        assert text(client, song * 2, **heated, **penalty) != said, penalty


# --- the cache


@pytest.mark.parametrize(("tokens", "expected"), [(65, 64), (128, 64), (64, 0)])
def test_a_second_request_resumes_on_the_grid_with_a_token_left_to_compute(
    client: httpx.Client, ids: list[int], salt: str, tokens: int, expected: int
) -> None:
    prompt = (ids * 3)[:tokens]
    first, second = (complete(client, prompt, cache_salt=salt, max_tokens=4) for _ in range(2))
    assert cached(first) == {}
    assert cached(second) == ({"device": expected} if expected else {})
    assert first["choices"] == second["choices"]


def test_usage_says_from_which_tier_a_prompt_came(client: httpx.Client, song: str, salt: str) -> None:
    def ask() -> Body:
        return complete(client, song * 3, cache_salt=salt, max_tokens=2)

    cold = ask()
    assert cached(ask()) == {"device": 128}
    flushed = client.post("/flush_cache", params={"tiers": "device"}).json()
    assert flushed["tiers"] == ["device"]
    assert flushed["flushed_pages"] >= 8
    warm = ask()
    assert cached(warm) == {"host": 128}
    assert warm["choices"] == cold["choices"]
    assert cached(ask()) == {"device": 128}
    assert client.post("/flush_cache").json()["tiers"] == ["device", "host"]
    warm = ask()
    assert cached(warm) == {"storage": 128}
    assert warm["choices"] == cold["choices"]
    assert client.post("/flush_cache", json={"tiers": ["device", "host"]}).json()["tiers"] == ["device", "host"]
    assert cached(ask()) == {"storage": 128}
    assert client.post("/flush_cache", json={"tiers": "host"}).json() == {"flushed_pages": 9, "tiers": ["host"]}
    assert cached(ask()) == {"device": 128}


def test_a_request_that_does_not_read_the_cache_still_fills_it(client: httpx.Client, song: str, salt: str) -> None:
    body = {"prompt": song * 3, "cache_salt": salt, "max_tokens": 1}
    assert cached(complete(client, **body, skip_reading_prefix_cache=True)) == {}
    assert cached(complete(client, **body, skip_reading_prefix_cache=True)) == {}
    assert cached(complete(client, **body)) == {"device": 128}


def test_metrics_count_what_usage_says(client: httpx.Client, song: str, salt: str) -> None:
    before = metrics(client)
    answers = [complete(client, song * 3, cache_salt=salt, max_tokens=3) for _ in range(3)]
    client.post("/flush_cache", params={"tiers": "device"})
    answers.append(complete(client, song * 3, cache_salt=salt, max_tokens=3))
    after = metrics(client)

    def grown(name: str) -> float:
        return after[name] - before[name]

    usages = [answer["usage"] for answer in answers]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert grown("kvarve_requests_total.done") == grown("kvarve_ttft_seconds_count") == 4
    assert grown("kvarve_ttft_seconds_bucket.+Inf") == 4
    assert grown("kvarve_prompt_tokens_total") == prompts
    assert grown("kvarve_cached_tokens_total.device") == 256
    assert grown("kvarve_cached_tokens_total.host") == 128
    assert grown("kvarve_cached_tokens_total.storage") == 0
    assert grown("kvarve_computed_tokens_total") == prompts - 384
    assert grown("kvarve_output_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    # 8 attention pages and one state, twice: at the last boundary of the grid and at the end of the prompt's pages.
    assert grown("kvarve_copied_pages_total.host.device") == 9
    assert grown("kvarve_copied_pages_total.device.host") >= 9
    assert after["kvarve_up"] == 1
    assert after["kvarve_requests_running"] == after["kvarve_requests_waiting"] == after["kvarve_leases"] == 0
    for tier in ("device", "host"):
        for pool in ("attention", "state"):
            assert 0 < after[f"kvarve_slots_used.{pool}.{tier}"] <= after[f"kvarve_slots.{pool}.{tier}"]
    assert after["kvarve_evicted_pages_total.attention.device"] > 0
    assert after["kvarve_storage_objects"] > 0
    assert after["kvarve_storage_capacity_bytes"] == 64 << 20
    assert after["kvarve_storage_bytes"] <= 64 << 20
    assert after["kvarve_bad_pages_total.storage"] == after["kvarve_lane_failures_total.device-to-host"] == 0
    assert after["kvarve_info.singer.0.1.0"] == 1


# --- refused requests


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "the prompt must not be empty"),
        ({"prompt": ["a", [1]]}, "the prompt has texts and token ids: send them apart"),
        ({"prompt": ["a"] * 257}, "257 prompts in one request are more than 256"),
        ({"prompt": [1, "a"]}, "a text or a list of token ids"),
        ({"prompt": [True]}, "a text or a list of token ids"),
        ({"prompt": [300]}, "must be in the model's vocabulary of 300"),
        ({"prompt": [1 << 70]}, "must be in the model's vocabulary of 300"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2000}, "with max_tokens 2000 the prompt is too long"),
        ({"temperature": -1}, "temperature must be between 0 and 100"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": list("abcde")}, "at most 4 stop texts, not 5"),
        ({"stop": ""}, "stop must be texts that are not empty"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": {"include_usage": True}}, "stream_options need stream to be true"),
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"n": 2, "seed": (1 << 63) - 1}, "seed must be of at most 64 bits"),
        ({"logprobs": 6}, "logprobs: Input should be less than or equal to 5"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs is not supported"),
        ({"prompt": ["a", "b"], "kv_transfer_params": {}}, "kv_transfer_params are those of one prompt"),
        ({"logit_bias": {"5": 101}}, "logit_bias must be between -100 and 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5: the bias must be a number"),
        ({"logit_bias": {"٥": 1}}, "is no token id"),
        ({"logit_bias": {"5" * 5000: 1}}, "is no token id"),
        ({"logit_bias": {"300": 1}}, "logit_bias must be token ids of the model's vocabulary of 300, got 300"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be between -2 and 2, got 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100, got 0"),
        ({"stop_token_ids": [300]}, "stop_token_ids must be token ids"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens must be between 0 and max_tokens 2, got 3"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"min_p": 2}, "min_p must be between 0 and 1, got 2"),
    ],
)
def test_a_completion_that_cannot_be_is_refused_in_one_clear_line(
    client: httpx.Client, wrong: Body, complaint: str
) -> None:
    before = metrics(client)
    response = client.post(COMPLETIONS, json={"prompt": "hei", "max_tokens": 2} | wrong)
    assert complaint in refused(response, 400)
    assert metrics(client)["kvarve_output_tokens_total"] == before["kvarve_output_tokens_total"]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hei"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "oracle", "content": "hei"}]}, "unknown role oracle"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0] has no content"),
        ({"tools": ["f"]}, "tools.0: Input should be"),
        ({"tool_choice": "required"}, 'tool_choice can be "none" or "auto"'),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 'tool_choice can be "none" or "auto"'),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "own, got 'chat_template'"),
        ({"chat_template_kwargs": {"messages": []}}, "refuses these messages"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs need logprobs to be true"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 1024}]}, "context length is 1024 tokens"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_in_one_clear_line(client: httpx.Client, wrong: Body, complaint: str) -> None:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "hei"}], "max_tokens": 2} | wrong)
    assert complaint in refused(response, 400)


def test_a_prompt_and_its_answer_fill_the_context_to_its_last_token(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "x" * 1024})
    assert "context length is 1024 tokens" in refused(response, 400)
    assert complete(client, "x" * 1023, ignore_eos=True)["usage"]["total_tokens"] == 1024


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 9999]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body, headers={"content-type": "application/json"}), 400)


def test_models_are_listed_and_an_unknown_one_is_not_found(client: httpx.Client) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("singer", "model", 1024)
    assert client.get("/v1/models/singer").json() == card
    assert "'gpt-5'" in refused(client.get("/v1/models/gpt-5"), 404)
    response = client.post(COMPLETIONS, json={"prompt": "hei", "model": "gpt-5"})
    refused(response, 404)
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_flush_that_cannot_be_understood_flushes_nothing(client: httpx.Client) -> None:
    for tiers in ("storage", "moon", "device,", ""):
        assert "can be flushed: device, host" in refused(client.post("/flush_cache", params={"tiers": tiers}), 400)
    for body in (b"{", b"\t", b'{"tiers": 3}', b'{"tiers": []}', b'{"tiers": ["storage"]}', b'{"tier": "host"}'):
        refused(client.post("/flush_cache", content=body), 400)
    for path, name in (
        ("/flush_cache?tiers=host&tiers=device", "tiers"),
        ("/flush_cache?timeout=2&timeout=1", "timeout"),
        ("/reset_prefix_cache?reset_external=true&reset_external=false", "reset_external"),
    ):
        assert refused(client.post(path), 400) == f"{name} is given 2 times"
