"""Several prompts in one request, and answers that begin with their prompt."""

import httpx
from talk import CHAT, COMPLETIONS, cached, complete, refused, stream, text


def test_each_of_several_prompts_gets_the_answers_that_it_gets_alone(
    client: httpx.Client, song: str, ids: list[int], salt: str
) -> None:
    prompts = [song * 2, song[:20], song * 2 + "hv"]
    alone = [text(client, prompt, max_tokens=3) for prompt in prompts]
    answer = complete(client, prompts, max_tokens=3, cache_salt=salt)
    assert [choice["text"] for choice in answer["choices"]] == alone
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    tokens = sum(len(prompt.encode()) for prompt in prompts)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (tokens, 9)
    tokenized = complete(client, [ids * 2, ids[:7]], max_tokens=3, n=2)
    short = text(client, ids[:7], max_tokens=3)
    assert [choice["text"] for choice in tokenized["choices"]] == [alone[0], alone[0], short, short]
    assert tokenized["usage"]["prompt_tokens"] == 2 * len(ids) + 7
    assert cached(complete(client, prompts, max_tokens=1, cache_salt=salt)) == {"device": 128}


def test_a_stream_of_several_prompts_names_each_by_its_index(client: httpx.Client, song: str) -> None:
    prompts = [song * 2, song[:20]]
    said = ["", ""]
    body = {"prompt": prompts, "max_tokens": 4, "stream_options": {"include_usage": True}}
    *chunks, last = stream(client, COMPLETIONS, body)
    for chunk in chunks:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert said == [text(client, prompt, max_tokens=4) for prompt in prompts]
    assert last["usage"]["completion_tokens"] == 8


def test_an_answer_begins_with_its_prompt_if_asked(client: httpx.Client, song: str, ids: list[int]) -> None:
    said = text(client, song, max_tokens=5)
    for prompt in (song, ids):
        assert text(client, prompt, max_tokens=5, echo=True) == song + said
    both = complete(client, [song, "hv"], max_tokens=1, n=2, echo=True)["choices"]
    assert all(choice["text"].startswith(prompt) for choice, prompt in zip(both, [song] * 2 + ["hv"] * 2, strict=True))
    chunks = stream(client, COMPLETIONS, {"prompt": song, "max_tokens": 5, "echo": True})
    assert chunks[0]["choices"][0]["text"] == song
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == song + said


def test_an_echo_of_no_tokens_is_the_prompt_alone(client: httpx.Client, song: str) -> None:
    answer = complete(client, song, max_tokens=0, echo=True)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (song, 0)
    assert answer["choices"][0]["finish_reason"] == "length"
    message = client.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], "echo": True})
    assert "echo is not supported" in refused(message, 400)


def test_all_prompts_are_refused_if_one_is_too_long(client: httpx.Client, song: str) -> None:
    response = client.post(COMPLETIONS, json={"prompt": ["hei", song * 100]})
    assert "the prompt is too long" in refused(response, 400)
    assert response.json()["error"]["code"] == "context_length_exceeded"
