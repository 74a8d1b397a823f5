"""`kvarve bench`: its subcommands, and what each may be told. What they do is imported only then."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt

from kvarve.settings.commands import AdminKey
from kvarve.settings.options import FLAT, ConfigFile, JsonFile, needs

ApiKey = Annotated[str | None, Parameter(env_var="KVARVE_API_KEY", show_env_var=True)]

EPILOGUE = """\
example:
  kvarve bench multiturn --clients 16 --turns 5 --json -
  kvarve bench serving --server http://127.0.0.1:8000 --rate 4 --input sharegpt.json
"""

bench = App(
    "bench",
    help="Measure a server, of any make: it is sent the same requests in rounds, around a flush. "
    "kvarve serve is started for it unless --server is given. docs/benchmarking.md explains the figures.",
    help_epilogue=EPILOGUE,
)


@FLAT
@dataclass(frozen=True, kw_only=True)
class Target:
    """Which server is measured, and where results go."""

    server: str | None = None
    """the URL of one that runs, of any make; `kvarve serve` is started unless given"""
    model: str | None = None
    """builtin:... or a folder, for the server that is started (builtin:tiny-hybrid unless given); of a server that
    runs, the name to ask for (its first one unless given)"""
    serve: str | None = None
    """more options for the server that is started, in quotes: --serve="--threads 2" """
    api_key: ApiKey = None
    """that the server wants; the environment says it unseen by `ps`"""
    admin_key: AdminKey = None
    """for the flush, if the server has one"""
    rounds: PositiveInt = 2
    """how often the same requests are sent"""
    flush: Literal["device,host", "device", "host", "none"] = "device,host"
    """what is emptied between two rounds; a server of another make empties all"""
    seed: NonNegativeInt = 1
    """of all that is drawn"""
    out: Path = Path("out")
    """folder for the log of the server that is started, and meanwhile for its storage"""
    json: JsonFile = None
    """write the figures there; -: to standard output, and nothing else"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Load(Target):
    """How requests are sent."""

    clients: PositiveInt = 16
    """each sends its next request when its last one is answered"""
    rate: PositiveFloat | None = None
    """new conversations a second in place of --clients, at random times (Poisson), however long answers take"""
    warmup: NonNegativeInt = 2
    """requests before the first round, which count nowhere"""
    output_tokens: PositiveInt = 32
    """tokens of each answer; of a file's answers, the most"""
    png: Path | None = None
    """draw the figures there"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Serving(Load):
    input: str = "random"
    """random, or a file: ShareGPT's, or a trace (docs/planning.md), whose own times are used unless --rate is given"""
    requests: PositiveInt = 64
    """how many; of a file, the first ones"""
    input_tokens: PositiveInt = 1024
    """tokens of each random prompt"""
    block_tokens: PositiveInt = 512
    """of a trace: tokens that one id stands for"""
    speed: PositiveFloat = 1.0
    """of a trace: how many times faster than it was recorded"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Multiturn(Load):
    input: str = "random"
    """random, or a file of ShareGPT's"""
    conversations: PositiveInt | None = None
    """how many; as many as --clients unless given"""
    turns: PositiveInt = 5
    """of each conversation, at most"""
    input_tokens: PositiveInt = 512
    """tokens that each turn adds"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Load):
    groups: PositiveInt = 8
    """different prefixes"""
    prompts: PositiveInt = 8
    """requests with each of them"""
    prefix_tokens: PositiveInt = 2048
    """tokens of a prefix"""
    input_tokens: PositiveInt = 128
    """tokens that each request adds"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class LongDocument(Load):
    documents: PositiveInt = 4
    """how many"""
    document_tokens: PositiveInt = 8192
    """tokens of each"""
    questions: PositiveInt = 4
    """about each: all documents get their first one, then all their second"""
    input_tokens: PositiveInt = 64
    """tokens of a question"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Accuracy(Target):
    input: tuple[Path, ...] = ()
    """files of GSM8K's form (.jsonl) or MMLU's (.csv); a small set of kvarve's own unless given"""
    shots: NonNegativeInt | None = None
    """examples before each question, the first ones of its file; 5 of GSM8K's and MMLU's unless given"""
    requests: PositiveInt | None = None
    """questions of each file; all unless given"""
    clients: PositiveInt = 8
    """each sends its next question when its last one is answered"""
    output_tokens: PositiveInt = 256
    """tokens of an answer, at most"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Hash(Target):
    clients: PositiveInt = 8
    """conversations at once"""
    turns: PositiveInt = 3
    """of each conversation"""
    input_tokens: PositiveInt = 512
    """tokens that each turn adds"""


def _load(kind: str, options: Load) -> int:
    with needs("server", f"bench {kind}"):
        from kvarve.bench import run, workloads

    return run.load(kind, options, lambda: workloads.conversations(options))


@bench.command
def serving(*, options: Serving = Serving(), config: ConfigFile = None) -> int:
    """Send random prompts, ShareGPT's, or a trace's."""
    return _load("serving", options)


@bench.command
def multiturn(*, options: Multiturn = Multiturn(), config: ConfigFile = None) -> int:
    """Hold conversations: each turn's prompt has all turns before it."""
    return _load("multiturn", options)


@bench.command(name="shared-prefix")
def shared_prefix(*, options: SharedPrefix = SharedPrefix(), config: ConfigFile = None) -> int:
    """Send prompts of a few groups, each of which shares a long prefix."""
    return _load("shared-prefix", options)


@bench.command(name="long-document")
def long_document(*, options: LongDocument = LongDocument(), config: ConfigFile = None) -> int:
    """Ask several questions about each of a few long documents."""
    return _load("long-document", options)


@bench.command
def accuracy(*, options: Accuracy = Accuracy(), config: ConfigFile = None) -> int:
    """Ask questions with known answers: those of GSM8K and MMLU, or kvarve's own."""
    with needs("server", "bench accuracy"):
        from kvarve.bench import accuracy as questions

    return questions.main(options)


@bench.command(name="hash")
def hashes(*, options: Hash = Hash(), config: ConfigFile = None) -> int:
    """Compare the bytes of every page before and after each copy between tiers."""
    with needs("server", "bench hash"):
        from kvarve.bench import hashes as pages

    return pages.main(options)
