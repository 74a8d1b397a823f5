"""The server from outside: requests of a client, and their answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_the_default_is_sixteen_tokens_for_a_completion(client: httpx.Client, song: str) -> None:
    assert complete(client, song)["usage"]["completion_tokens"] == 16


def test_a_text_and_its_tokens_are_the_same_prompt(client: httpx.Client, song: str, ids: list[int], salt: str) -> None:
    first = text(client, song * 2, cache_salt=salt)
    for prompt in (ids * 2, [ids * 2], [song * 2]):
        answer = complete(client, prompt, cache_salt=salt)
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


def test_a_chat_without_a_limit_ends_within_the_context(client: httpx.Client, song: str) -> None:
    prompt = song * 14
    messages = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "ignore_eos": True}
    usage = client.post(CHAT, json=messages).json()["usage"]
    assert usage["total_tokens"] == 1024
    assert usage["completion_tokens"] > 16


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_completion_is_the_whole_one_in_pieces(
    client: httpx.Client, song: str, salt: str, include_usage: bool
) -> None:
    body = {"prompt": song * 2, "max_tokens": 40, "cache_salt": salt}
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
    assert len(choices) > 20


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: httpx.Client, song: str) -> None:
    body = {"messages": [{"role": "user", "content": song * 2}], "max_completion_tokens": 30, "temperature": 0}
    whole = client.post(CHAT, json=body).json()
    chunks = stream(client, CHAT, body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    said = "".join(delta.get("content", "") for delta in deltas)
    assert said == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


@pytest.mark.parametrize("extra_tokens", range(1, 62, 7))
def test_a_stream_never_yields_half_a_character(
    client: httpx.Client, song: str, ids: list[int], extra_tokens: int
) -> None:
    prompt = (ids * 3)[: len(ids) + extra_tokens]  # it may end within a character, and so may the answer
    chunks = stream(client, COMPLETIONS, {"prompt": prompt, "max_tokens": 70})
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    within = song.encode()[extra_tokens % len(song.encode())] & 0xC0 == 0x80  # the rest of a character is not one
    assert not any("\ufffd" in piece for piece in pieces[1 if within else 0 : -1])
    assert "".join(pieces) == text(client, prompt, max_tokens=70)
    assert within or "".join(pieces).rstrip("\ufffd") in song * 5


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("åkern", "hvarv på "),  # 6 tokens, the first of them half a character
        (["never", "川"], "hvarv på åkern, 日本語の"),
        (["on; h", "🐟 a"], "hvarv på åkern, 日本語の川 "),
        ("h", ""),
    ],
)
def test_an_answer_ends_before_its_stop_text(client: httpx.Client, song: str, stop: Any, said: str) -> None:
    answer = complete(client, song * 2, max_tokens=100, stop=stop)
    assert answer["choices"][0]["text"] == said
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = stream(client, COMPLETIONS, {"prompt": song * 2, "max_tokens": 100, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said


def test_a_stop_text_that_does_not_come_holds_nothing_back(client: httpx.Client, song: str) -> None:
    limit = len(song.encode())
    assert text(client, song * 2, max_tokens=limit, stop=["on; x", "and so far"]) == song


def test_a_seed_repeats_an_answer_and_another_one_does_not(client: httpx.Client, song: str) -> None:
    heated = {"temperature": 2.0, "max_tokens": 30, "ignore_eos": True}
    answers = [text(client, song, seed=seed, **heated) for seed in range(4)]
    assert answers == [text(client, song, seed=seed, **heated) for seed in range(4)]
    assert len(set(answers)) > 1


def test_top_k_and_min_p_can_leave_only_the_likeliest_token(client: httpx.Client, song: str) -> None:
    greedy = text(client, song * 2, max_tokens=30)
    for limit in ({"top_k": 1}, {"min_p": 1.0}, {"top_k": 3, "min_p": 0.99}):
        assert text(client, song * 2, max_tokens=30, temperature=5.0, seed=1, **limit) == greedy
    assert text(client, song * 2, max_tokens=30, temperature=5.0, seed=1) != greedy


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
    assert song[0] not in text(client, song * 2, max_tokens=30, logit_bias={first: -100})
    assert text(client, song * 2, max_tokens=4, logit_bias={second: 100}) == 4 * song[1]
    heated = {"max_tokens": 40, "temperature": 2.0, "seed": 1}
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 100.0}):
        assert text(client, song * 2, **heated, **penalty) != text(client, song * 2, **heated), penalty


def test_requests_side_by_side_say_what_each_says_alone(client: httpx.Client, song: str, salt: str) -> None:
    prompts = [f"{i}{song * (1 + i % 3)}" for i in range(12)]
    alone = [text(client, prompt, max_tokens=24, skip_reading_prefix_cache=True) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: text(client, prompt, max_tokens=24, cache_salt=salt), prompts))
    assert together == alone


# --- the cache


@pytest.mark.parametrize(("tokens", "expected"), [(65, 64), (128, 64), (129, 128), (170, 128), (64, 0)])
def test_a_second_request_resumes_on_the_grid_with_a_token_left_to_compute(
    client: httpx.Client, ids: list[int], salt: str, tokens: int, expected: int
) -> None:
    prompt = (ids * 3)[:tokens]
    first = complete(client, prompt, cache_salt=salt)
    second = complete(client, prompt, cache_salt=salt)
    assert cached(first) == {}
    assert cached(second) == ({"device": expected} if expected else {})
    assert first["choices"] == second["choices"]


def test_usage_says_from_which_tier_a_prompt_came(client: httpx.Client, song: str, salt: str) -> None:
    def ask() -> Body:
        return complete(client, song * 3, cache_salt=salt, max_tokens=12)

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


def test_salts_share_nothing(client: httpx.Client, song: str, salt: str) -> None:
    complete(client, song * 3, cache_salt=salt)
    assert cached(complete(client, song * 3, cache_salt=salt + "'s neighbour")) == {}
    assert cached(complete(client, song * 3, cache_salt=salt)) == {"device": 128}


def test_a_request_that_does_not_read_the_cache_still_fills_it(client: httpx.Client, song: str, salt: str) -> None:
    body = {"prompt": song * 3, "cache_salt": salt}
    assert cached(complete(client, **body, skip_reading_prefix_cache=True)) == {}
    assert cached(complete(client, **body, skip_reading_prefix_cache=True)) == {}
    assert cached(complete(client, **body)) == {"device": 128}


def test_metrics_count_what_usage_says(client: httpx.Client, song: str, salt: str) -> None:
    before = metrics(client)
    answers = [complete(client, song * 3, cache_salt=salt) for _ in range(3)]
    client.post("/flush_cache", params={"tiers": "device"})
    answers.append(complete(client, song * 3, cache_salt=salt))
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
        ({"prompt": 7}, "prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": ["a", [1]]}, "the prompt has texts and token ids: send them apart"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": ["a"] * 257}, "257 prompts in one request are more than 256"),
        ({"prompt": [1, "a"]}, "a text or a list of token ids"),
        ({"prompt": [1.5]}, "a text or a list of token ids"),
        ({"prompt": [True]}, "a text or a list of token ids"),
        ({"prompt": [[["a"]]]}, "a text or a list of token ids"),
        ({"prompt": [300]}, "outside the model's vocabulary of 300"),
        ({"prompt": [-1]}, "outside the model's vocabulary of 300"),
        ({"prompt": [1 << 70]}, "outside the model's vocabulary of 300"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -5}, "max_tokens must be at least 1"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 2000}, "with max_tokens 2000 the prompt is too long"),
        ({"temperature": -1}, "temperature must be between 0 and 100"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": list("abcde")}, "at most 4 stop texts, not 5"),
        ({"stop": ""}, "a stop text cannot be empty"),
        ({"stop": 3}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options need stream to be true"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 17}, "n: Input should be less than or equal to 16"),
        ({"n": 2.0}, "n: Input should be a valid integer"),
        ({"n": 2, "seed": (1 << 63) - 1}, "a seed has 64 bits at most"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"best_of": 1, "n": 2}, "best_of is not supported"),
        ({"logprobs": -1}, "logprobs: Input should be greater than or equal to 0"),
        ({"logprobs": 6}, "logprobs: Input should be less than or equal to 5"),
        ({"logprobs": True}, "logprobs: Input should be a valid integer"),
        ({"top_logprobs": 2}, "top_logprobs is not supported"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"tool_choice": "required"}, "tool_choice is not supported"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is not supported"),
        ({"echo": True, "logprobs": 1}, "echo with logprobs is not supported"),
        ({"echo": True, "max_tokens": -1}, "max_tokens must be at least 1, not -1"),
        ({"prompt": ["a", "b"], "kv_transfer_params": {}}, "kv_transfer_params are those of one prompt"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"logit_bias": {"5": 101}}, "a logit_bias must be between -100 and 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5: the bias must be a number"),
        ({"logit_bias": {"5": True}}, "logit_bias.5: the bias must be a number"),
        ({"logit_bias": {"5": None}}, "logit_bias.5: the bias must be a number"),
        ({"logit_bias": {"five": 1}}, "logit_bias: 'five' is no token id"),
        ({"logit_bias": {"٥": 1}}, "is no token id"),
        ({"logit_bias": {"5" * 5000: 1}}, "is no token id"),
        ({"logit_bias": {"300": 1}}, "logit_bias: 300 is no token id of the model's vocabulary of 300"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: -1 is no token id"),
        ({"logit_bias": [5]}, "logit_bias: Input should be"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be between -2 and 2, not 2.5"),
        ({"presence_penalty": -2.5}, "presence_penalty must be between -2 and 2, not -2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100, not 0"),
        ({"stop_token_ids": [300]}, "stop_token_ids: 300 is no token id"),
        ({"stop_token_ids": 5}, "stop_token_ids: Input should be"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens must be between 0 and max_tokens 2, not 3"),
        ({"min_tokens": -1}, "min_tokens must be between 0 and max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"top_k": -2}, "top_k must be at least -1, not -2"),
        ({"top_k": 2.5}, "top_k: Input should be a valid integer"),
        ({"min_p": -0.5}, "min_p must be between 0 and 1, not -0.5"),
        ({"min_p": 2}, "min_p must be between 0 and 1, not 2"),
        ({"min_p": "0.1"}, "min_p: Input should be a valid number"),
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
    "harmless",
    [
        {"n": 1, "best_of": 1, "logprobs": None, "echo": False, "suffix": "", "logit_bias": {}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}, "top_k": -1},
        {"repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": []},
        {"n": 2, "best_of": 2, "top_k": 0, "min_p": 0, "tools": [], "tool_choice": "auto", "top_logprobs": 0},
        {"max_tokens": None, "temperature": None, "top_p": None, "seed": None, "stop": None, "stream": None},
        {"stream_options": None, "store": False, "metadata": {}, "service_tier": "auto"},
    ],
)
def test_a_known_field_that_asks_for_nothing_is_fine(client: httpx.Client, harmless: Body) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "hei", "max_tokens": 1} | harmless).status_code == 200


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hei"}, "messages"),
        ({"messages": [{"content": "hei"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "oracle", "content": "hei"}]}, "unknown role oracle"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "'image_url'"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0] has no content"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages.0.tool_calls.0"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 7}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "function_call is not"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"tools": "all"}, "tools: Input should be a valid array"),
        ({"tools": ["f"]}, "tools.0: Input should be"),
        ({"tool_choice": "required"}, 'tool_choice can be "none" or "auto"'),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 'tool_choice can be "none" or "auto"'),
        ({"tool_choice": 1}, "tool_choice"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "'chat_template' is no variable"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize' is no variable"),
        ({"chat_template_kwargs": {"messages": []}}, "refuses these messages"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: Input should be"),
        ({"logprobs": 1}, "logprobs: Input should be a valid boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: Input should be greater than or equal to 0"),
        ({"top_logprobs": 2}, "top_logprobs need logprobs to be true"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs need logprobs to be true"),
        ({"chat_template": "{{ 1 }}"}, "chat_template is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 1024}]}, "context length is 1024 tokens"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_in_one_clear_line(client: httpx.Client, wrong: Body, complaint: str) -> None:
    response = client.post(CHAT, json={"messages": [{"role": "user", "content": "hei"}], "max_tokens": 2} | wrong)
    assert complaint in refused(response, 400)


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "x" * 5000})
    message = refused(response, 400)
    assert "5000 tokens" in message
    assert "1024 tokens" in message
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert refused(client.post(COMPLETIONS, json={"prompt": "x" * 1024}), 400)
    assert complete(client, "x" * 1023, ignore_eos=True)["usage"]["total_tokens"] == 1024


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 9999]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body, headers={"content-type": "application/json"}), 400)


def test_json_is_json_whatever_its_content_type(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, content=b'{"prompt": "hei"}', headers={"content-type": "text/plain"})
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_by_its_real_bytes(client: httpx.Client, chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * (10 << 20) + b'"}'

    def parts() -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    response = client.post(COMPLETIONS, content=parts() if chunked else body)
    assert "larger than 8388608 bytes" in refused(response, 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("POST", f"{COMPLETIONS}/", 404),  # a redirect would name a scheme and a host as this server sees them
    ],
)
def test_a_wrong_path_gets_an_error_in_the_same_form(client: httpx.Client, method: str, path: str, status: int) -> None:
    assert path in refused(client.request(method, path), status)


def test_models_are_listed_and_an_unknown_one_is_not_found(client: httpx.Client) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("singer", "model", 1024)
    assert client.get("/v1/models/singer").json() == card
    assert "'gpt-5'" in refused(client.get("/v1/models/gpt-5"), 404)
    response = client.post(COMPLETIONS, json={"prompt": "hei", "model": "gpt-5"})
    refused(response, 404)
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("tiers", ["storage", "moon", "device,", ""])
def test_only_memory_can_be_flushed(client: httpx.Client, tiers: str) -> None:
    assert "can be flushed: device, host" in refused(client.post("/flush_cache", params={"tiers": tiers}), 400)


@pytest.mark.parametrize(
    "body", [b"{", b'{"tiers": 3}', b'{"tiers": []}', b'{"tiers": ["storage"]}', b'{"tier": "host"}']
)
def test_a_flush_that_cannot_be_understood_flushes_nothing(client: httpx.Client, body: bytes) -> None:
    refused(client.post("/flush_cache", content=body), 400)


@pytest.mark.parametrize("own_server", [{"api_key": "sésame"}], indirect=True)
def test_a_key_opens_what_it_guards_and_nothing_else_does(own_client: httpx.Client) -> None:
    def header(value: str) -> dict[str, bytes]:
        return {"Authorization": value.encode()}

    body = {"prompt": "hei", "max_tokens": 1}
    for wrong in ({}, header("Bearer"), header("Bearer sesame"), header("sésame"), header("Bearer sésamee")):
        for path in (COMPLETIONS, CHAT, "/flush_cache"):
            response = own_client.post(path, json=body, headers=wrong)
            assert "API key" in refused(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        refused(own_client.get("/v1/models", headers=wrong), 401)
    assert own_client.post(COMPLETIONS, json=body, headers=header("Bearer sésame")).status_code == 200
    assert own_client.get("/health").status_code == own_client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/flush_cache?tiers=host&tiers=device", "tiers"),
        ("/flush_cache?timeout=nothing&timeout=1", "timeout"),
        ("/reset_prefix_cache?reset_external=true&reset_external=false", "reset_external"),
    ],
)
def test_a_parameter_that_is_given_twice_is_refused(client: httpx.Client, path: str, name: str) -> None:
    assert refused(client.post(path), 400) == f"{name} is given 2 times"


def test_a_reset_of_what_is_not_supported_is_refused_whatever_it_says(client: httpx.Client) -> None:
    for value in ("", "true", "1", "maybe"):
        assert "reset_external" in refused(client.post(f"/reset_prefix_cache?reset_external={value}"), 400)
