"""Options of the commands beside `kvarve serve` and `kvarve simulate`: one dataclass each, read by `options`.

They stand apart from what they command, whose imports take seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from kvarve.settings.options import FLAT, JsonFile

EnginePython = Annotated[Path | None, Parameter(env_var="KVARVE_VLLM_PYTHON", show_env_var=True)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDtype = Literal["auto", "fp8_e4m3"]
AdminKey = Annotated[str | None, Parameter(env_var="KVARVE_ADMIN_KEY", show_env_var=True)]


@FLAT
@dataclass(frozen=True, kw_only=True)
class Demo:
    engine: Literal["kvarve", "vllm"] = "kvarve"
    """Engine that computes: kvarve's own, or vLLM with kvarve's connector and without it"""
    engine_python: EnginePython = None
    """Python that has vLLM [default: this one, or that of .venv-vllm in kvarve's checkout]"""
    out: Path = Path("out")
    """Folder for the report, the picture and the server's log"""
    model: str = "builtin:tiny-hybrid"
    """Model: builtin:... or a checkpoint folder"""
    quick: bool = False
    """Run with fewer and shorter texts"""
    context_tokens: PositiveInt = 3000
    """Tokens of each text that questions are about, counted by builtin:tiny-hybrid; for kvarve's own engine"""
    tp: PositiveInt = 1
    """Processes among which the model is divided; for kvarve's own engine"""
    port: NonNegativeInt = 0
    """Port of the server that the demo starts; 0 takes any free one"""
    storage: str | None = None
    """URL of an empty storage, such as mooncake://10.0.0.1 [default: files below --out]"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Verify:
    model: str = "builtin:tiny-hybrid"
    """Model to prove: builtin:... or a folder with config.json"""
    dtype: Dtype = "auto"
    """Type in which the model computes; auto takes the checkpoint's"""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Type in which keys and values are kept, as for kvarve serve"""
    device: Literal["auto", "cpu", "cuda"] | str = "auto"
    """Device to compute on, as torch names it; auto takes a GPU if torch can use one"""
    page_tokens: PositiveInt = 64
    """Tokens of a page; --chunk-tokens must be a multiple of it"""
    chunk_tokens: PositiveInt = 256
    """Tokens of a prompt that are computed at once"""
    hits: Literal["exact", "rounded"] = "exact"
    """Claim to check: hits change no bit (exact), or how much --hits rounded of kvarve serve changes (rounded)"""
    tokens: PositiveInt | None = None
    """Most tokens of a prompt [default: as many as the model's windows ask for]"""
    seed: NonNegativeInt = 7
    """Seed of all prompts and of everything else that is drawn"""
    storage: str | None = None
    """URL of a storage to keep pages in meanwhile [default: a folder that is removed afterwards]"""
    tp: PositiveInt = 1
    """Processes that compute the model together; the report says how far their sums are from those of one"""
    json: JsonFile = None
    """File for the report as JSON; - writes it, and nothing else, to standard output"""
    quick: bool = False
    """Prove with fewer and shorter prompts"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Models:
    model: str | None = None
    """Model to describe: builtin:... or a folder with config.json; no weights are read [default: all families]"""
    json: JsonFile = None
    """File for the output as JSON; - writes it, and nothing else, to standard output"""
    page_tokens: PositiveInt | None = None
    """Tokens of a page [default: 64, or what a model needs]"""
    chunk_tokens: PositiveInt | None = None
    """Tokens of a prompt that are computed at once [default: 256, or what a model needs]"""
    dtype: Dtype = "auto"
    """Type in which --model computes; auto takes the checkpoint's"""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Type in which --model keeps keys and values, as for kvarve serve"""


# --- kvarve storage


@FLAT
@dataclass(frozen=True, kw_only=True)
class Remote:
    server: str = "http://127.0.0.1:8000"
    """URL of the server"""
    admin_key: AdminKey = None
    """Admin key of the server. Prefer $KVARVE_ADMIN_KEY: `ps` shows arguments"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Attach(Remote):
    back_up: bool = False
    """Store also what the server has in memory already"""
    write_policy: Literal["through", "through:2", "back"] | str | None = None
    """Write policy of the server from then on, as --write-policy of kvarve serve [default: as it is]"""
    storage_wait: Literal["none", "2s+0.25s/Ki", "all"] | str | None = None
    """Wait for storage from then on, as --storage-wait of kvarve serve [default: as it is]"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Maintain:
    """Options of all commands on a folder."""

    json: JsonFile = None
    """File for the output as JSON; - writes it, and nothing else, to standard output"""


# --- kvarve keys


@FLAT
@dataclass(frozen=True, kw_only=True)
class NewKey:
    file: Path | None = None
    """File to add the key's line to; it is made if there is none"""
    salt: str | None = None
    """Salt of the key's requests; they share no page with those of other salts, or of none"""
    admin: bool = False
    """Let the key open /admin as well"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class VerifyStored(Maintain):
    storage_key: str | None = None
    """File of the key with which the pages were sealed"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Ls(Maintain):
    group: str | None = None
    """Group to list, by its first digits [default: all]"""
    limit: NonNegativeInt = 20
    """Most pages to list; 0 lists all"""
    by: Literal["used", "stored", "size"] = "used"
    """Order: last used first, last stored first, or largest first"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Gc(Maintain):
    unused_for: str | None = None
    """Time such as 30d: remove models, too, that no process has open and that were not used for so long"""


@FLAT
@dataclass(frozen=True, kw_only=True)
class Drop(Maintain):
    group: str | None = None
    """Group to drop, by its first digits"""
    model: str | None = None
    """Model to drop, by the first digits of its fingerprint"""
    all: bool = False
    """Drop every model"""
    yes: bool = False
    """Drop without asking"""
