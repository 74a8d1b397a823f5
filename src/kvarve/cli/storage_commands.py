"""`kvarve storage ls|stat|verify|gc|drop`: upkeep of a folder or a bucket, also while servers use it.

The first three change nothing; `gc` and `drop` are one more process on the folder. Output and refusals are here, the
work is in an `Upkeep` of the storage. Exit codes: 0 done, 1 verify found damage, 2 refused or failed (an error
says why).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvarve.errors import ConfigError, StorageError
from kvarve.pages.keys import parse_object_name
from kvarve.pages.sizes import format_size
from kvarve.records.encodings import Broken, expanded
from kvarve.records.record import is_keyed, title, whole
from kvarve.records.seals import CHECKSUM, Seal, seal_of
from kvarve.reports import Printer, plain_table
from kvarve.settings.commands import Drop, Gc, Ls, Maintain, VerifyStored
from kvarve.storage.upkeep import Contents, Model, Stored, Upkeep
from kvarve.storage.urls import backend_of, parse_time, parse_url

Url = Annotated[
    str,
    Parameter(
        name="URL", help="URL or folder of a storage, such as file:///var/kvarve, var/kvarve or s3://BUCKET/kvarve"
    ),
]

ORDERS: dict[str, Callable[[Stored], float]] = {
    "used": lambda each: each.used_s_ago,
    "stored": lambda each: each.stored_s_ago,
    "size": lambda each: -each.size_bytes,
}
_SHORT = 12  # hex digits of a fingerprint or a key, for people
_SHOWN = 20  # damaged objects, for people
_UNCHECKED = {  # objects that cannot be checked: no page's name, no key given, no library for their compression
    "unknown": "without a page's name: not checked",
    "keyed": "sealed with a key: not checked (--storage-key)",
    "compressed": "compressed: not checked (install the extra 'compress')",
}
_UNITS = ((2 * 86400, 86400, "d"), (2 * 3600, 3600, "h"), (2 * 60, 60, "min"), (0, 1, "s"))


def _place(text: str, *, verify: bool = False) -> Upkeep:
    """Parse a URL, or a folder's path. Nothing is created; the capacity may be left out."""
    url = parse_url(text if "://" in text else str(Path(text).absolute()))
    backend = backend_of(url)
    if not backend.shared:
        raise ConfigError(
            f"{url.text} cannot be read from outside of its process: ask its server with kvarve storage status"
        )
    if not (backend.can_verify if verify else backend.can_list):
        whom = f"managed by {backend.managed_by}" if backend.managed_by else "not managed here"
        raise ConfigError(
            f"{url.text} is not supported here, as it is {whom}: kvarve storage status shows a server's view of it"
        )
    # The capacity of a plain path is a default, not the user's.
    return backend.upkeep(url if "://" in text else replace(url, parameters={}))


# --- the commands


def ls(url: Url, /, *, options: Ls = Ls()) -> int:
    place, out = _place(url), Printer(options.json)
    models = place.contents().models
    found = [(model, each) for model, objects in _objects(place, models) for each in objects]
    if options.group is not None:
        group = _the_one(place, "group", options.group, {each.group for _, each in found})
        found = [(model, each) for model, each in found if each.group == group]
    found.sort(key=lambda pair: ORDERS[options.by](pair[1]))
    shown = found[: options.limit or None]
    more = len(found) - len(shown)
    table = plain_table("group", "page", "pool", right=("rank", "size", "stored", "used", "uses"))
    for _, each in shown:  # `stat` has the groups by model
        about = parse_object_name(each.name)
        name = ("", each.name, "", "")
        if about:
            name = (about.group, about.key.hex()[:_SHORT], about.pool, f"{about.rank} of {about.ranks}")
        ages = _age(each.stored_s_ago), _age(each.used_s_ago)
        table.add_row(*name, format_size(each.size_bytes), *ages, f"{each.uses:,}")
    if shown:
        out.table(table)
    size = format_size(sum(each.size_bytes for _, each in found))
    out.say(f"{_many(len(found), 'object')}, {size}" + (f"; {more:,} more are not shown (--limit)" if more else ""))
    objects = [_object_json(model, each) for model, each in shown]
    return out.write({"folder": place.where, "objects": objects, "more": more})


def stat(url: Url, /, *, options: Maintain = Maintain()) -> int:
    place, out = _place(url), Printer(options.json)
    contents = place.contents()
    models = contents.models
    text = f"{place.where}: {format_size(contents.bytes)} in {_many(len(models), 'model')}"
    if place.capacity_bytes is not None:
        text += f", {contents.bytes / place.capacity_bytes:.0%} of {format_size(place.capacity_bytes)}"
    out.say(text)
    for damage in contents.damaged:
        out.say(f"  {damage}")
    reports: list[dict[str, Any]] = []
    for model in models:
        with place.inspect(model) as inspection:
            objects, slots, lost = inspection.objects(), inspection.states(), inspection.lost
        rows = _shares(objects)
        reports.append(_model_json(model) | {"slots": slots, "objects": len(objects), "groups": [*rows], "lost": lost})
        use = "in use" if model.in_use else f"not used for {_age(_unused_s(model, objects))}"
        out.say(f"\n{model.description}")
        out.say(f"  fingerprint {_short(model)}, {use}, {format_size(model.file_bytes)} on disk")
        if slots:
            out.say("  slots: " + ", ".join(f"{count:,} {state}" for state, count in slots.items() if count))
        for damage in lost:
            out.say(f"  {damage}")
        table = plain_table("group", "pool", right=("objects", "size", "oldest", "newest", "last used"))
        for row in rows:
            ages = (_age(row[f"{when}_s_ago"]) for when in ("oldest", "newest", "used"))
            table.add_row(row["group"], row["pool"], f"{row['objects']:,}", format_size(row["bytes"]), *ages)
        if rows:
            out.table(table)
    sizes = {"bytes": contents.bytes, "capacity_bytes": place.capacity_bytes}
    return out.write({"folder": place.where} | sizes | {"models": reports, "damaged": contents.damaged})


def verify(url: Url, /, *, options: VerifyStored = VerifyStored()) -> int:
    seal = seal_of(options.storage_key)
    place, out = _place(url, verify=True), Printer(options.json)
    reports: list[dict[str, Any]] = []
    contents = _contents(place, out)
    damages = len(contents.damaged)
    for model in contents.models:
        inspector = Inspector(model.label, seal)
        with place.inspect(model) as inspection, _progress(model.description) as tick:
            read, damaged = inspection.verify(inspector.intact, tick)
            lost, lost_objects = inspection.lost, inspection.lost_objects
        damages += len(damaged) + len(lost)
        whys = {name: inspector.whys.get(name, "cannot be read") for name in damaged}
        counts = {"read": read, **{what: inspector.unchecked[what] for what in _UNCHECKED}}
        listed = [{"name": name, "why": why} for name, why in whys.items()]
        reports.append(_model_json(model) | counts | {"lost": lost, "lost_objects": lost_objects, "damaged": listed})
        text = f"{_named(model)}: {_many(read, 'object')} read, "
        text += f"{len(damaged):,} damaged: a server that reads one drops it" if damaged else "none damaged"
        count = f"{_many(lost_objects, 'object')} or more" if lost_objects else "perhaps some"
        out.say(text + (f"; {count} lost:" if lost else ""))
        notes = [f"{name}: {why}" for name, why in whys.items()]
        if len(whys) > _SHOWN:
            notes[_SHOWN:] = [f"and {len(whys) - _SHOWN:,} more"]
        notes += lost
        notes += [f"{_many(inspector.unchecked[it], 'object')} {why}" for it, why in _UNCHECKED.items() if counts[it]]
        for note in notes:
            out.say(f"  {note}")
    report = {"folder": place.where, "ok": not damages, "models": reports, "damaged": contents.damaged}
    return out.write(report, 1 if damages else 0)


class Inspector:
    """Checks of each object of a model whether it is the page of its name; `whys` has the reasons if not."""

    def __init__(self, namespace: bytes, seal: Seal = CHECKSUM) -> None:
        self._namespace, self._seal = namespace, seal
        self.whys: dict[str, str] = {}
        self.unchecked: Counter[str] = Counter()  # by a name of `_UNCHECKED`

    def intact(self, name: str, record: memoryview) -> bool:
        wanted = parse_object_name(name)
        if wanted is None:
            self.unchecked["unknown"] += 1
            return True
        if self._seal is CHECKSUM and is_keyed(record):
            self.unchecked["keyed"] += 1
            return True
        try:
            record = expanded(record)
        except Broken as why:
            self.whys[name] = f"it was compressed, and {why}"
            return False
        except ConfigError:
            self.unchecked["compressed"] += 1
            return True
        if not whole(record, self._seal):
            self.whys[name] = "its seal or its checksum is wrong"
        elif (header := title(record)).namespace != self._namespace:
            self.whys[name] = f"holds a page of another model, {header.namespace.hex()[:_SHORT]}"
        elif header[1:] != wanted[1:]:
            self.whys[name] = f"holds another page, {header.key.hex()}.{header.pool}.{header.rank}of{header.ranks}"
        return name not in self.whys


def gc(url: Url, /, *, options: Gc = Gc()) -> int:
    place, out = _place(url), Printer(options.json)
    unused_for_s = None
    if options.unused_for is not None:
        try:
            unused_for_s = parse_time(options.unused_for)
        except ConfigError as e:
            raise ConfigError(f"--unused-for: {e}") from None
    reports: list[dict[str, Any]] = []
    contents = _contents(place, out)
    for model in contents.models:
        with place.inspect(model) as inspection:
            unused_s = _unused_s(model, inspection.objects())
        counts = place.collect(model)
        old = unused_for_s is not None and not model.in_use and unused_s >= unused_for_s
        removed = old and place.drop_model(model, f"kvarve storage gc --unused-for {options.unused_for}")
        reports.append(_model_json(model) | counts | {"unused_s": unused_s, "removed": removed})
        old_objects, slabs = counts["expired"], counts["damaged_bytes"]
        done = [f"{old_objects:,} objects were too old"] if old_objects else []
        done += [f"{slabs:,} bytes were those of damaged slabs"] if slabs else []
        if removed:
            done = [f"not used for {_age(unused_s)}: removed", format_size(model.file_bytes)]
        out.say(f"{_named(model)}: {', '.join(done) or 'nothing to free'}")
    if place.advice:
        out.say(f"the bucket does so itself, with this in place of all its rules: {place.advice}")
    return out.write({"folder": place.where, "models": reports, "damaged": contents.damaged})


def drop(url: Url, /, *, options: Drop = Drop()) -> int:
    if (options.group is not None) + (options.model is not None) + options.all != 1:
        raise ConfigError("drop needs one of --group, --model and --all (see kvarve storage drop --help)")
    place, out = _place(url), Printer(options.json)
    models = place.contents().models
    report: dict[str, Any] = {"folder": place.where, "dropped": False}
    if options.group is not None:
        objects = {model.label: found for model, found in _objects(place, models)}
        group = _the_one(place, "group", options.group, {each.group for found in objects.values() for each in found})
        models = [model for model in models if any(each.group == group for each in objects[model.label])]
        mine = [each for model in models for each in objects[model.label] if each.group == group]
        report |= {"group": group, "objects": len(mine), "bytes": sum(each.size_bytes for each in mine)}
        size = format_size(report["bytes"])
        if not _agreed(f"drop group {group}: {_many(len(mine), 'object')}, {size}", options, out):
            return out.write(report)
        count = 0
        for model in models:
            count += place.drop(model, group)
        report |= {"dropped": True, "objects": count}
        out.say(f"{_many(count, 'object')} dropped")
        return out.write(report)
    if options.model is not None:
        label = _the_one(place, "model", options.model.lower(), {model.label.hex() for model in models})
        models = [model for model in models if model.label.hex() == label]
    for model in models:
        if model.in_use:
            raise StorageError(_in_use(model))
    size = format_size(sum(model.file_bytes for model in models))
    report |= {"models": [_model_json(model) for model in models]}
    what = "; ".join(map(_named, models)) or "nothing"
    if not _agreed(f"drop {_many(len(models), 'model')}, {size}: {what}", options, out):
        return out.write(report)
    for model in models:
        if not place.drop_model(model, "kvarve storage drop"):
            raise StorageError(_in_use(model))  # it has been opened since
        out.say(f"{_named(model)}: dropped")
    return out.write(report | {"dropped": True})


# --- shared


def _contents(place: Upkeep, out: Printer) -> Contents:
    """What the folder has; its damage is printed."""
    contents = place.contents()
    for damage in contents.damaged:
        out.say(damage)
    return contents


def _objects(place: Upkeep, models: Iterable[Model]) -> Iterator[tuple[Model, list[Stored]]]:
    for model in models:
        with place.inspect(model) as inspection:
            yield model, inspection.objects()


def _the_one(place: Upkeep, kind: str, begins: str, known: set[str]) -> str:
    """The one name with this prefix, as for git commits; ConfigError if there is none, or several."""
    found = sorted({each for each in known if each.startswith(begins)} if begins not in known else {begins})
    if len(found) == 1:
        return found[0]
    problem = f"no {kind} begins with {begins!r}"
    if found:
        problem = f"several {kind}s begin with {begins!r}: {', '.join(each[:16] for each in found[:4])}"
    raise ConfigError(f"--{kind} must begin one name: {problem}; kvarve storage stat {place.where} lists them")


def _agreed(what: str, options: Drop, out: Printer) -> bool:
    """Whether the user agrees, by --yes or at a terminal. ConfigError if there is no terminal."""
    out.say(("" if options.yes else "would ") + what)
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("nothing was dropped: without a terminal it needs --yes")
    print("Do it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    out.say("nothing was dropped")
    return False


def _in_use(model: Model) -> str:
    return f"{_named(model)} is in use: end or detach the processes that have it open, or drop its groups one by one"


def _unused_s(model: Model, objects: Sequence[Stored]) -> float:
    """How long a model has not been used."""
    return min([model.open_s_ago, *(each.used_s_ago for each in objects[:1])])


def _shares(objects: Sequence[Stored]) -> list[dict[str, Any]]:
    """Totals by group and pool."""
    parts: dict[tuple[str, str], list[Stored]] = {}
    for each in objects:
        about = parse_object_name(each.name)
        parts.setdefault((each.group, about.pool if about else ""), []).append(each)
    return [
        {
            "group": group,
            "pool": pool,
            "objects": len(part),
            "bytes": sum(each.size_bytes for each in part),
            "oldest_s_ago": max(each.stored_s_ago for each in part),
            "newest_s_ago": min(each.stored_s_ago for each in part),
            "used_s_ago": min(each.used_s_ago for each in part),
        }
        for (group, pool), part in sorted(parts.items())
    ]


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda read, of: progress.update(bar, completed=read, total=of)


def _model_json(model: Model) -> dict[str, Any]:
    return {
        "fingerprint": model.label.hex(),
        "description": model.description,
        "in_use": model.in_use,
        "file_bytes": model.file_bytes,
    }


def _object_json(model: Model, each: Stored) -> dict[str, Any]:
    about = parse_object_name(each.name)
    return {
        "model": model.label.hex(),
        "name": each.name,
        "group": each.group,
        "key": about and about.key.hex(),
        **{part: about and getattr(about, part) for part in ("pool", "rank", "ranks")},
        "bytes": each.size_bytes,
        "stored_s_ago": each.stored_s_ago,
        "used_s_ago": each.used_s_ago,
        "uses": each.uses,
    }


def _named(model: Model) -> str:
    return f"{model.description} ({_short(model)})"


def _short(model: Model) -> str:
    return model.label.hex()[:_SHORT]


def _age(seconds: float) -> str:
    _, unit_s, unit = next(row for row in _UNITS if seconds >= row[0])
    return f"{int(seconds // unit_s)} {unit}"


def _many(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"
