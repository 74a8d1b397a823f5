"""What the commands beside `kvarve serve` and `kvarve simulate` may be told: one dataclass each, read by `options`.

They stand apart from what they command, whose imports take seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from kvarve.settings.options import FLAT, JsonFile

EnginePython = Annotated[Path | None, Parameter(env_var="KVARVE_VLLM_PYTHON", show_env_var=True)]
AdminKey = Annotated[str | None, Parameter(env_var="KVARVE_ADMIN_KEY", show_env_var=True)]


@FLAT
@dataclass(frozen=True, kw_only=True)
class Demo:
    engine: Literal["kvarve", "vllm"] = "kvarve"
    """what computes: kvarve's own engine, or vLLM with kvarve's connector and without it"""
    engine_python: EnginePython = None
    """the Python that has vLLM; unless given this one, or that of .venv-vllm in kvarve's checkout"""
    out: Path = Path("out")
    """folder for what it writes"""
    model: str = "builtin:tiny-hybrid"
    """builtin:... or a checkpoint folder"""
    quick: bool = False
    """a shorter run"""
    context_tokens: PositiveInt = 3000
    """tokens of each text that is asked about, about, in the words of builtin:tiny-hybrid; of kvarve's own engine"""
    tp: PositiveInt = 1
    """processes among which the model is divided; of kvarve's own engine"""
    port: NonNegativeInt = 0
    """port of the server that it starts, 0 for any free one"""
    storage: str | None = None
    """an empty one, such as mooncake://10.0.0.1; files below --out unless given"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Verify:
    model: str = "builtin:tiny-hybrid"
    """builtin:... or a folder with config.json"""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16"""
    device: str = "cpu"
    """where to compute, as torch names it"""
    page_tokens: PositiveInt = 64
    """tokens of a page; has to divide --chunk-tokens"""
    chunk_tokens: PositiveInt = 256
    """tokens of a prompt that are computed at once"""
    hits: Literal["exact", "rounded"] = "exact"
    """exact: proves that hits change no bit; rounded: measures what --hits rounded of kvarve serve changes"""
    tokens: PositiveInt | None = None
    """the most tokens of a prompt; what the model's windows ask for unless given"""
    seed: NonNegativeInt = 7
    """of all prompts and of everything that is drawn"""
    storage: str | None = None
    """where to keep pages meanwhile; a folder of its own unless given"""
    tp: PositiveInt = 1
    """processes that compute the model together; also measures how far their sums are from those of one"""
    json: JsonFile = None
    """gets the report too; -: standard output gets it, and nothing else"""
    quick: bool = False
    """fewer and shorter prompts"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Models:
    model: str | None = None
    """builtin:... or a folder with config.json; its weights are not read"""
    json: JsonFile = None
    """write all of it there too; -: to standard output, and nothing else"""
    page_tokens: PositiveInt | None = None
    """tokens of a page; 64, or what a model needs, unless given"""
    chunk_tokens: PositiveInt | None = None
    """tokens of a prompt that are computed at once; 256, or what a model needs, unless given"""
    dtype: str = "auto"
    """for --model: auto, float32, bfloat16 or float16"""


# --- kvarve storage


@FLAT
@dataclass(frozen=True, kw_only=True)
class Remote:
    server: str = "http://127.0.0.1:8000"
    """where it listens"""
    admin_key: AdminKey = None
    """its admin key; the environment says it unseen by `ps`"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Attach(Remote):
    back_up: bool = False
    """store what the server has in memory already"""
    write_policy: Literal["through", "through:2", "back"] | str | None = None
    """change the server's --write-policy too"""
    storage_wait: Literal["none", "2s+0.25s/Ki", "all"] | str | None = None
    """change the server's --storage-wait too"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Maintain:
    """What all commands on a folder may be told."""

    json: JsonFile = None
    """write all of it there too; -: to standard output, and nothing else"""


# --- kvarve keys


@FLAT
@dataclass(frozen=True, kw_only=True)
class NewKey:
    file: Path | None = None
    """also add the line to this file, which is made if there is none"""
    salt: str | None = None
    """requests of keys with another salt, or none, share no page with those of this one"""
    admin: bool = False
    """the key opens /admin as well"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class VerifyStored(Maintain):
    storage_key: str | None = None
    """the file of the key with which the pages were sealed"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Ls(Maintain):
    group: str | None = None
    """of this group alone; its first digits will do"""
    limit: NonNegativeInt = 20
    """how many to list, 0 for all"""
    by: str = "used"
    """used or stored, the newest first, or size"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Gc(Maintain):
    unused_for: str | None = None
    """also remove models that no process has open and that were not used for this long, such as 30d"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Drop(Maintain):
    group: str | None = None
    """this group's pages; its first digits will do"""
    model: str | None = None
    """the model whose fingerprint begins so"""
    all: bool = False
    """every model"""
    yes: bool = False
    """do not ask"""
