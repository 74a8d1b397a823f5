"""Checks of the fields of dataclasses that programs make: each complaint is "NAME must be CONDITION, got VALUE"."""

from contextlib import suppress
from dataclasses import fields
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvarve.errors import ConfigError
from kvarve.pages.sizes import parse_size


class SizeField:
    """A field of a dataclass that is set to 1024 or to "1KiB", and is a number of bytes; it may have no default."""

    def __init__(self, default: int | None = None) -> None:
        self._default = default

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, _: type) -> int:
        found = self._default if instance is None else instance.__dict__[self._name]
        if found is None:
            raise AttributeError(self._name)  # so that dataclasses see no default
        return int(found)

    def __set__(self, instance: object, value: int | str) -> None:
        found: object = value
        if isinstance(value, str):
            with suppress(ConfigError):
                found = parse_size(value)
        sized = _fits(found, int) and isinstance(found, int) and found >= 0
        require(sized, self._name, "a size such as '10GiB', or a whole number of bytes", value)
        instance.__dict__[self._name] = found


def require(holds: bool, name: str, condition: str, value: object) -> None:
    """ConfigError unless the condition holds."""
    if not holds:
        raise ConfigError(f"{name} must be {condition}, got {value!r}")


def require_types(made: Any) -> None:
    """ConfigError unless each field of a dataclass is of the type that it is declared with."""
    of: Any = type(made)
    for name, hint, told in _declared(of):
        value = getattr(made, name)
        kind = hint.__name__ if isinstance(hint, type) else hint
        if get_origin(hint) is Literal:
            require(value in (known := get_args(hint)), name, f"one of {', '.join(known)}", value)
            continue
        # What is not to be shown may be a secret.
        require(_fits(value, hint), name, f"of type {kind}", value if told else type(value))


@cache
def _declared(kind: Any) -> list[tuple[str, Any, bool]]:
    hints = get_type_hints(kind)
    found = [(field.name, _wide(hints[field.name]), field.repr) for field in fields(kind)]
    return [each for each in found if each[1] is not SizeField]  # which has checked what it was set to


def _wide(hint: Any) -> Any:
    """A type without the choices that are only examples of it: Literal["a"] | str is str."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    return reduce(or_, (each for each in get_args(hint) if get_origin(each) is not Literal))


def _fits(value: object, hint: Any) -> bool:
    if (outer := get_origin(hint)) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if outer is tuple:
        return isinstance(value, tuple) and all(_fits(each, get_args(hint)[0]) for each in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)
