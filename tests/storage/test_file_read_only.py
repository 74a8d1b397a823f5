"""Reading a store changes nothing in it, whatever its state; damaged files are left alone."""

import errno
import json
import os
import random
import shutil
from pathlib import Path

import inspect_files
import pytest
from file_disks import MIB, Rigged, Untouched, WithoutSync, everything, total, trouble
from file_pages import CAPACITY, NAMESPACE, Page, Quick, intact, pages, store

from kvarve.cli.main import main
from kvarve.storage import FileStorage
from kvarve.storage.file._table import ENTRY_BYTES, Header, Shape, read_header, slot_bytes_for
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.folder import Wanted, check_folder
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.testing.suite import OTHER_LABEL, get, put

LABEL = NAMESPACE  # so that pages are those of the model
MODEL = LABEL.hex()[:16]
LOOKS = ("stat", "ls", "verify")


def opened(folder: Path, capacity: int = CAPACITY) -> FileStorage:
    return FileStorage(folder, capacity, LABEL, "model A", threads=1, disk=Quick())


@pytest.fixture
def store_of_two(tmp_path: Path) -> Path:
    """Two models, one of them with slabs of two sizes; both closed."""
    folder = tmp_path / "store"
    storage = opened(folder, capacity=MIB)
    assert all(store(storage, pages("full", *range(12)) + pages("window", 1, 2)))
    storage.close()
    other = FileStorage(folder, MIB, OTHER_LABEL, "model B", disk=WithoutSync())
    put(other, b=b"of model B")
    other.close()
    return folder


def flip(path: Path, *places: int) -> None:
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 4
    path.write_bytes(data)


def table(folder: Path, number: int = 0) -> Path:
    return folder / "models" / MODEL / f"slab-{number:06}.table"


def damage(folder: Path, kind: str) -> None:
    model, at = folder / "models" / MODEL, table(folder)
    if kind == "both headers":
        flip(at, 10, at.stat().st_size - ENTRY_BYTES + 10)
    elif kind == "an entry":
        flip(at, ENTRY_BYTES + 40)
    elif kind == "a cut slab":
        os.truncate(at.with_suffix(""), 5000)
    elif kind == "a model's name":
        (model / "model.json").write_text("{")
    else:
        gone = {"slots": at.with_suffix(""), "table": at, "clock": model / "clock", "changes": model / "changes"}
        gone[kind.removeprefix("no ")].unlink()


DAMAGES = ["both headers", "an entry", "a cut slab", "no slots", "no table", "a model's name", "no clock", "no changes"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_looking_at_a_store_changes_no_byte_of_it_in_whatever_state_it_is(store_of_two, kind):
    storage = opened(store_of_two, capacity=MIB) if kind in ("an entry", "no changes") else None  # also one in use
    damage(store_of_two, kind)
    before = everything(store_of_two)
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two)]) in (0, 1), kind
    assert everything(store_of_two) == before
    if storage is not None:
        storage.close()


def test_looking_works_where_nothing_can_be_written(store_of_two, monkeypatch, capsys):
    before = everything(store_of_two)
    monkeypatch.setattr("kvarve.storage.file.maintenance.Disk", Untouched)
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two), "--json", "-"]) == 0
    assert capsys.readouterr().err == ""
    assert everything(store_of_two) == before


def test_a_folder_may_be_named_from_where_one_is(store_of_two, monkeypatch, capsys):
    monkeypatch.chdir(store_of_two.parent)
    for word in (store_of_two.name, f"./{store_of_two.name}", str(store_of_two)):
        assert main(["storage", "stat", word]) == 0
        assert capsys.readouterr().out.startswith(f"{store_of_two}: ")


def test_looking_holds_no_file_open_afterwards(store_of_two):
    before = len([*Path("/proc/self/fd").iterdir()])
    for does in LOOKS:
        main(["storage", does, str(store_of_two)])
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_slab_that_is_removed_during_a_check_is_no_damage(store_of_two):
    (model,) = (each for each in FolderUpkeep(store_of_two).contents().models if each.label == LABEL)
    with FolderUpkeep(store_of_two).inspect(model) as inspection:
        storage = opened(store_of_two, capacity=MIB)
        assert inspect_files.remove(storage)
        storage.close()
        assert inspection.verify(lambda name, data: False) == (0, [])


def test_an_entry_that_is_written_during_a_check_is_no_damage(store_of_two, monkeypatch):
    whole = table(store_of_two).read_bytes()
    flip(table(store_of_two), ENTRY_BYTES + 40)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len([each for each in pauses if each]) == 2:
            table(store_of_two).write_bytes(whole)

    monkeypatch.setattr("kvarve.storage.file.maintenance.time.sleep", sleep)
    (model,) = (each for each in FolderUpkeep(store_of_two).contents().models if each.label == LABEL)
    with FolderUpkeep(store_of_two).inspect(model) as inspection:
        assert inspection.lost == []
        assert len(inspection.objects()) == 14


# --- headers


def test_a_flipped_bit_in_either_header_costs_nothing(store_of_two):
    everybody = pages("full", *range(12)) + pages("window", 1, 2)
    path = table(store_of_two)
    whole = path.read_bytes()
    rng = random.Random(7)
    for first in (0, len(whole) - ENTRY_BYTES):
        for at in range(first, first + 56, 14):
            data = bytearray(whole)
            data[at] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            assert main(["storage", "verify", str(store_of_two)]) == 0, "and a reader uses the other one"
            storage = opened(store_of_two, capacity=MIB)
            assert intact(storage, everybody) == set(everybody), f"byte {at}"
            storage.close()


def test_a_slab_of_which_both_headers_are_damaged_is_left_alone(store_of_two, caplog):
    path = table(store_of_two)
    slots = path.with_suffix("").read_bytes()
    flip(path, 10, path.stat().st_size - ENTRY_BYTES + 10)
    harmed = path.read_bytes()
    storage = opened(store_of_two, capacity=MIB)
    assert "slab-000000 is damaged and not used, until its space is needed" in caplog.text
    assert storage.usage().lost == 12
    assert store(storage, pages("full", *range(12))) == [True] * 12
    assert intact(storage, pages("full", *range(12))) == set(pages("full", *range(12)))
    storage.close()
    assert (path.read_bytes(), path.with_suffix("").read_bytes()) == (harmed, slots), "it is never used again"


def test_a_damaged_slab_goes_before_anything_that_is_used(store_of_two):
    path = table(store_of_two)
    flip(path, 10, path.stat().st_size - ENTRY_BYTES + 10)
    shutil.rmtree(store_of_two / "models" / OTHER_LABEL.hex()[:16])
    capacity = total(store_of_two) + (24 << 10)
    storage = opened(store_of_two, capacity=capacity)
    more = pages("full", *range(100, 130))
    count = 0
    harmed = path.read_bytes()
    while path.exists() and path.read_bytes() == harmed:
        assert store(storage, [more[count]]) == [True]
        assert total(store_of_two) <= capacity
        count += 1
    assert storage.usage().evicted == 0 and count > 1
    storage.close()


def test_no_slab_is_larger_than_16_gib():
    most = 16 << 30
    for slot_bytes in (4096, MIB, 3 << 30, most):
        shape = Shape.within(slot_bytes, 1 << 50)
        assert most - slot_bytes < shape.slots_bytes <= most
        assert read_header(Header(7, 9, shape).packed()) == (7, 9, shape)
    assert Shape.within(most + 4096, 1 << 50).slots == 0
    for beyond in (Shape(4096, (most >> 12) + 1), Shape(most + 4096, 1), Shape(4096, 0), Shape(5000, 1), Shape(0, 9)):
        assert read_header(Header(7, 9, beyond).packed()) is None
    assert slot_bytes_for(1) == 4096


# --- a model without a readable description


OF_ANOTHER = json.dumps({"label": OTHER_LABEL.hex(), "description": "of another folder"}).encode()
MARKERS = [b"", b'{"label": "no hex", "description": ""}', b"[" * 100_000, OF_ANOTHER]


@pytest.mark.parametrize("marker", MARKERS, ids=lambda marker: repr(marker[:30]))
def test_a_damaged_model_hinders_no_other_models_opening_and_is_reported(store_of_two, caplog, capsys, marker):
    (store_of_two / "models" / MODEL / "model.json").write_bytes(marker)
    before = everything(store_of_two / "models" / MODEL)
    check_folder(Wanted(store_of_two, MIB, OTHER_LABEL, "model B"))
    other = FileStorage(store_of_two, MIB, OTHER_LABEL, "model B", disk=WithoutSync())
    assert get(other, "b") == b"of model B"
    for at in range(0, 100, 10):  # as many as there is room for
        assert all(put(other, **{f"page-{i}": bytes(4096) for i in range(at, at + 10)}))
    other.close()
    assert caplog.text.count(f"models/{MODEL}/model.json is damaged") == 1, "said once"
    for does, code in (("stat", 0), ("ls", 0), ("verify", 1), ("gc", 0)):
        capsys.readouterr()
        assert main(["storage", does, str(store_of_two), "--json", "-"]) == code
        told = json.loads(capsys.readouterr().out)
        if does != "ls":
            (damaged,) = told["damaged"]
            assert "the next process to open its model writes it anew; or remove its folder" in damaged
            assert [each["fingerprint"] for each in told["models"]] == [OTHER_LABEL.hex()]
    assert everything(store_of_two / "models" / MODEL) == before


@pytest.mark.parametrize("marker", [*MARKERS, None], ids=lambda marker: repr(marker and marker[:30]))
def test_a_damaged_model_is_whole_again_when_it_is_opened_with_all_that_it_had(store_of_two, marker):
    path = store_of_two / "models" / MODEL / "model.json"
    path.write_bytes(marker) if marker is not None else path.unlink()
    check_folder(Wanted(store_of_two, MIB, LABEL, "model A"))
    storage = opened(store_of_two, capacity=MIB)
    assert intact(storage, pages("full", *range(12))) == set(pages("full", *range(12)))
    storage.close()
    assert json.loads(path.read_text()) == {"label": LABEL.hex(), "description": "model A"}


def test_a_flipped_bit_in_the_label_of_a_model_is_damage_and_costs_nothing(store_of_two, capsys):
    path, label = store_of_two / "models" / MODEL / "model.json", LABEL.hex()
    path.write_text(path.read_text().replace(label, label[:40] + f"{int(label[40], 16) ^ 1:x}" + label[41:]))
    for does, code in (("stat", 0), ("gc", 0), ("verify", 1)):
        assert main(["storage", does, str(store_of_two)]) == code
    assert "model.json is damaged (its label is not that of its slabs)" in " ".join(capsys.readouterr().out.split())
    for read_only in (True, False):
        storage = FileStorage(store_of_two, MIB, LABEL, "model A", disk=Quick(), read_only=read_only)
        assert intact(storage, pages("full", *range(12))) == set(pages("full", *range(12)))
        storage.close()
    assert json.loads(path.read_text()) == {"label": label, "description": "model A"}


def test_what_a_model_calls_itself_cannot_play_with_the_terminal(store_of_two, capsys):
    path = store_of_two / "models" / MODEL / "model.json"
    path.write_text(json.dumps({"label": LABEL.hex(), "description": "\x1b[2J\nmodel\ud800 A"}))
    assert main(["storage", "stat", str(store_of_two)]) == 0
    assert "\x1b" not in capsys.readouterr().out


# --- commands that change something


def test_a_store_can_be_read_while_another_process_stores_and_evicts(tmp_path):
    storage, known, seen = opened(tmp_path / "store"), list[Page](), 0
    (model,) = FolderUpkeep(tmp_path / "store").contents().models
    for turn in range(8):
        known += pages("full", *range(9 * turn, 9 * turn + 9)) + pages("state", turn)
        assert all(store(storage, known[-10:]))
        with FolderUpkeep(tmp_path / "store").inspect(model) as inspection:
            assert inspection.lost == []
            names = {each.name for each in inspection.objects()}
            assert names == {page.name for page in known if storage.exists([page.name]) == [True]}
        seen += len(names)
    assert seen > 100
    storage.close()


# --- files that cannot be read


@pytest.mark.parametrize(
    ("name", "error"),
    [("slab-000000.table", errno.EIO), ("slab-000000", errno.EACCES), ("slab-000000", errno.EIO), ("clock", errno.EIO)],
)
def test_a_file_that_cannot_be_read_costs_a_check_that_file_alone(store_of_two, name, error):
    (model,) = (each for each in FolderUpkeep(store_of_two).contents().models if each.label == LABEL)
    disk = Rigged()
    disk.refuse(error, "open" if error == errno.EACCES else "peek", name=name)
    with FolderUpkeep(store_of_two, disk=disk).inspect(model) as inspection:
        lost, found = inspection.lost, {each.name for each in inspection.objects()}
    whole = name == "clock" or (name == "slab-000000" and error != errno.EACCES)
    assert len(lost) == (not whole) and all(f"{MODEL}/slab-000000" in each for each in lost)
    assert {page.name for page in pages("window", 1, 2)} <= found
    assert ({page.name for page in pages("full", *range(12))} <= found) is whole


class Unreadable(WithoutSync):
    """A file of this name, in the model's folder, cannot be read, or not even be opened; or the folder itself."""

    def __init__(self, name: str, error: int) -> None:
        self.name, self.error = name, error

    def peek(self, file: int, size_bytes: int, at: int) -> bytes:
        path = Path(f"/proc/self/fd/{file}").readlink()
        self._maybe(path.name if path.parent.name == MODEL else "", errno.EIO, errno.EBADMSG)
        return super().peek(file, size_bytes, at)

    def open(self, folder: Directory, name: str, **how: bool) -> int:
        self._maybe(name if folder.path.name == MODEL else "", errno.EACCES)
        return super().open(folder, name, **how)

    def enter_below(self, folder: Directory, name: str) -> Directory:
        self._maybe(name, errno.EACCES)
        return super().enter_below(folder, name)

    def _maybe(self, name: str, *errors: int) -> None:
        if name == self.name and self.error in errors:
            raise trouble(self.error)


@pytest.mark.parametrize(
    ("name", "error"), [("model.json", errno.EIO), ("model.json", errno.EBADMSG), (MODEL, errno.EACCES)]
)
def test_a_model_that_cannot_be_read_hinders_no_other_models_opening_and_is_reported(
    store_of_two, name, error, caplog, capsys, monkeypatch
):
    disk = Unreadable(name, error)
    other = FileStorage(store_of_two, MIB, OTHER_LABEL, "model B", disk=disk)
    for at in range(0, 100, 10):
        assert all(put(other, **{f"page-{i}": bytes(4096) for i in range(at, at + 10)}))
    other.close()
    assert caplog.text.count("cannot be read") == 1, "said once"
    monkeypatch.setattr("kvarve.storage.file.maintenance.Disk", lambda: disk)
    for does in ("stat", "ls"):
        assert main(["storage", does, str(store_of_two)]) == 0
        assert ("cannot be read" in capsys.readouterr().out) == (does == "stat")


def test_a_clock_that_cannot_be_read_hinders_no_opening(store_of_two):
    storage = FileStorage(store_of_two, MIB, LABEL, "model A", disk=Unreadable("clock", errno.EIO))
    assert intact(storage, pages("full", *range(12))) == set(pages("full", *range(12)))
    storage.close()
