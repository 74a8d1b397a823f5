"""Request preparation: too large a request is refused at no cost, and short requests never wait for long ones."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from talk import CHAT, COMPLETIONS, LONG_S, Body, complete, metrics, refused, text, until

from kvarve.reference.engine import engine as engine_module
from kvarve.reference.server import bodies
from kvarve.reference.server.answers import Answer
from kvarve.reference.server.api import MOST_NAMED, MOST_OBJECTS, MOST_VALUES, SMALL_BYTES, ChatRequest, Refused, parse
from kvarve.reference.server.encoder import Encoder
from kvarve.reference.server.serve import Server
from kvarve.reference.server.work_threads import LANES

HUGE = (LANES[1][0] or 0) + 1  # characters of a prompt that has the last lane to itself
TOKENIZING = "kvarve_requests_tokenizing"


class Gate:
    """Stands before the tokenizer: texts that begin with a sign wait there until they may pass, and are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.came = threading.Event(), threading.Semaphore(0)
        self.texts, self.threads = list[str](), set[str]()
        encode = Encoder.encode

        def slow(encoder: Encoder, text: str, *, special: bool) -> Any:
            self.threads.add(threading.current_thread().name)
            if text.startswith("@"):
                self.texts.append(text[:2])
                self.came.release()
                assert self.open.wait(LONG_S)
            return encode(encoder, text[:2] if text.startswith("@") else text, special=special)

        monkeypatch.setattr(Encoder, "encode", slow)
        monkeypatch.setattr(Encoder, "at_least", lambda encoder, text: 0)

    def until_one_stands_here(self) -> None:
        assert self.came.acquire(timeout=LONG_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """The answers that the server begins from now on."""
    answers, begin = list[Answer](), Answer.__init__

    def noted(answer: Answer, *args: Any) -> None:
        begin(answer, *args)
        answers.append(answer)

    monkeypatch.setattr(Answer, "__init__", noted)
    return answers


def huge(name: str) -> Body:
    return {"prompt": f"@{name}" + "x" * HUGE, "max_tokens": 1}


Leaver = Callable[[Body], socket.socket]


@pytest.fixture
def leaver(server: Server) -> Iterator[Leaver]:
    """Asks for a completion on a connection of its own; closing that is a disconnect."""
    with ExitStack() as connections:

        def ask(body: Body) -> socket.socket:
            url, content = httpx.URL(server.url), json.dumps(body).encode()
            connection = connections.enter_context(socket.create_connection((url.host, url.port or 0)))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            return connection

        yield ask


def ended(now: dict[str, float]) -> float:
    return sum(now[f"kvarve_requests_total.{how}"] for how in ("done", "failed", "aborted"))


# --- short prompts do not wait for long ones


def test_five_huge_prompts_do_not_delay_others(client: httpx.Client, gate: Gate, song: str) -> None:
    with ThreadPoolExecutor(5) as pool:
        books = [pool.submit(complete, client, **huge(str(i))) for i in range(5)]
        gate.until_one_stands_here()
        until(client, lambda now: now[TOKENIZING] == 5)
        assert text(client, song * 2, max_tokens=4) == song[:4]
        messages = [{"role": "user", "content": song}]
        assert client.post(CHAT, json={"messages": messages, "max_tokens": 1}).status_code == 200
        assert client.post("/flush_cache").status_code == 200
        assert client.get("/health").status_code == 200
        assert not any(book.done() for book in books)
        gate.open.set()
        assert [book.result()["usage"]["prompt_tokens"] for book in books] == [2] * 5
    assert metrics(client)[TOKENIZING] == 0
    assert "kvarve http" not in gate.threads


@pytest.mark.parametrize("own_server", [{"max_running": 1, "max_waiting": 2}], indirect=True)
def test_a_request_being_tokenized_counts_as_waiting(own_client: httpx.Client, gate: Gate) -> None:
    with ThreadPoolExecutor(3) as pool:
        books = [pool.submit(complete, own_client, **huge(str(i))) for i in range(3)]
        until(own_client, lambda now: now[TOKENIZING] == 3)
        for body in ({"prompt": "hei"}, huge("more")):
            response = own_client.post(COMPLETIONS, json=body)
            assert "3 by requests that are being tokenized: try again later" in refused(response, 503)
            assert response.json()["error"]["code"] == "busy"
            assert int(response.headers["retry-after"]) > 0
        gate.open.set()
        assert all(book.result() for book in books)
    assert complete(own_client, "hei", max_tokens=1)


def test_a_queued_request_of_a_disconnected_client_never_starts(
    client: httpx.Client, gate: Gate, answers: list[Answer], leaver: Leaver
) -> None:
    before = metrics(client)
    first, second = leaver(huge("a")), leaver(huge("b"))
    gate.until_one_stands_here()
    until(client, lambda now: now[TOKENIZING] == 2)
    for connection in (first, second):
        connection.close()
    until(client, lambda _: all(answer.left for answer in answers))
    assert metrics(client)[TOKENIZING] == 1, "only the prompt inside the tokenizer still counts"
    gate.open.set()
    after = until(client, lambda now: now[TOKENIZING] == 0)
    assert len(gate.texts) == 1, "the queued request of a disconnected client was tokenized"
    assert ended(after) == ended(before), "a request of a disconnected client reached the engine"
    assert after["kvarve_requests_running"] == after["kvarve_requests_waiting"] == after["kvarve_leases"] == 0
    assert complete(client, **huge("c"))


def test_a_client_that_disconnects_during_submission_is_aborted(
    client: httpx.Client,
    song: str,
    answers: list[Answer],
    leaver: Leaver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, may_go_on, submit = threading.Event(), threading.Event(), Answer.submit

    def slowly(answer: Answer, prepared: Any) -> None:
        asking.set()
        assert may_go_on.wait(LONG_S)
        submit(answer, prepared)

    before, name = metrics(client), "kvarve_requests_total.aborted"
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "submit", slowly)
        connection = leaver({"prompt": song, "max_tokens": 900, "ignore_eos": True, "n": 3})
        assert asking.wait(LONG_S)
        connection.close()
        until(client, lambda _: answers[0].left)
        may_go_on.set()
        after = until(client, lambda now: now[name] == before[name] + 3)
    assert after["kvarve_requests_running"] == after["kvarve_leases"] == 0


def test_a_prompt_is_checked_once_for_all_its_answers_and_not_on_the_event_loop(
    client: httpx.Client, song: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, threads = engine_module.check_prompt, list[str]()

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return check(*args)

    monkeypatch.setattr(engine_module, "check_prompt", noted)
    body = {"prompt": song, "n": 16, "max_tokens": 1}
    assert client.post(COMPLETIONS, json=body).status_code == 200
    assert len(threads) == 1
    assert threads[0].startswith("kvarve prepare")


# --- refused by size


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "encode", lambda *args, **kwargs: pytest.fail("it was tokenized"))


@pytest.mark.usefixtures("no_tokenizer")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_of_more_characters_than_the_context_has_room_for_is_not_even_tokenized(
    client: httpx.Client, path: str
) -> None:
    words = "x" * 4_000_000
    response = client.post(path, json={"prompt": words} if path == COMPLETIONS else in_a_chat(words))
    message = refused(response, 400)
    assert "characters, so at least" in message and "context length is 1024 tokens" in message
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")


def in_a_chat(content: str) -> Body:
    return {"messages": [{"role": "user", "content": content}]}


def many(form: str, one: str, count: int) -> bytes:
    return form.replace("ONE", ",".join([one] * count)).encode()


@pytest.mark.usefixtures("no_tokenizer")
@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, many('{"messages": [ONE]}', '{"role":"user","content":""}', MOST_OBJECTS), "JSON objects, more than"),
        (CHAT, many('{"messages":[],"x":{ONE}}', '"":0', MOST_VALUES + 1), "JSON names, more than"),
        (COMPLETIONS, many('{"prompt":[ONE]}', "1", MOST_VALUES + 2000), "JSON values, more than"),
        (COMPLETIONS, many('{"prompt":"x","unheard of":[ONE]}', "[]", 1 << 18), "JSON values, more than"),
        ("/flush_cache", many('{"tiers":[ONE]}', '"host"', 1 << 18), "JSON values"),
    ],
    ids=["messages", "names", "tokens", "lists", "tiers"],
)
def test_a_body_of_more_values_than_any_request_needs_is_not_even_read(
    client: httpx.Client, path: str, body: bytes, told: str
) -> None:
    assert told in refused(client.post(path, content=body), 400)


def test_signs_within_a_text_are_no_values(client: httpx.Client) -> None:
    signs = '{[,"\\' * 60_000 + "\\\\" * 3 + '"'
    assert len(signs) > SMALL_BYTES
    for ascii_only in (False, True):
        body = json.dumps(in_a_chat("hei") | {"user": signs}, ensure_ascii=ascii_only).encode()
        assert parse(ChatRequest, body).messages[0].content == "hei"
        nested = json.dumps(in_a_chat("hei") | {"user": signs, "x": [{}] * (MOST_OBJECTS + 1)}).encode()
        with pytest.raises(Refused, match="JSON objects"):
            parse(ChatRequest, nested)


def test_what_each_token_of_an_answer_is_compared_with_is_bounded(client: httpx.Client) -> None:
    for wrong, told in (
        ({"stop_token_ids": [1] * (MOST_NAMED + 1)}, "stop_token_ids: List should have at most 1024 items"),
        ({"logit_bias": {str(i): 1 for i in range(MOST_NAMED + 1)}}, "logit_bias can name 1024 tokens at most"),
        ({"stop": ["x", "y" * 2000]}, "a stop text has at most 1024 characters, not 2000"),
    ):
        assert told in refused(client.post(COMPLETIONS, json={"prompt": "hei", "max_tokens": 1} | wrong), 400)


# --- bodies that are being read


def test_large_bodies_that_are_being_read_take_a_bounded_room_and_small_ones_always_find_some(
    server: Server, client: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch, song: str
) -> None:
    monkeypatch.setattr(bodies, "BODIES", 1)  # of the 8 MiB that a body may have
    body = json.dumps(huge("a") | {"user": "x" * (6 << 20)}).encode()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, COMPLETIONS, content=body)
        gate.until_one_stands_here()
        response = client.post(COMPLETIONS, content=body)
        assert "too many large requests are being read: try again later" in refused(response, 503)
        assert int(response.headers["retry-after"]) > 0
        assert text(client, song * 2, max_tokens=4) == song[:4]
        gate.open.set()
        assert first.result().status_code == 200
    assert client.post(COMPLETIONS, content=body).status_code == 200  # there is space again
