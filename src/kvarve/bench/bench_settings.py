"""What `kvarve bench` may be told: one dataclass for each subcommand; light to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveFloat, PositiveInt

from kvarve.settings.commands import AdminKey
from kvarve.settings.options import FLAT, JsonFile

ApiKey = Annotated[str | None, Parameter(env_var="KVARVE_API_KEY", show_env_var=True)]


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
