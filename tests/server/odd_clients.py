"""Clients of /generate that send valid bodies, altered as data, as text or on their way, and leave anywhere."""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

import httpx
from talk import LONG_S, Body

HELD = 8  # connections of each client that it neither reads nor closes

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 16, 17, 1 << 31, 1 << 63, -(1 << 63), -(1 << 63) - 1, 1 << 70, 10**400),
    *(0.0, -0.0, 0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "a",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "\uffff",
        "\U0010ffff",
        "a" * 3000,
        "{{ 1 }}",
        "<|end|>",
        "١",
        "\u2028\r\n",
    ),
    *(
        [],
        [[]],
        [[[[0]]]],
        [0],
        ["a"],
        [None],
        [1.5],
        [True],
        [{}],
        [1 << 70],
        [-1],
        [[1], "a"],
        [[1], [2]],
        ["a", "b"],
    ),
    *({}, {"a": 1}, {"1": 1}, {"1": 1e308}, {"-1": 0}, [0] * 5000, ["a"] * 300, {str(i): i for i in range(1100)}),
    *({"type": "text"}, {"type": 7}, {"type": "text", "text": "\0"}, {"function": None}),
    *([{"role": "user", "content": "\0"}], [{"role": "assistant", "tool_calls": [{}]}]),
]
KINDS = ["application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=x", ""]
OTHERS = ["rid", "stream", "return_logprob", "top_logprobs_num", "return_text_in_logprobs", "cache_salt", "extra_key"]
PARAMS = [
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "frequency_penalty", "presence_penalty", "stop", "n"),
    *(
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "max_new_tokens",
        "min_new_tokens",
        "sampling_seed",
        "regex",
    ),
]


class Maker:
    """Makes requests out of dice."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def valid(self) -> Body:
        dice = self.dice
        texts = ["hei", "hvarv på åkern, " * dice.randrange(1, 5), "日本語の川 🐟"]
        params: Body = {"max_new_tokens": dice.randrange(12), "temperature": dice.choice([0, 0.7, 1.5])}
        params |= {"n": dice.choice([1, 1, 2, 16])} if dice.random() < 0.3 else {}
        params |= {"stop": dice.choice(["a", ["å", "🐟"]])} if dice.random() < 0.3 else {}
        params |= {"ignore_eos": True, "max_new_tokens": None} if dice.random() < 0.1 else {}
        made: Body = {"sampling_params": params, "stream": dice.random() < 0.4}
        if dice.random() < 0.6:
            made["text"] = dice.choice([dice.choice(texts), texts[: dice.randrange(1, 4)]])
        else:
            ids = [[dice.randrange(200) for _ in range(dice.randrange(1, 60))] for _ in range(dice.randrange(1, 4))]
            made["input_ids"] = dice.choice([ids[0], ids])
        if dice.random() < 0.3:
            made |= {"return_logprob": True, "top_logprobs_num": dice.randrange(21), "return_text_in_logprobs": True}
        return made

    def altered(self, body: Body) -> Any:
        """One place of it is another value, is missing or is new."""
        dice = self.dice
        places: list[tuple[Any, Any]] = [(body, name) for name in body]
        for place, name in places:  # it grows
            inner = place[name]
            if isinstance(inner, dict | list):
                places += [(inner, each) for each in (inner if isinstance(inner, dict) else range(len(inner)))]
        place, name = dice.choice(places)
        what = dice.randrange(6)
        if what == 0:
            place.pop(name)
        elif what == 1:
            place[name] = [place[name]] * dice.choice([1, 2, 300 if len(places) < 100 else 2])
        elif what == 2:
            place[name] = str(place[name])
        elif what == 3:
            body[dice.choice(OTHERS)] = self.odd()
        elif what == 4 and isinstance(body.get("sampling_params"), dict):
            body["sampling_params"][dice.choice(PARAMS)] = self.odd()
        else:
            place[name] = self.odd()
        return body if dice.random() < 0.98 else self.odd()

    def odd(self) -> Any:
        """One of `ODD`, of which a later alteration may change a part."""
        return deepcopy(self.dice.choice(ODD))

    def content(self) -> bytes:
        """A body's bytes."""
        dice, body = self.dice, self.valid()
        for _ in range(dice.choice([0, 0, 1, 1, 1, 2, 3])):
            if isinstance(body, dict) and body:
                body = self.altered(body)
        text = json.dumps(body, ensure_ascii=dice.random() < 0.8)
        what = dice.randrange(40)
        if what == 0:
            return text.encode("utf-8", "surrogatepass")[: dice.randrange(len(text))]
        if what == 1:
            return b'{"text": "b", ' + text.encode("utf-8", "surrogatepass")[1:]  # a name that is there twice
        if what == 2:
            return text.encode("utf-16", "surrogatepass")
        if what == 3:
            depth = dice.choice([200, 5000, 60_000])
            return b'{"text":' + b"[" * depth + b"]" * depth + b"}"
        if what == 4:
            digits = "9" * dice.choice([20, 5000])
            return text.replace("1", digits).encode("utf-8", "surrogatepass")
        if what == 5:
            return dice.randbytes(dice.randrange(300))
        if what == 6:
            content = bytearray(text.encode("utf-8", "surrogatepass"))
            for _ in range(dice.randrange(1, 4)):
                content[dice.randrange(len(content))] = dice.randrange(256)
            return bytes(content)
        if what == 7 and dice.random() < 0.3:
            return b'{"text": "' + b"a" * 10_000_000 + b'"}'
        return text.encode("utf-8", "surrogatepass")


@dataclass
class Client:
    """One after the other, each on a connection of its own."""

    url: httpx.URL
    maker: Maker
    got: Counter[int] = field(default_factory=Counter)
    unread: int = 0
    held: list[socket.socket] = field(default_factory=list)

    def ask(self, requests: int, end_s: float) -> None:
        for _ in range(requests):
            if time.monotonic() < end_s:
                self._one()

    def close(self) -> None:
        while self.held:
            self.held.pop().close()

    def _one(self) -> None:
        dice, content = self.maker.dice, self.maker.content()
        head = f"{dice.choice(['POST', 'POST', 'PUT'])} /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        kind = dice.choice(KINDS) if dice.random() < 0.2 else KINDS[0]
        head += f"Content-Type: {kind}\r\n" if kind else ""
        how = dice.choice(
            [*("whole",) * 10, *("chunked",) * 3, "leaves", "leaves", "left", "half", "stalls", "unread", "broken"]
        )
        connection = socket.socket()
        if how == "unread":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(LONG_S)
        connection.connect((self.url.host, self.url.port or 0))
        if how in ("chunked", "stalls", "broken"):
            pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in self._cut(content)] + [b"0\r\n\r\n"]
            if how == "broken":
                pieces.insert(
                    dice.randrange(len(pieces)), dice.choice([b"zz\r\n", b"-1\r\n\r\n", b"f" * 30 + b"\r\n", b"\0\0"])
                )
            sent = [head.encode() + b"Transfer-Encoding: chunked\r\n\r\n", *pieces]
            sent = sent[:-1] if how == "stalls" else sent
        else:
            length = len(content) + (dice.randrange(1, 1000) if how == "half" else 0)
            sent = [f"{head}Content-Length: {length}\r\n\r\n".encode(), content]
        try:
            connection.sendall(b"".join(sent))
            if how in ("whole", "chunked", "broken"):
                self._read(connection, sent, strict=how != "broken")
            elif how == "leaves":
                self.unread += 1
                connection.recv(dice.choice([1, 200, 3000]))
            elif how == "left":
                self.unread += 1
            else:
                self.unread += 1
                self.held.append(connection)
                if len(self.held) > HELD:
                    self.held.pop(0).close()
        except OSError:  # the server has closed it, as it may in the midst of a broken request
            assert how != "whole" or len(content) > 1 << 20, (how, content[:300])
        finally:
            if connection not in self.held:
                connection.close()

    def _cut(self, content: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(content):
            size = self.maker.dice.choice([1, 7, 500, 100_000]) if len(content) < 2000 else 100_000
            yield content[at : at + size]
            at += size

    def _read(self, connection: socket.socket, sent: list[bytes], *, strict: bool) -> None:
        response = HTTPResponse(connection, method="POST")
        try:
            response.begin()
            text, about = response.read(), (response.status, b"".join(sent)[:3000])
        finally:
            response.close()
        self.got[response.status] += 1
        if response.status == 503:
            assert response.headers["Retry-After"], about
        elif response.status == 400 and not strict:
            return  # the parser of HTTP has refused it
        assert response.status < 500 or response.status == 503, (about, text[:2000])
        if response.headers["Content-Type"].startswith("text/event-stream"):
            *events, done, end = text.split(b"\n\n")
            assert (done, end) == (b"data: [DONE]", b""), (about, text[-300:])
            told = [json.loads(event.removeprefix(b"data: ")) for event in events]
            assert told and all("meta_info" in each for each in told), about
        elif response.status == 200:
            told = json.loads(text)
            assert all("meta_info" in each for each in (told if isinstance(told, list) else [told])), about
        else:
            error = json.loads(text)["error"]
            assert error["message"] and set(error) == {"message", "type", "param", "code"}, about


def asked(url: str, seed: float, requests: int, end_s: float) -> tuple[Counter[int], int]:
    """What one client got, and how many answers it has not read."""
    client = Client(httpx.URL(url), Maker(random.Random(seed)))
    try:
        client.ask(requests, end_s)
    finally:
        client.close()
    return client.got, client.unread
