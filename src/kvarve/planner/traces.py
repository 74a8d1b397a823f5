"""What requests there were: traces of three formats, read line by line into requests of one kind.

A trace is JSON lines, plain or gzip, of which the first says which format all have (docs/planning.md). Whatever it
is, a prompt becomes a list of ids, one for each block of tokens; the last block may be short and may lack its id.
An id stands for its block *and all blocks before it*. Only prompts are cached, as traces lack the tokens of answers.
"""

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import IO, Any, cast

from xxhash import xxh3_64_intdigest

from kvarve.errors import ConfigError
from kvarve.pages.keys import TOKEN_BYTES

MOST_TOKENS = 1 << 27  # in one prompt: a longer one is a damaged line, not a request
TEXT_BYTES = 4  # of text that count as one token
DIRECT = 1 << 31  # ids below are tokens as they are

Advance = Callable[[int, int], None]  # bytes of the trace file that are done, and its size


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace. `ids` may lack the id of a last block that is not full."""

    timestamp_ms: float
    input_length: int
    output_length: int
    ids: Sequence[int]
    salt: str = ""


def read_trace(path: Path, block_tokens: int, advance: Advance = lambda done, size: None) -> Iterator[TraceRequest]:
    """The requests of a trace file, one at a time. ConfigError names a line that is not a request.

    `block_tokens`: of an id; where the trace has the prompts themselves, the blocks that get ids.
    """
    line, before = 0, 0.0
    rests_on: dict[int, int | None] = {}  # by id: the block before it, which must always be the same
    parse: Callable[[dict[str, Any], int], TraceRequest] | None = None
    try:
        for line, text, done, size in _lines(path):  # noqa: B007  an error names it
            row = _object(text)
            parse = parse or _format(row)
            request = parse(row, block_tokens)
            if request.timestamp_ms < before:
                raise ValueError("it happened before the line above: sort the trace by timestamp")
            if parse is _mooncake:
                last = None
                for each in request.ids:
                    if rests_on.setdefault(each, last) != last:
                        raise ValueError(f"hash id {each} follows another block here than in a line above")
                    last = each
            before = request.timestamp_ms
            yield request
            advance(done, size)
    except (OSError, EOFError, zlib.error) as e:
        after = f" after line {line}" if line else ""
        raise ConfigError(f"trace {path}: cannot be read{after}: {getattr(e, 'strerror', None) or e}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"trace {path}, line {line}: {e}") from e
    if parse is None:
        raise ConfigError(f"trace {path} must hold requests, and has none")


def block_size(path: Path, page_tokens: int) -> int | None:
    """Tokens of a trace's blocks: a page, where it has the prompts themselves; else what its first line says."""
    try:
        row = next((_object(text) for _, text, _, _ in _lines(path)), {})
        if _format(row) is not _mooncake:
            return page_tokens
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return None  # `read_trace` says what is wrong
    said = row.get("block_tokens")
    if said is not None and (type(said) is not int or not 0 < said <= MOST_TOKENS):
        raise ConfigError(f"trace {path}: block_tokens must be a number of tokens, got {said!r}")
    return said


def _lines(path: Path) -> Iterator[tuple[int, bytes, int, int]]:
    """The lines of a file that are not empty, each with its number, and how many bytes of how many have been read."""
    size = path.stat().st_size
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        for line, text in enumerate(cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw, 1):
            if text.strip():
                yield line, text, raw.tell(), size


def _object(text: bytes) -> dict[str, Any]:
    try:
        row = loads(text)
    except ValueError:
        raise ValueError("not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


# --- formats


def _format(row: dict[str, Any]) -> Callable[[dict[str, Any], int], TraceRequest]:
    """The format of a trace, by its first line."""
    if "tokens" in row:
        return _kvarve
    if "hash_ids" in row or "input_length" in row:
        return _mooncake
    if {"body", "messages", "prompt"} & row.keys():
        return _openai
    raise ValueError("no hash_ids (Mooncake), tokens (kvarve), messages, prompt or body (OpenAI): see docs/planning.md")


def _mooncake(row: dict[str, Any], block_tokens: int) -> TraceRequest:
    if missing := [name for name in ("timestamp", "input_length", "hash_ids") if name not in row]:
        raise ValueError(f"no {', '.join(missing)}")
    tokens, ids = row["input_length"], row["hash_ids"]
    at = _timestamp(row["timestamp"])
    if type(tokens) is not int or not 0 < tokens <= MOST_TOKENS:
        raise ValueError(f"input_length is {tokens!r}, not a number of tokens")
    output = _output(row.get("output_length", 0))
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise ValueError("hash_ids is not a list of whole numbers")
    full, rest = divmod(tokens, block_tokens)
    if len(ids) not in (full, full + (rest > 0)):
        raise ValueError(f"{len(ids)} hash_ids do not stand for {tokens} tokens in blocks of {block_tokens}")
    return TraceRequest(at, tokens, output, ids)


def _kvarve(row: dict[str, Any], block_tokens: int) -> TraceRequest:
    if missing := [name for name in ("timestamp", "tokens") if name not in row]:
        raise ValueError(f"no {', '.join(missing)}")
    packed, salt = _packed(row["tokens"], "tokens"), row.get("salt", "")
    if not isinstance(salt, str):
        raise ValueError("salt is not a text")
    return _request(_timestamp(row["timestamp"]), packed, _output(row.get("output_length", 0)), salt, block_tokens)


def _openai(row: dict[str, Any], block_tokens: int) -> TraceRequest:
    body = row.get("body", row)
    if not isinstance(body, dict):
        raise ValueError("body is not a JSON object")
    at = _timestamp(row["timestamp"]) if "timestamp" in row else 1000 * _timestamp(row.get("created", 0), "created")
    if "messages" in body:
        messages = body["messages"]
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise ValueError("messages is not a list of JSON objects")
        # As chat templates do it: what the tools are comes first, and messages follow one another.
        parts = [body["tools"]] if body.get("tools") else []
        text = "".join(dumps(part, sort_keys=True, ensure_ascii=False) + "\n" for part in (*parts, *messages))
        packed = _text(text)
    elif isinstance(body.get("prompt"), str):
        packed = _text(body["prompt"])
    elif "prompt" in body:
        packed = _packed(body["prompt"], "prompt")
    else:
        raise ValueError("no messages or prompt")
    usage = row.get("usage") or {}
    output = _output(usage.get("completion_tokens", 0)) if isinstance(usage, dict) else 0
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise ValueError("cache_salt is not a text")
    return _request(at, packed, output, salt, block_tokens)


def _timestamp(value: Any, name: str = "timestamp") -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value!r}, not {'milliseconds' if name == 'timestamp' else 'seconds'}")
    return cast(float, value)


def _output(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"output_length is {value!r}, not a number of tokens")
    return value


def _packed(tokens: Any, name: str) -> bytes:
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MOST_TOKENS:
        raise ValueError(f"{name} is not a list of tokens")
    try:
        return array("I", tokens).tobytes()
    except (TypeError, OverflowError):
        raise ValueError(f"{name} has what is not a token") from None


def _text(text: str) -> bytes:
    packed = text.encode(errors="surrogatepass")
    return packed + b" " * (-len(packed) % TEXT_BYTES) or b" " * TEXT_BYTES


def _request(at: float, packed: bytes, output: int, salt: str, block_tokens: int) -> TraceRequest:
    """A request of a prompt that is known: each of its full blocks gets a hash of all tokens up to its end."""
    width, ids = block_tokens * TOKEN_BYTES, []
    last = xxh3_64_intdigest(salt.encode(errors="surrogatepass"))
    for start in range(0, len(packed) - width + 1, width):
        last = xxh3_64_intdigest(packed[start : start + width], last)
        ids.append(last)
    return TraceRequest(at, len(packed) // TOKEN_BYTES, output, ids, salt)


# --- what a trace's prompts are made of


class Prompts:
    """Makes packed tokens from ids: every block is one token of its own, repeated."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._token: dict[int, bytes] = {}  # by id, of those that are wider than tokens are
        self._tokens = DIRECT

    def packed(self, request: TraceRequest) -> bytes:
        rest = request.input_length - len(request.ids) * self._block_tokens
        blocks = [self._of(each) * self._block_tokens for each in request.ids]
        if rest > 0:  # the short last block without an id: no other prompt has it
            blocks.append(self._fresh() * rest)
        return b"".join(blocks)[: request.input_length * TOKEN_BYTES]

    def _of(self, id_: int) -> bytes:
        if 0 <= id_ < DIRECT:
            return id_.to_bytes(TOKEN_BYTES, "little")
        token = self._token.get(id_)
        if token is None:
            token = self._token[id_] = self._fresh()
        return token

    def _fresh(self) -> bytes:
        self._tokens = DIRECT + (self._tokens + 1) % DIRECT
        return self._tokens.to_bytes(TOKEN_BYTES, "little")


class Infinite:
    """The hits of a cache of full blocks that never evicts, from the ids alone, without a core."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.seen: set[int] = set()

    def hit(self, request: TraceRequest) -> int:
        """Tokens of the request that earlier requests had; remembers its blocks."""
        full = request.ids[: request.input_length // self._block_tokens]
        known = next((at for at, each in enumerate(full) if each not in self.seen), len(full))
        self.seen.update(full[known:])
        return known * self._block_tokens
