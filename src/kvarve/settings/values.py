"""Settings as people write them in JSON and TOML: names, types and suggestions from the fields of a dataclass."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from math import inf
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size, format_size, parse_size

T = TypeVar("T")


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Form:
    """What a setting has to be: in words, by exact types (none: any), and by what holds of the value that `read` makes.

    `read` raises ConfigError.
    """

    words: str
    types: tuple[type, ...] = ()
    read: Callable[[Any], Any] = lambda value: value
    holds: Callable[[Any], bool] = lambda value: True

    def takes(self, value: Any) -> bool:
        return not self.types or type(value) in self.types


# By the type of a field, unless that is Annotated with a form of its own.
FORMS: dict[Any, Form] = {
    bool: Form("true or false", (bool,)),
    int: Form("a whole number", (int,)),
    float: Form("a number", (int, float), float),
    Size: Form("a size such as '10GiB', or a whole number of bytes", (int, str), _size),
    str: Form("a text", (str,)),
}


def seconds(below: float = inf) -> Form:
    most = f" and below {below:g}" if below < inf else ""
    words = f"a number of seconds above 0{most}, such as 5"
    return Form(words, (int, float), float, lambda value: bool(0 < value < below))


def size(least: int) -> Form:
    what = f"a size of at least {format_size(least)}" if least > 1 else "a size"
    return Form(f"{what}, such as '4GiB'", (int, str), _size, lambda value: bool(value >= least))


def form_of(hint: Any) -> Form:
    """The form of a field of this type; any type that is not in `FORMS` is written as a text."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return Form(" or ".join(parts), (str,), holds=lambda value: value in parts)
    if NoneType in parts:
        form = form_of(next(each for each in parts if each is not NoneType))
        return replace(form, types=(*form.types, NoneType), holds=lambda value: value is None or form.holds(value))
    if get_origin(hint) is Annotated:
        return next((each for each in parts if isinstance(each, Form)), None) or form_of(parts[0])
    return FORMS.get(hint, FORMS[str])


def closest(word: str, known: Iterable[str]) -> str:
    names = {name.lstrip("-"): name for name in known}  # hyphens alone are no likeness
    close = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f": did you mean {names[close[0]]}?" if close else ""


def settings_of(kind: Any) -> dict[str, Form]:
    """The form of each field of a dataclass by its name; a field that is a dataclass stands for its own fields, but for
    those that begin with one of the texts of its metadata "without"."""
    found, hints = dict[str, Form](), get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            inner = settings_of(hints[field.name])
            found |= {name: inner[name] for name in inner if not name.startswith(field.metadata.get("without", ()))}
        else:
            found[field.name] = form_of(hints[field.name])
    return found


def read_settings(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A dataclass of what somebody has written at `where`. ConfigError: which setting is unknown, missing or wrong, and
    what to write."""
    known, given = settings_of(kind), dict[str, Any]()
    for key in values:
        if key not in known:
            hint = closest(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown setting {key!r}{hint}")
    found = {key: _read(value, known[key], f"{where}: {key!r}") for key, value in values.items()}
    try:
        for field in fields(kind):  # type: ignore[arg-type]
            default: Any = field.default
            inner = settings_of(default) if is_dataclass(default) else {}
            if inner:
                given[field.name] = replace(default, **{key: found[key] for key in found if key in inner})
            elif field.name in found:
                given[field.name] = found[field.name]
            elif default is MISSING:
                raise ConfigError(f"{field.name!r} is missing: it must be {known[field.name].words}")
        return kind(**given)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from None


def _read(value: Any, form: Form, what: str) -> Any:
    try:
        found = form.read(value) if form.takes(value) else None
    except ConfigError as e:
        raise ConfigError(f"{what}: {e}") from None
    if not form.takes(value) or not form.holds(found):
        raise ConfigError(f"{what} is {value!r}; it must be {form.words}")
    return found
