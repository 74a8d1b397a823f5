"""How settings become options: dataclasses in, flags, environment and a config file out, by cyclopts (decision 15).

A field is a flag, its docstring the help, its value the default. A flag goes before the environment, the environment
before the file, the file before the default. Every mistake is one ConfigError.
"""

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
    convert,
)
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Dict, Env
from cyclopts.help import DefaultFormatter, HelpPanel

from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size, format_size, parse_size
from kvarve.settings.values import FORMS, closest, form_of
from kvarve.system.heap import importing

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

FILE_BYTES = 64 * 1024  # of a config file at most: a longer one is something else
FLAT = Parameter(name="*")  # a dataclass whose fields are options without a prefix
JsonFile = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]  # of a report; - is standard output
ConfigFile = Annotated[Path | None, Parameter(help="TOML file of options, each as some_option = value")]


def root_app(name: str, text: str, version: str, **more: Any) -> App:
    """An application. A command with an option --config also reads $NAME_COMMAND_OPTION, and the file of --config."""
    return App(
        name,
        help=text,
        help_format="plaintext",
        help_formatter=Help(),
        version=version,
        config=[_read],
        default_parameter=Parameter(converter=_parse, allow_repeating=True, negative_iterable=(), show_default=_shown),
        result_action="return_value",
        **more,
    )


class Help(DefaultFormatter):
    """Prints a command's options, in groups if it has some: by a group's title, the names of its options in order.
    Those in no group are named in a line; `more` is the command that describes them."""

    def __init__(self, groups: Mapping[str, str] = MappingProxyType({}), more: str = "") -> None:
        super().__init__()
        self._groups, self._more = groups, more

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: HelpPanel) -> None:
        listed = [each.copy(choices=each.choices and (" | ".join(each.choices),)) for each in panel.entries]
        panel = panel.copy(entries=listed)  # with choices apart by what is in none of them
        entries = {name.removeprefix("--"): entry for entry in panel.entries for name in entry.names[:1]}
        for entry in panel.entries:  # the lines of a docstring are one text
            if text := getattr(getattr(entry.description, "primary_renderable", None), "plain", ""):
                entry.description.primary_renderable.plain = " ".join(text.split())
        if not self._groups or not all(name.startswith("--") for entry in panel.entries for name in entry.names[:1]):
            super().__call__(console, options, panel)
            return
        for title, names in self._groups.items():
            found = [entries.pop(name) for name in names.split() if name in entries]
            super().__call__(console, options, panel.copy(title=title, entries=found))
        if entries and self._more:
            names = ", ".join(f"--{name}" for name in entries)
            console.print(f"More options, that few need: {names}. See `{self._more}`.\n")


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\n  ".join(["example:", *lines]) + "\n"


def call(app: App, words: Sequence[str]) -> Any:
    """Run the command that the words name, and answer what it answers; ConfigError if there is none."""
    _check_command(app, words)
    try:
        return app(words, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as e:
        chain = " ".join([*app.name, *(e.command_chain or ())])
        raise ConfigError(f"{_complaint(e)} (see {chain} --help)") from None


@contextmanager
def needs(extra: str, command: str) -> Iterator[None]:
    """Imports for a command; ConfigError says which extra brings a library that is missing."""
    try:
        with importing():
            yield
    except ImportError as e:
        if (e.name or "kvarve").partition(".")[0] == "kvarve":
            raise
        missing = isinstance(e, ModuleNotFoundError)
        lacks = "what is not installed" if missing else f"{e.name}, which fails to load ({e})"
        what = f"{command} needs {lacks}: install kvarve with the extra {extra!r} (see the README)"
        raise ConfigError(what) from None


def _check_command(app: App, words: Sequence[str]) -> None:
    """ConfigError unless the words begin with a command, or ask for help; whatever options follow it."""
    chain = [*app.name]
    for word in [*words, ""]:
        known = [name for name in app if not name.startswith("-")]
        if not known or (word.startswith("-") and word in app):
            return
        if word not in known:
            kind, names = ("option", app) if word.startswith("-") else ("command", known)
            problem = f"unknown {kind} {word!r}{closest(word, names)};" if word else "which command?"
            raise ConfigError(f"{problem} known: {', '.join(known)} (see {' '.join(chain)} --help)")
        app = app[word]
        chain.append(word)


def _complaint(error: CycloptsError) -> str:
    """What is wrong, in one line that repeats no value, since it may be a key."""
    if isinstance(error, UnknownOptionError):
        flags = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
        word = (error.token.keyword or error.token.value).partition("=")[0]
        return f"unknown option {word!r}{closest(word, flags)}"
    if isinstance(error, UnusedCliTokensError):
        return "an argument that belongs to no option: put a value that has a space into quotes"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        hyphen = f"expected one argument; one that begins with - is given as {name}=-..."
        return f"{name}: {hyphen}" if error.keyword else f"{name} is required"
    if isinstance(error, CoercionError) and error.token is not None:
        known = get_args(error.target_type) if get_origin(error.target_type) is Literal else ()
        name = _origin(error.token) or (error.argument.name if error.argument else "")
        if known:
            return f"{name} must be one of {', '.join(known)}, got {error.token.value[:40]!r}"
        return f"{name}: {error.msg or 'expected one value'}"
    if isinstance(error, ValidationError) and error.argument is not None:
        return f"{_origin(error.argument.tokens[0])}: {error.exception_message.rstrip('.')}"
    return str(error)


def _origin(token: Token) -> str:
    """The option that a token sets: "--port", "$KVARVE_SERVE_PORT", or "FILE: port"."""
    name = (token.keyword or "").strip("[]")  # cyclopts' way to write a key of a file
    if token.source == "env":
        return f"${name}"
    return name if token.source in ("", "cli") else f"{token.source}: {name}"


# --- values


def _parse(kind: Any, tokens: Sequence[Token]) -> Any:
    return convert(kind, tokens, converter=_value)


def _value(kind: Any, text: str) -> Any:
    """One value of a type. Stricter than cyclopts, which takes 1.5 for a 2 and 0x10 for a 16."""
    if kind is Size:
        try:
            return Size(parse_size(text))
        except ConfigError as e:
            raise CoercionError(msg=str(e)) from None
    if kind is int and not re.fullmatch(r"-?[0-9]{1,30}", text):
        wrong = "too large" if re.fullmatch("-?[0-9]+", text) else "not a whole number"
        raise CoercionError(msg=f"{text[:40]!r} is {wrong}")
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise CoercionError(msg=f"{text!r} is not a number") from None
    if kind is bool:
        try:
            return convert(bool, [text])  # as for --flag=yes
        except CoercionError:
            raise CoercionError(msg=f"{text!r} is neither true nor false") from None
    return convert(kind, [text])


def _shown(value: Any) -> Any:
    """A default in the help; none for the empty ones."""
    return format_size(value).replace(" ", "") if isinstance(value, Size) else None if value in ((), "") else value


# --- the environment and the file


def _read(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Settings from the environment for options without a flag, and from the file of --config for the rest.

    A command without --config reads neither: no variable that a shell has exported agrees to a deletion.
    """
    if any(each.name == "--config" for each in arguments):
        _fill(app, commands, arguments)


def reads_as(command: str, own: Collection[str], told: dict[str, str]) -> Callable[..., None]:
    """For a command that has the options of another and some of its `own`: the others' values come from where that
    command's do. `told` receives the source of each: "default", "flag", "$VARIABLE" or the file."""

    def read(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        found = (each for each in arguments if _setting(each) not in own)
        others = ArgumentCollection(found)  # type: ignore[no-untyped-call]
        _fill(app, (command,), others)
        for each in others:
            if each.name.startswith("--") and each.name != "--config":
                token = each.tokens[0] if each.tokens else None
                told[_setting(each)] = "default" if token is None else _source(token)

    return read


def _source(token: Token) -> str:
    if token.source == "env":
        return f"${token.keyword}"
    return "flag" if token.source in ("", "cli") else token.source


def _setting(option: Argument) -> str:
    """Its name in a file."""
    return option.name[2:].replace("-", "_")


def _fill(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    options = {_setting(each): each for each in arguments if each.name.startswith("--")}
    prefix = "_".join(["kvarve", *commands, ""]).upper()
    variables = [f"{prefix}{name.upper()}" for name in options]
    for variable in os.environ:
        if variable.startswith(prefix) and variable not in variables:
            raise ConfigError(f"${variable} is an unknown variable{closest(variable, variables)}")
    Env(prefix, command=False)(app, commands, arguments)
    config = options.pop("config")
    if config.tokens:
        path = config.tokens[-1].value
        settings = read_file(path)
        for key, value in settings.items():
            if key not in options:
                raise ConfigError(f"{path}: unknown setting {key!r}{closest(key, options)}")
            hint = options[key].hint
            several = get_origin(hint) is tuple and isinstance(value, list)
            form, values = form_of(hint), value if several else [value]
            if not all(map(form.takes, values)):
                quotes = ", without quotes" if str not in form.types else ", in quotes" if form is FORMS[str] else ""
                raise ConfigError(f"{path}: {key} must be {form.words}{quotes}")
        # By command, as cyclopts would leave out a setting with the name of a command from a flat one.
        data = reduce(lambda inner, name: {name: inner}, commands[::-1], settings)
        Dict(data=data, source=path)(app, commands, arguments)


def read_file(path: str, named: str = "--config") -> dict[str, Any]:
    """The settings in a TOML file, which `named` names. ConfigError: it cannot be read, or has tables."""
    if not Path(path).is_file():
        raise ConfigError(f"{named} must be a file, got {path!r}")
    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise ConfigError(f"{path}: a config file must have at most {format_size(FILE_BYTES)}")
        settings = tomllib.loads(content.decode())
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"{path}: a config file must be TOML: {e}") from None
    if tables := [key for key, value in settings.items() if isinstance(value, dict)]:
        raise ConfigError(f"{path}: {tables[0]!r} is a table: settings must have no heading, such as port = 8000")
    return settings
