"""A command line of SGLang's or vLLM's server as one of `kvarve serve`, with all that is wrong with it at once."""

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from kvarve.errors import ConfigError, KvarveError
from kvarve.pages.sizes import parse_size
from kvarve.settings import engine_flags
from kvarve.settings.engine_flags import BACKEND, EXTRA, FLAGS, FRACTIONS, HOST, OFFLOADED, RATIO, TOKENS, flag_of
from kvarve.settings.values import closest

THEIR_RATIO = "2"  # of host memory to device memory, where SGLang is given neither
TOGETHER = (BACKEND, EXTRA, RATIO, HOST, OFFLOADED, TOKENS, *FRACTIONS)
LAUNCHERS = ("sglang.launch_server", "vllm.entrypoints.openai.api_server", "serve")
SECRET = "--api-key", "--admin-key"
LEFT_OUT = ("SGLANG_", "VLLM_")  # variables of theirs
_SHELL = re.compile("#|[|;&]+$|[0-9&]?>")  # a comment, or another command behind this one
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*=")
_OPTION = re.compile("--?[A-Za-z]")  # and no negative number
_SECRET = re.compile("(TOKEN|KEY)$|PASSWORD|SECRET", re.IGNORECASE)  # in a variable's name
_UNSET = re.compile(r"[\w/.:{}-]*\$\{?\w[\w/.:${}-]*")  # a word with a variable that the shell has not set yet


class Measures(Protocol):
    """What takes torch to know of `kvarve serve` with some words. KvarveError if it cannot be known."""

    def pages_bytes(self, words: Sequence[str], tokens: int, /) -> int:
        """How many bytes one rank needs for these tokens, and for the states of --states."""

    def gpu_bytes(self, words: Sequence[str], /) -> tuple[int, int] | None:
        """The memory of a rank's GPU, and its part of the weights; None without a GPU."""


def command_of(text: str) -> tuple[list[str], list[str]]:
    """The variables that are not theirs, and the flags, of a command as people write it: "A=b vllm serve MODEL --x 2".
    ConfigError if its quotes do not match, or if it is a command of something else."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", "", text))  # lines that go on
    except ValueError as e:
        raise ConfigError(f"the command must be one that a shell reads: {e}") from None
    words = words[: next((at for at, word in enumerate(words) if _SHELL.match(word)), len(words))]
    begun = next((at + 1 for at, word in enumerate(words) if word in LAUNCHERS), 0)
    before, flags = words[:begun], words[begun:]
    if not begun:  # flags alone, or behind variables
        begun = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
        before, flags = words[:begun], words[begun:]
        if other := [word for word in before if not _VARIABLE.match(word)]:
            got = " ".join([other[0], *(flags[:2] if flags[:1] == ["-m"] else [])])
            raise ConfigError(
                f"the command must run sglang.launch_server or vllm serve, got {got!r}; "
                "of a container give what runs in it"
            )
    if flags and not flags[0].startswith("-"):  # vllm serve MODEL
        flags[:1] = ["--model", flags[0]]
    given = [word.partition("=") for word in before if _VARIABLE.match(word) and not word.startswith(LEFT_OUT)]
    return [f"{name}={shlex.quote(value)}" for name, _, value in given], flags


def translated(
    words: Iterable[str],
    options: Collection[str],
    device_memory: int,
    measures: Callable[[], Measures],
    note: Callable[[str], None],
    shown: Callable[[str], str],
    foreign: bool = False,
) -> list[str]:
    """The words of a command line of `serve` with our flags for theirs; `note` gets a line for each without meaning.

    `options`: those that serve has. `device_memory`: the default, in bytes. `shown`: a storage URL without secrets.
    ConfigError names all flags that are refused or unknown, and the command that is left; of one without a flag of
    theirs, other code finds what is unknown.
    """
    left, ours, wrong = [*words], list[str](), dict[str, list[str]]()  # by what is wrong, the flags of which it is
    config = engine_flags.THEIR_CONFIG if foreign else None
    foreign = foreign or any(flag_of(_spelled(word)[0]) for word in left)
    theirs: dict[str, str] = {}  # of those that mean something together
    while left:
        word = left.pop(0)
        written = word.partition("=")[0]
        name, given, value = _spelled(word)
        flag = config if name == "--config" else flag_of(name)
        has_value = bool(left) and not given and not _OPTION.match(left[0])
        if flag is None:
            if foreign and _OPTION.match(word) and name not in options:
                wrong[f"unknown option {written!r}{closest(name, [*options, *FLAGS])}"] = []
                if has_value:
                    del left[0]
            elif config and _is_stray(word, ours):
                if value_of(ours, "--model") is None:  # vllm serve --port 7 MODEL
                    ours += ["--model", word]
                else:
                    wrong["a value belongs to no option: give each option one"] = []
            else:
                ours.append(f"{name}{given}{value}" if name in options else word)
            continue
        if not given and not flag.switch:
            if not has_value and not flag.several:
                wrong[f"{written} needs a value"] = []
                continue
            value = left.pop(0) if has_value else ""
        if value in flag.unset and not flag.switch:
            theirs |= {name: ""} if name == HOST and value == "0" else {}
        elif name in TOGETHER:
            theirs[name] = value
        elif flag.ours is not None:
            try:
                ours += [flag.ours, flag.value(value)]
            except ConfigError as e:
                wrong[str(e)] = []
        elif flag.allows(value):
            note(f"{written} changes nothing here: {flag.why}")
        else:
            asked = "" if not value or value.startswith("{") else f" {value[:40]}"  # JSON may have a password
            wrong.setdefault(f"not supported: {flag.why}", []).append(f"{written}{asked}")
    for part in (_storage, partial(_device, measures, note), partial(_host, device_memory)):
        try:
            ours += part(theirs, ours)
        except ConfigError as e:
            wrong[str(e)] = []
    if wrong:
        told = [
            f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} {what}" if names else what
            for what, names in wrong.items()
        ]
        rest = f"; without them: {in_words(ours, shown)}" if foreign and len(ours) else ""
        raise ConfigError("; ".join(told) + rest)
    return ours


def _spelled(word: str) -> tuple[str, str, str]:
    """An option's name as their parsers read it, and its value: of --max_model_len=8, -tp, -O3, or -cc.mode=3."""
    name, given, value = re.sub(r"^-O=?(?=\w)", "-O=", word).partition("=")
    name = name.partition(".")[0] if _OPTION.match(name) else name
    return engine_flags.SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name), given, value


def _is_stray(word: str, ours: Sequence[str]) -> bool:
    """Whether a word is no option, and no value of the one before it."""
    return not (_OPTION.match(word) or (ours and _OPTION.match(ours[-1]) and "=" not in ours[-1]))


def in_words(ours: Sequence[str], shown: Callable[[str], str], variables: Sequence[str] = ()) -> str:
    """A command of `kvarve serve` for people: no key and no password is in it."""
    told = list[str]()
    for name, _, value in (each.partition("=") for each in variables):
        told.append(f"{name}={'...' if _SECRET.search(name) else shown(value) if '://' in value else value}")
    told += ["kvarve", "serve"]
    for before, word in zip(("", *ours), ours, strict=False):
        name, given, value = word.partition("=")
        if before in SECRET:
            told.append("...")
        elif name in SECRET and given:
            told.append(f"{name}=...")
        elif "://" in word:
            told.append(shlex.quote(f"{name}={shown(value)}" if word.startswith("--") else shown(word)))
        else:
            told.append(f'"{word}"' if _UNSET.fullmatch(word) else shlex.quote(word))
    return " ".join(told)


# --- what flags of theirs mean beside others


def _storage(theirs: dict[str, str], ours: list[str]) -> list[str]:
    if EXTRA in theirs and BACKEND not in theirs:
        raise ConfigError(f"{EXTRA} needs {BACKEND}, of which it is the config")
    if BACKEND not in theirs:
        return []
    extra = theirs.get(EXTRA)
    if extra and extra.startswith("@"):
        try:
            extra = Path(extra[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as e:
            raise ConfigError(f"{EXTRA}: {extra[1:]} cannot be read: {getattr(e, 'strerror', None) or e}") from None
    return ["--storage", engine_flags.storage_url(theirs[BACKEND], extra)]


def _host(device_memory: int, theirs: dict[str, str], ours: list[str]) -> list[str]:
    """Host memory of a rank: of SGLang's, too, a size goes before a ratio, and ours before both. vLLM's is of all."""
    if value_of(ours, "--host-memory") is not None:
        return []
    if OFFLOADED in theirs:
        size, ranks = f"{theirs[OFFLOADED]}GiB", value_of(ours, "--tp") or "1"
        several = ranks.isdecimal() and 1 < int(ranks) < 1 << 20
        return ["--host-memory", f"{parse_size(size) // int(ranks)}B" if several else size]
    if theirs.get(HOST):
        return ["--host-memory", FLAGS[HOST].value(theirs[HOST])]
    if not {HOST, RATIO} & {*theirs}:
        return []
    given = theirs.get(RATIO, THEIR_RATIO)
    try:
        ratio = float(given)
    except ValueError:
        raise ConfigError(f"{RATIO} must be a number, got {given[:40]!r}") from None
    if not 0 <= ratio <= 1 << 20:
        raise ConfigError(f"{RATIO} must be a ratio of host memory to device memory, got {given[:40]!r}")
    return ["--host-memory", f"{int(ratio * _device_bytes(ours, device_memory))}B"]


def _device(
    measures: Callable[[], Measures], note: Callable[[str], None], theirs: dict[str, str], ours: list[str]
) -> list[str]:
    """Device memory, of theirs the least of a share of a GPU and a number of tokens."""
    found, asked = list[int](), [name for name in (TOKENS, *FRACTIONS) if name in theirs]
    for name in asked:
        text = theirs[name]
        whole = name == TOKENS
        if not (text.isdecimal() and len(text) < 20 and int(text) if whole else _share(text)):
            form = "a number of tokens" if whole else "above 0 and at most 1"
            raise ConfigError(f"{name} must be {form}, got {text[:40]!r}")
        try:
            if whole:
                found.append(measures().pages_bytes(ours, int(text)))
            elif (gpu := measures().gpu_bytes(ours)) is None:
                note(f"{name} changes nothing here: there is no GPU, so --device-memory says it")
            else:
                found.append(int(float(text) * gpu[0] - gpu[1]))
        except KvarveError as e:
            note(f"{name} is left out, as the model is not known here: {e}")
    if found and min(found) <= 0:
        raise ConfigError(f"{', '.join(asked)} leave no memory for pages: the weights need more")
    return ["--device-memory", f"{min(found)}B"] if found and value_of(ours, "--device-memory") is None else []


def _share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _device_bytes(ours: list[str], default: int) -> int:
    """The device memory that the words give, or the environment, or the default."""
    if text := value_of(ours, "--device-memory") or os.environ.get("KVARVE_SERVE_DEVICE_MEMORY"):
        return parse_size(text)
    if value_of(ours, "--config"):
        raise ConfigError(f"{RATIO} needs --device-memory beside it, of which it is the ratio; or give --host-memory")
    return default


def value_of(words: Sequence[str], name: str) -> str | None:
    """The last value of an option."""
    for at in reversed(range(len(words))):
        option, given, value = words[at].partition("=")
        if option == name and (given or at + 1 < len(words)):
            return value if given else words[at + 1]
    return None
