"""What a file store loses, it says: a warning for each slab, and a count in its usage, whatever file is damaged."""

import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import inspect_files
import pytest
from file_disks import MIB, Open, WithoutSync, file_name, total, trouble

from kvarve.cli.main import main
from kvarve.errors import StorageError
from kvarve.storage.file._table import ENTRY_BYTES
from kvarve.storage.file.disk import Directory
from kvarve.testing.suite import OTHER_LABEL, put

NAMES = [f"page-{i}" for i in range(60)]


@pytest.fixture
def filled(opened: Open, folder: Path) -> list[Path]:
    """The tables of a closed store."""
    storage = opened(512 << 10)
    assert all(put(storage, **{name: name.encode() * 400 for name in NAMES}))
    storage.close()
    tables = sorted(folder.rglob("*.table"))
    assert len(tables) > 2
    return tables


def flip(path: Path, rng: random.Random, count: int, first: int = 0, last: int = -1) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(count):
        data[rng.randrange(first, len(data) + last)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def warned(text: str, what: str) -> int:
    return sum(what in line for line in text.splitlines() if "WARNING" in line)


@pytest.mark.parametrize("read_only", [False, True])
def test_entries_that_were_damaged_are_counted_and_said_once_a_slab(filled, opened, read_only, caplog, capsys) -> None:
    print("seed 8")
    rng = random.Random(8)
    for table in filled:
        flip(table, rng, 200, ENTRY_BYTES, -ENTRY_BYTES)
    assert main(["storage", "verify", str(filled[0].parents[2])]) == 1
    out = capsys.readouterr().out
    storage = opened(512 << 10, read_only=read_only)
    usage = storage.usage()
    assert json.dumps(asdict(usage)), "a status is made of it"
    gone = len(NAMES) - sum(storage.exists(NAMES))
    assert usage.lost is not None and usage.objects == len(NAMES) - gone and usage.lost >= gone > 30
    assert f"none damaged; {usage.lost} objects or more lost:" in out
    assert warned(caplog.text, "entries are damaged: their objects are lost") == len(filled)
    storage.usage()
    if not read_only:
        put(storage, more=b"1")
    assert storage.usage().lost == usage.lost and warned(caplog.text, "are lost") == len(filled), "once"


def test_a_slab_of_which_both_headers_or_a_file_are_gone_counts_all_its_objects(filled, opened, caplog) -> None:
    storage = opened(512 << 10)
    of_slab = Counter(place.slab for place in inspect_files.places(storage).values())
    storage.close()
    rng = random.Random(3)
    flip(filled[0], rng, 40, 0, ENTRY_BYTES - filled[0].stat().st_size)
    flip(filled[0], rng, 40, filled[0].stat().st_size - ENTRY_BYTES, 0)
    filled[1].with_suffix("").unlink()
    filled[2].unlink()
    storage = opened(512 << 10)
    usage = storage.usage()
    assert usage.lost == of_slab[0] + of_slab[1], "and slots without a table were never a slab"
    assert warned(caplog.text, f"{of_slab[0]} objects are lost") >= 1 and warned(caplog.text, "are lost") == 2
    beside = opened(512 << 10)
    assert beside.usage().lost == 0, "it was told of by none that has the store open"


def test_a_slab_that_is_damaged_while_others_have_the_store_open_is_said_by_the_next_one_to_open_it(
    filled, opened, caplog
) -> None:
    storage = opened(512 << 10)
    flip(filled[0], random.Random(3), 40, 0, ENTRY_BYTES - filled[0].stat().st_size)
    flip(filled[0], random.Random(3), 40, filled[0].stat().st_size - ENTRY_BYTES, 0)
    other = opened(512 << 10)
    assert (storage.usage().lost, other.usage().lost) == (0, len(NAMES) - sum(other.exists(NAMES)))
    assert other.usage().lost and warned(caplog.text, "is damaged and not used") == 1


@pytest.mark.parametrize("harm", ["no name", "a mode"])
def test_a_model_that_is_hidden_is_said_and_takes_its_room(filled, opened, caplog, capsys, harm) -> None:
    model = filled[0].parent
    (model / "model.json").unlink() if harm == "no name" else model.chmod(0o770)
    before = total(model)
    folder = str(model.parents[1])
    assert main(["storage", "verify", folder, "--json", "-"]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damaged"]
    assert ("model.json is missing" if harm == "no name" else "may be written to by others") in damage
    assert main(["storage", "stat", folder, "--json", "-"]) == 0
    assert (json.loads(capsys.readouterr().out)["bytes"] >= before) is (harm == "no name")
    other = opened(before + (64 << 10), OTHER_LABEL, "model B")
    for i in range(60):
        put(other, **{f"other-{i}": bytes(4096)})
    assert warned(caplog.text, damage) == 1
    if harm == "no name":
        assert total(model.parents[1]) <= before + (64 << 10) and any(other.exists([f"other-{i}" for i in range(60)]))
        other.close()
        smaller = opened(100 << 10, OTHER_LABEL, "model B")
        assert total(model.parents[1]) <= 100 << 10
        assert put(smaller, more=bytes(4096)) == [True]


@pytest.mark.parametrize(("gone", "read_only"), [(1, False), (9, True)])
def test_slots_without_a_table_are_said_unless_a_cut_may_have_left_them(
    filled, opened, caplog, capsys, gone, read_only
) -> None:
    folder, said = filled[0].parents[2], "slots have no table (slab-000000"
    for table in filled[:gone]:
        table.unlink()
    assert main(["storage", "verify", str(folder)]) == 1
    assert said in capsys.readouterr().out
    opened(512 << 10, read_only=read_only).close()
    assert warned(caplog.text, said) == 1
    if not read_only:
        filled[0].with_suffix("").write_bytes(bytes(20_000))
        assert main(["storage", "verify", str(folder)]) == 0
        opened(512 << 10)
        assert warned(caplog.text, said) == 1, "as a slab is left that is being made"


def test_entries_on_a_bad_sector_are_counted_once_and_are_there_again_if_it_is_read_again(filled, opened) -> None:
    class BadSector(WithoutSync):
        """The first entry of each table."""

        bad = True

        def _maybe(self, file: int, at: int, size_bytes: int) -> None:
            if self.bad and file_name(file).endswith(".table") and at <= ENTRY_BYTES < at + size_bytes:
                raise trouble()

        def peek(self, file: int, size_bytes: int, at: int) -> bytes:
            self._maybe(file, at, size_bytes)
            return super().peek(file, size_bytes, at)

        def read(self, file: int, into: Any, at: int) -> int:
            self._maybe(file, at, sum(len(each) for each in into))
            return super().read(file, into, at)

    disk = BadSector()
    storage = opened(512 << 10, disk=disk)
    lost = storage.usage().lost
    assert lost == len(filled) == len(NAMES) - sum(storage.exists(NAMES))
    for i in range(3):
        put(storage, **{f"more-{i}": b"1"})
    assert storage.usage().lost == lost
    disk.bad = False
    put(storage, more=b"1")
    assert all(storage.exists(NAMES))


def test_a_damaged_clock_is_said(filled, opened, caplog) -> None:
    flip(filled[0].with_name("clock"), random.Random(1), 3)
    opened(512 << 10)
    assert warned(caplog.text, "clock") == 1


def test_the_room_of_the_disk_is_told_until_it_cannot_be(opened) -> None:
    class Nearly(WithoutSync):
        free_bytes = 300 << 20

        def space(self, folder: Directory) -> tuple[int, int]:
            if self.free_bytes < 0:
                raise trouble()
            return self.free_bytes, 10 << 30

    disk = Nearly()
    storage = opened(MIB, disk=disk)
    assert storage.usage().room_bytes == 44 << 20, "a hundredth, 256 MiB at least, stays free"
    disk.free_bytes = 1 << 20
    assert storage.usage().room_bytes == 0
    disk.free_bytes = -1
    assert storage.usage().room_bytes is None
    with pytest.raises(StorageError, match=r"stored 0 of 1 objects: .*Input/output"):
        put(storage, a=b"1")
