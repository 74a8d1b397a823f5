"""How settings become options: dataclasses in, flags, environment and a config file out, by cyclopts (decision 15).

A field is a flag, its docstring the help, its value the default. A flag goes before the environment, the environment
before the file, the file before the default. Every mistake is one ConfigError.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
    convert,
)
from cyclopts.argument import ArgumentCollection, update_argument_collection
from cyclopts.config import Env

from kvarve.errors import ConfigError
from kvarve.sizes import Size, format_size, parse_size

FILE_BYTES = 64 * 1024  # of a config file at most: a longer one is something else
FLAT = Parameter(name="*")  # a dataclass whose fields are options without a prefix
ConfigFile = Annotated[Path | None, Parameter(help="a TOML file, such as host_memory = '4GiB'")]


def root_app(name: str, text: str, version: str, **more: Any) -> App:
    """An application. Each command reads $NAME_COMMAND_OPTION and, with --config, a file."""
    return App(
        name,
        help=text,
        help_format="plaintext",
        version=version,
        config=[Env(f"{name.upper()}_", show=False), _read_file],
        default_parameter=Parameter(converter=_parse, allow_repeating=True, negative_iterable=(), show_default=_shown),
        result_action="return_value",
        **more,
    )


def call(app: App, words: Sequence[str]) -> Any:
    """Run the command that the words name, and answer what it answers; ConfigError if there is none."""
    _check_command(app, words)
    try:
        return app(words, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as e:
        chain = " ".join([*app.name, *(e.command_chain or ())])
        raise ConfigError(f"{_complaint(e)} (see {chain} --help)") from None


def _check_command(app: App, words: Sequence[str]) -> None:
    """ConfigError if the words begin with one that is no command, whatever options follow it."""
    for number, word in enumerate(words):
        known = [name for name in app if not name.startswith("-")]
        if not known or word.startswith("-"):
            return
        if word not in known:
            chain = " ".join([*app.name, *words[:number]])
            raise ConfigError(f"{_unknown_command(word, known)} (see {chain} --help)")
        app = app[word]


def _unknown_command(word: str, known: Sequence[str]) -> str:
    return f"unknown command {word!r}{closest(word, known)}; known: {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def _complaint(error: CycloptsError) -> str:
    """What is wrong, in one line that repeats no value, since it may be a key."""
    if isinstance(error, UnknownOptionError):
        flags = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
        word = (error.token.keyword or error.token.value).partition("=")[0]
        return f"unknown option {word!r}{closest(word, flags)}"
    if isinstance(error, UnknownCommandError | UnusedCliTokensError):
        word = (error.unused_tokens or [""])[0]
        known = [name for name in (error.app or ()) if not name.startswith("-")]
        if not known:
            return f"unknown argument {word!r}"
        return _unknown_command(word, known)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        return f"{name}: expected one argument" if error.keyword else f"{error.argument.name} is required"
    if isinstance(error, CoercionError) and error.token is not None:
        return f"{_origin(error.token)}: {error.msg or 'expected one value'}"
    if isinstance(error, ValidationError) and error.argument is not None:
        return f"{_origin(error.argument.tokens[0])}: {error.exception_message.rstrip('.')}"
    return str(error)


def _origin(token: Token) -> str:
    """The option that a token sets: "--port", "$KVARVE_SERVE_PORT", or "FILE: port"."""
    name = (token.keyword or "").strip("[]")
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
            return parse_size(text)
        except ConfigError as e:
            raise CoercionError(msg=str(e)) from None
    if kind is int and not re.fullmatch(r"-?[0-9]{1,30}", text):
        raise CoercionError(msg=f"{text!r} is not a whole number")
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise CoercionError(msg=f"{text!r} is not a number") from None
    if kind is bool and text.lower() not in ("true", "false"):
        raise CoercionError(msg=f"{text!r} is neither true nor false")
    return convert(kind, [text])


def _shown(value: Any) -> Any:
    """A default in the help; nothing for the empty ones."""
    return format_size(value).replace(" ", "") if isinstance(value, Size) else value


# --- the file


def _read_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Settings from the file that --config names, for options that neither a flag nor the environment sets."""
    given = [token for argument in arguments if argument.name == "--config" for token in argument.tokens]
    if not given:
        return
    path = Path(given[-1].value)
    settings = _settings(path)
    known = {argument.name[2:].replace("-", "_") for argument in arguments if argument.name.startswith("--")}
    for key in settings:
        if key not in known - {"config"}:
            raise ConfigError(f"{path}: unknown setting {key!r}{closest(key, known)}")
    update_argument_collection(settings, str(path), arguments, root_keys=(), allow_unknown=False)


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
        if len(content) > FILE_BYTES:
            raise ConfigError(f"{path}: a config file has at most {format_size(FILE_BYTES)}")
        settings = tomllib.loads(content.decode())
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise ConfigError(f"{path}: not TOML: {e}") from None
    if tables := [key for key, value in settings.items() if isinstance(value, dict)]:
        raise ConfigError(f"{path}: {tables[0]!r} is a table: give settings without a heading, such as port = 8000")
    return settings
