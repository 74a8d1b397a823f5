"""`kvarve keys new|ls`: makes API keys, and lists a file of them."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvarve.errors import ConfigError
from kvarve.reference.server.keyfile import Key, new_key, read_keys
from kvarve.reports import Printer, plain_table
from kvarve.settings.commands import Maintain, NewKey

Name = Annotated[str, Parameter(name="NAME", help="of the key, in the log")]
File = Annotated[Path, Parameter(name="FILE", help="that kvarve serve --api-keys reads")]


def new(name: Name, /, *, options: NewKey = NewKey()) -> None:
    file = options.file
    secret, key = new_key(name, options.salt, options.admin)
    if file is not None:
        _add(file, key)
    print(f"key   {secret}")
    print(f"line  {key.line}" if file is None else f"file  {file}: {name} added")


def _add(file: Path, key: Key) -> None:
    if file.exists() and key.name in {each.name for each in read_keys(file)}:
        raise ConfigError(f"{file}: there is a key {key.name} already: choose another name, or take its line out")
    try:
        ends = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")
        with file.open(
            "a", encoding="utf-8"
        ) as end:  # one write, so that a server that reads it meanwhile finds whole lines
            end.write(("" if ends else "\n") + key.line + "\n")
    except OSError as e:
        raise ConfigError(f"--file: {file}: {e.strerror}") from None


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
