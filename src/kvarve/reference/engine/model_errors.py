"""Why transformers cannot read, build or compute a model, in one line for the person who gave its config.

transformers checks little of a config, so that most errors in one come up somewhere in its code, in words for its
authors. What its user needs to know is there as well: a package to install, a field without a value, the line of code.
"""

import inspect
import linecache
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers

CODE = Path(transformers.__file__).parent
LONGEST = 300  # characters
# What code runs into that a config does not fit. torch's RuntimeErrors are not among them: on the meta device it raises
# one where code reads a value, too.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError)
# An attribute in a line of code, with all that leads to it: self.config.rope_parameters.
ATTRIBUTE = re.compile(r"\b([a-z_]\w*(?:\.\w+)+)")


def one_line(error: BaseException) -> str:
    """The message of an exception, on one line and not too long."""
    return " ".join(str(error).split())[:LONGEST] or type(error).__name__


def in_words(error: BaseException) -> str:
    """The reason of an exception that code of transformers has raised or run into, on one line."""
    said = one_line(error)
    if isinstance(error, ImportError):
        return said.partition(" Please note")[0]
    if isinstance(error, AttributeError) and isinstance(error.obj, transformers.PreTrainedConfig):
        return f"the config has no {error.name}"
    theirs = [at for at in traceback.walk_tb(error.__traceback__) if CODE in _path(at[0]).parents]
    if not theirs:
        return said
    frame, number = theirs[-1]
    line = linecache.getline(str(_path(frame)), number).strip()
    if line.startswith(("raise ", "assert ")) and str(error):
        return said
    chains = []
    if isinstance(error, TypeError):
        chains = ATTRIBUTE.findall(line)
    elif isinstance(error, AttributeError) and error.obj is None:
        chains = re.findall(rf"([a-z_][\w.]*)\.{error.name}\b", line)
    if missing := _without_value(frame, chains):
        return f"the config gives no value for {' and '.join(missing)}"
    if isinstance(error, KeyError):
        said = f"there is no {said}"
    return f"{said} ({_path(frame).name}, line {number}: {line})"[:LONGEST]


def _path(frame: FrameType) -> Path:
    return Path(frame.f_code.co_filename)


def _without_value(frame: FrameType, chains: Sequence[str]) -> list[str]:
    """Those of some attributes that are None, as the config's fields that they were read from."""
    found: dict[str, None] = {}
    for chain in chains:
        first, *names = chain.split(".")
        owner, value = None, frame.f_locals.get(first, ...)
        for name in names:
            owner, value = value, getattr(value, "__dict__", {}).get(name, ...)
        if value is None and (owner is None or isinstance(owner, transformers.PreTrainedConfig | torch.nn.Module)):
            found[_field(owner, (first, *names)[-1])] = None
    return [*found]


def _field(owner: Any, name: str) -> str:
    """The field of a config that a module keeps under this name."""
    if isinstance(owner, transformers.PreTrainedConfig):
        return name
    try:
        source = inspect.getsource(type(owner))
    except (OSError, TypeError):  # it has none
        return name
    read = re.search(rf"\bself\.{name} = (?:\w+\.)*config\.(\w+)", source)
    return read[1] if read else name
