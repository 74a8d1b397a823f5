"""`kvarve config show`: the settings that `kvarve serve` would have, and where each comes from.

`kvarve keys new|ls`: makes API keys, and lists a file of them.
"""

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from kvarve.errors import ConfigError
from kvarve.pages.sizes import Size, format_size
from kvarve.reference.server.keyfile import Key, new_key, read_keys
from kvarve.reference.server.serve_settings import Settings
from kvarve.reports import Printer, plain_table
from kvarve.settings.commands import Maintain, NewKey
from kvarve.settings.options import ConfigFile, JsonFile, needs, reads_as
from kvarve.storage.urls import shown

SECRET = ("api_key", "admin_key")
SOURCES: dict[str, str] = {}  # of the settings that were read last, by name
reads = reads_as("serve", ("changed", "json"), SOURCES)
_VALUE, _SOURCE = 28, 20  # columns: with the longest name they are 78


Changed = Annotated[bool, Parameter(negative="", help="Show only the settings that are not the defaults")]
Json = Annotated[JsonFile, Parameter(help="File for the values as JSON, sizes in bytes; - is standard output")]


def show(
    *, settings: Settings = Settings(), changed: Changed = False, json: Json = None, config: ConfigFile = None
) -> int:
    out, values = Printer(json), _values(settings)
    if changed:
        values = {name: value for name, value in values.items() if SOURCES[name] != "default"}
    table = plain_table("setting", "value", "from")
    for column, width in zip(table.columns[1:], (_VALUE, _SOURCE), strict=True):
        column.no_wrap, column.overflow, column.max_width = False, "fold", width
    for name, value in values.items():
        table.add_row(f"--{name.replace('_', '-')}", _text(value), SOURCES[name])
    out.table(table)
    done = out.write({name: {"value": _json(value), "from": SOURCES[name]} for name, value in values.items()})
    with needs("server", "serve"):
        from kvarve.reference.server.serve import check_settings  # torch and transformers take seconds to import

    check_settings(settings)  # shown all the same: what is wrong may have come from any of these places
    return done


def _values(settings: Any) -> dict[str, Any]:
    """By name, those of a dataclass inside among them; of a key only that there is one."""
    found: dict[str, Any] = {}
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            found |= _values(value)
        elif each.name in SECRET and value is not None:
            found[each.name] = "***"
        elif not each.repr and value is not None:  # URLs, which may hold passwords
            found[each.name] = shown(value) if isinstance(value, str) else tuple(map(shown, value))
        else:
            found[each.name] = value
    return found


def _text(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, Size):
        return format_size(value).replace(" ", "")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def _json(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


# --- kvarve keys

Name = Annotated[str, Parameter(name="NAME", help="Name of the key, in the log")]
File = Annotated[Path, Parameter(name="FILE", help="File of keys that kvarve serve --api-keys reads")]


def new(name: Name, /, *, options: NewKey = NewKey()) -> None:
    file = options.file
    secret, key = new_key(name, options.salt, options.admin)
    if file is not None:
        _add(file, key)
    print(f"key   {secret}")
    print(f"line  {key.line}" if file is None else f"file  {file}: {name} added")


def _add(file: Path, key: Key) -> None:
    if file.exists() and key.name in {each.name for each in read_keys(file)}:
        raise ConfigError(
            f"{file}: the key's name must be new, and {key.name} is there: choose another, or take its line out"
        )
    try:
        ends = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")
        with file.open(
            "a", encoding="utf-8"
        ) as end:  # one write, so that a server that reads it meanwhile finds whole lines
            end.write(("" if ends else "\n") + key.line + "\n")
    except OSError as e:
        raise ConfigError(f"--file: {file} cannot be written: {e.strerror}") from None


def ls(file: File, /, *, options: Maintain = Maintain()) -> int:
    found, out = read_keys(file), Printer(options.json)
    table = plain_table("name", "salt", "admin")
    for key in found:
        table.add_row(key.name, key.salt or "-", "yes" if key.admin else "no")
    if found:
        out.table(table)
    out.say(f"{len(found)} {'key' if len(found) == 1 else 'keys'}")
    return out.write(
        {"keys": [{name: value for name, value in asdict(key).items() if name != "sha256"} for key in found]}
    )
