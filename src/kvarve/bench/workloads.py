"""What is asked: conversations of known prompts, made before the clock starts, the same in every round.

A later turn's prompt has all of the turns before it, and in place of the server's own answers as many random tokens, or
those of the file: so all rounds, and all servers, get the same prompts.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvarve.bench.bench_command import Load, LongDocument, Multiturn, Serving, SharedPrefix, Target
from kvarve.errors import ConfigError
from kvarve.planner.traces import TEXT_BYTES, TraceRequest, read_trace

Message = dict[str, str]
# Random tokens are few different ones, which every tokenizer has: what counts is that no two pages are equal.
TOKENS = range(32, 250)
SHAREGPT_BYTES = 4 << 30
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True)
class Turn:
    """One request: its prompt as tokens, a text or messages, and the tokens of its answer."""

    prompt: list[int] | str | list[Message]
    output_tokens: int


@dataclass(frozen=True)
class Conversation:
    """Requests that follow one another, each when the one before is answered."""

    turns: tuple[Turn, ...]
    at_s: float | None = None
    """when it begins, if the input says so"""


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(each) for each in rng.integers(TOKENS.start, TOKENS.stop, count)]


def drawn(options: Target, stream: int) -> np.random.Generator:
    """Each subcommand has a stream of its own, so that one's prompts are not cached for another's."""
    return np.random.default_rng([options.seed, stream])


def warm_up(count: int, like: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Requests of the size of the first ones, which share nothing with any."""
    rng = np.random.default_rng([seed, 1])
    sizes = [_size(conversation.turns[0]) for conversation in like[:count]]
    return [Conversation((Turn(tokens(rng, size), like[0].turns[0].output_tokens),)) for size in sizes]


@singledispatch
def conversations(options: Load) -> list[Conversation]:
    """What a subcommand sends."""
    raise NotImplementedError


@conversations.register
def serving(options: Serving) -> list[Conversation]:
    if options.input == "random":
        rng = drawn(options, 10)
        return [
            Conversation((Turn(tokens(rng, options.input_tokens), options.output_tokens),))
            for _ in range(options.requests)
        ]
    path = _file(options.input)
    if _is_sharegpt(path):
        found = (Conversation(each.turns[:1]) for each in sharegpt(path, options.output_tokens))
        return _some(path, [*islice(found, options.requests)])
    return [*islice(trace(path, options), options.requests)]


@conversations.register
def multiturn(options: Multiturn) -> list[Conversation]:
    count = options.conversations or options.clients
    if options.input != "random":
        path = _file(options.input)
        if not _is_sharegpt(path):
            raise ConfigError(f"--input: {path} must be a JSON list of conversations as ShareGPT has it")
        found = (each for each in sharegpt(path, options.output_tokens) if len(each.turns) > 1)
        return _some(path, [Conversation(each.turns[: options.turns]) for each in islice(found, count)])
    rng = drawn(options, 11)
    return [random_turns(rng, options.turns, options.input_tokens, options.output_tokens) for _ in range(count)]


def random_turns(rng: np.random.Generator, turns: int, input_tokens: int, output_tokens: int) -> Conversation:
    said: list[int] = []
    made = []
    for _ in range(turns):
        said = said + tokens(rng, input_tokens)
        made.append(Turn(said, output_tokens))
        said = said + tokens(rng, output_tokens)
    return Conversation(tuple(made))


@conversations.register
def shared_prefix(options: SharedPrefix) -> list[Conversation]:
    """The prompts of all groups in random order."""
    rng = drawn(options, 12)
    prefixes = [tokens(rng, options.prefix_tokens) for _ in range(options.groups)]
    made = [
        Conversation((Turn(prefix + tokens(rng, options.input_tokens), options.output_tokens),))
        for prefix in prefixes
        for _ in range(options.prompts)
    ]
    return [made[at] for at in rng.permutation(len(made))]


@conversations.register
def long_document(options: LongDocument) -> list[Conversation]:
    rng = drawn(options, 13)
    documents = [tokens(rng, options.document_tokens) for _ in range(options.documents)]
    return [
        Conversation((Turn(document + tokens(rng, options.input_tokens), options.output_tokens),))
        for _ in range(options.questions)
        for document in documents
    ]


def trace(path: Path, options: Serving) -> Iterator[Conversation]:
    """A trace's requests: prompts of its lengths that share what its prompts share, at its times."""
    first: float | None = None
    for number, request in enumerate(read_trace(path, options.block_tokens)):
        first = request.timestamp_ms if first is None else first
        output = min(request.output_length or options.output_tokens, options.output_tokens)
        prompt = _blocks(request, options.block_tokens, number)
        yield Conversation((Turn(prompt, output),), (request.timestamp_ms - first) / 1e3 / options.speed)


def _blocks(request: TraceRequest, block_tokens: int, number: int) -> list[int]:
    """The prompt of a trace's request: each id is the seed of its block; a last block without one is of its own."""
    blocks = [tokens(np.random.default_rng([2, each % (1 << 64)]), block_tokens) for each in request.ids]
    blocks.append(tokens(np.random.default_rng([3, number]), block_tokens))
    return [token for block in blocks for token in block][: request.input_length]


def sharegpt(path: Path, most: int) -> Iterator[Conversation]:
    """The conversations of a file of ShareGPT's form, each from its first question on; answers are about as long as the
    file's, but at most `most`. One without any is left out. ConfigError: the file has another form."""
    for row in _rows(path):
        found = row.get("conversations", row.get("messages"))
        if not isinstance(found, list):
            raise ConfigError(f"--input: {path}: a conversation must have a list of `conversations`")
        messages: list[Message] = []
        turns = []
        for each in found:
            role, text = _message(path, each)
            if role == "assistant" and not any(before["role"] == "user" for before in messages):
                continue
            if role == "assistant" and messages[-1]["role"] == "user":
                size = max(1, min(most, len(text.encode(errors="replace")) // TEXT_BYTES))
                turns.append(Turn([*messages], size))
            messages.append({"role": role, "content": text})
        if turns:
            yield Conversation(tuple(turns))


def _message(path: Path, each: Any) -> tuple[str, str]:
    if not isinstance(each, dict):
        raise ConfigError(f"--input: {path}: a message must be a JSON object")
    role, text = each.get("from", each.get("role")), each.get("value", each.get("content"))
    if not isinstance(role, str) or not isinstance(text, str):
        raise ConfigError(f"--input: {path}: a message must have `from` and `value`")
    return _ROLES.get(role, "system"), text


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        if path.stat().st_size > SHAREGPT_BYTES:
            raise ConfigError(f"--input: {path} must have at most {SHAREGPT_BYTES >> 30} GiB")
        rows = json.loads(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"--input: {path}: {e.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--input: {path} must be JSON") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"--input: {path} must be a list of JSON objects")
    return rows


def _is_sharegpt(path: Path) -> bool:
    """Whether a file begins as a JSON list: lines of JSON begin with an object, gzip with its magic."""
    try:
        with path.open("rb") as file:
            return file.read(1024).lstrip()[:1] == b"["
    except OSError as e:
        raise ConfigError(f"--input: {path}: {e.strerror}") from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise ConfigError(f"--input must be random or a file, got {text!r}")
    return Path(text)


def _some(path: Path, found: list[Conversation]) -> list[Conversation]:
    if not found:
        raise ConfigError(f"--input: {path} needs a conversation that begins with a question and its answer")
    return found


def _size(turn: Turn) -> int:
    """Tokens of a prompt, about."""
    if isinstance(turn.prompt, list) and turn.prompt and isinstance(turn.prompt[0], int):
        return len(turn.prompt)
    return max(1, len(str(turn.prompt).encode(errors="replace")) // TEXT_BYTES)
