"""`kvarve bench`: its subcommands and their options. Their work is imported only then."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt

from kvarve.settings.commands import AdminKey
from kvarve.settings.options import FLAT, ConfigFile, JsonFile, example, needs

ApiKey = Annotated[str | None, Parameter(env_var="KVARVE_API_KEY", show_env_var=True)]

EPILOGUE = example("kvarve bench multiturn --clients 16 --turns 5 --json -")

bench = App(
    "bench",
    help="Measure a server of any engine: send it the same requests in rounds, around a flush. "
    "Without --server, kvarve serve is started for it. docs/benchmarking.md explains the figures.",
    help_epilogue=EPILOGUE,
)


@FLAT
@dataclass(frozen=True, kw_only=True)
class Target:
    """Options of all: the server to measure, and places for results."""

    server: str | None = None
    """URL of a running server of any engine [default: kvarve serve is started]"""
    model: str | None = None
    """Model of the server that is started: builtin:... or a folder [default: builtin:tiny-hybrid]. For --server, the
    name to ask for [default: its first one]"""
    serve: str | None = None
    """More options for the server that is started, in quotes: --serve="--threads 2" """
    api_key: ApiKey = None
    """Key of the server's API. Prefer $KVARVE_API_KEY: `ps` shows arguments"""
    admin_key: AdminKey = None
    """Key for the flush, if the server has an admin key"""
    rounds: PositiveInt = 2
    """Rounds in which the same requests are sent"""
    flush: Literal["device,host", "device", "host", "none"] = "device,host"
    """Tiers to empty between two rounds; a server of another engine empties all"""
    seed: NonNegativeInt = 1
    """Seed of all that is drawn"""
    out: Path = Path("out")
    """Folder for the log of the server that is started, and meanwhile for its storage"""
    json: JsonFile = None
    """File for the figures as JSON; - writes them, and nothing else, to standard output"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Load(Target):
    """Options of sending requests."""

    clients: PositiveInt = 16
    """Clients, each of which sends its next request when its last one is answered"""
    rate: PositiveFloat | None = None
    """New conversations a second, instead of --clients, at random times (Poisson), however long answers take"""
    warmup: NonNegativeInt = 2
    """Requests before the first round, which count nowhere"""
    output_tokens: PositiveInt = 32
    """Tokens of each answer; of a file's answers, at most"""
    png: Path | None = None
    """Picture to draw of the figures"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Serving(Load):
    input: str = "random"
    """Prompts: random, or a file of ShareGPT's, or a trace (docs/planning.md), whose own times count without --rate"""
    requests: PositiveInt = 64
    """Requests to send; of a file, the first ones"""
    input_tokens: PositiveInt = 1024
    """Tokens of each random prompt"""
    block_tokens: PositiveInt = 512
    """Tokens that one id of a trace stands for"""
    speed: PositiveFloat = 1.0
    """Speed of a trace, compared with its recording"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Multiturn(Load):
    input: str = "random"
    """Prompts: random, or a file of ShareGPT's"""
    conversations: PositiveInt | None = None
    """Conversations to hold [default: --clients]"""
    turns: PositiveInt = 5
    """Most turns of a conversation"""
    input_tokens: PositiveInt = 512
    """Tokens that each turn adds"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Load):
    groups: PositiveInt = 8
    """Different prefixes"""
    prompts: PositiveInt = 8
    """Requests with each prefix"""
    prefix_tokens: PositiveInt = 2048
    """Tokens of a prefix"""
    input_tokens: PositiveInt = 128
    """Tokens that each request adds"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class LongDocument(Load):
    documents: PositiveInt = 4
    """Documents to ask about"""
    document_tokens: PositiveInt = 8192
    """Tokens of each document"""
    questions: PositiveInt = 4
    """Questions about each document: the first about all, then the second about all, and so on"""
    input_tokens: PositiveInt = 64
    """Tokens of a question"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Accuracy(Target):
    input: tuple[Path, ...] = ()
    """Files of GSM8K's form (.jsonl) or MMLU's (.csv) [default: a small set of kvarve's own]"""
    shots: NonNegativeInt | None = None
    """Examples before each question, the first ones of its file [default: 5 of GSM8K's and MMLU's]"""
    requests: PositiveInt | None = None
    """Questions of each file [default: all]"""
    clients: PositiveInt = 8
    """Clients, each of which sends its next question when its last one is answered"""
    output_tokens: PositiveInt = 256
    """Most tokens of an answer"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Hash(Target):
    clients: PositiveInt = 8
    """Conversations at once"""
    turns: PositiveInt = 3
    """Turns of each conversation"""
    input_tokens: PositiveInt = 512
    """Tokens that each turn adds"""


def _load(kind: str, options: Load) -> int:
    with needs("server", f"bench {kind}"):
        from kvarve.bench import run, workloads

    return run.load(kind, options, lambda: workloads.conversations(options))


@bench.command(help_epilogue=example("kvarve bench serving --rate 4 --input sharegpt.json"))
def serving(*, options: Serving = Serving(), config: ConfigFile = None) -> int:
    """Send random prompts, ShareGPT's, or a trace's."""
    return _load("serving", options)


@bench.command(help_epilogue=example("kvarve bench multiturn --clients 16 --turns 5 --json -"))
def multiturn(*, options: Multiturn = Multiturn(), config: ConfigFile = None) -> int:
    """Hold conversations: each turn's prompt has all turns before it."""
    return _load("multiturn", options)


@bench.command(name="shared-prefix", help_epilogue=example("kvarve bench shared-prefix --groups 4 --prompts 16"))
def shared_prefix(*, options: SharedPrefix = SharedPrefix(), config: ConfigFile = None) -> int:
    """Send prompts of a few groups, each of which shares a long prefix."""
    return _load("shared-prefix", options)


@bench.command(name="long-document", help_epilogue=example("kvarve bench long-document --documents 2 --questions 8"))
def long_document(*, options: LongDocument = LongDocument(), config: ConfigFile = None) -> int:
    """Ask several questions about each of a few long documents."""
    return _load("long-document", options)


@bench.command(help_epilogue=example("kvarve bench accuracy --model /models/Qwen3-0.6B --input gsm8k.jsonl"))
def accuracy(*, options: Accuracy = Accuracy(), config: ConfigFile = None) -> int:
    """Ask questions with known answers: those of GSM8K and MMLU, or kvarve's own."""
    with needs("server", "bench accuracy"):
        from kvarve.bench import accuracy as questions

    return questions.main(options)


@bench.command(name="hash", help_epilogue=example("kvarve bench hash --model /models/Qwen3-0.6B"))
def hashes(*, options: Hash = Hash(), config: ConfigFile = None) -> int:
    """Compare the bytes of every page before and after each copy between tiers."""
    with needs("server", "bench hash"):
        from kvarve.bench import hashes as pages

    return pages.main(options)
