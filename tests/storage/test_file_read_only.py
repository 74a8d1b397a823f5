"""Reading a store changes nothing in it, whatever its state; damaged files are left alone."""

import errno
import fcntl
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from file_disks import MIB, WithoutSync, everything, table_path, total
from test_crashes import CAPACITY, NAMESPACE, Page, Quick, intact, pages, store

from kvarve.cli import main
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file import maintenance
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.folder import check_folder
from kvarve.storage.file.table import ENTRY_BYTES, Shape, pack_header, slot_bytes_for, unpack_header
from kvarve.testing.suite import OTHER_LABEL, get, put, there

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
    if kind == "a header":
        flip(at, 10)
    elif kind == "both headers":
        flip(at, 10, at.stat().st_size - ENTRY_BYTES + 10)
    elif kind == "an entry":
        flip(at, ENTRY_BYTES + 40)
    elif kind == "an object":
        flip(at.with_suffix(""), 1000)
    elif kind == "a cut table":
        os.truncate(at, 300)
    elif kind == "a cut slab":
        os.truncate(at.with_suffix(""), 5000)
    elif kind == "no slots":
        at.with_suffix("").unlink()
    elif kind == "no table":
        at.unlink()
    elif kind == "a model's name":
        (model / "model.json").write_text("{")
    elif kind == "no name":
        (model / "model.json").unlink()
    elif kind == "no clock":
        (model / "clock").unlink()
    elif kind == "no changes":
        (model / "changes").unlink()
    elif kind == "no lock":
        (folder / "kvarve.lock").unlink()


DAMAGES = ["nothing", "a header", "both headers", "an entry", "an object", "a cut table", "a cut slab", "no slots"]
DAMAGES += ["no table", "a model's name", "no name", "no clock", "no changes", "no lock"]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A file system that is mounted read-only, or another user's: nothing is opened for writing, made or removed, and
    no lock is held against other processes. The files that a call tried to open for writing."""
    really, locked, tried = os.open, fcntl.flock, list[str]()

    def guarded(path, flags, *args, **how):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            tried.append(str(path))
            raise OSError(30, "Read-only file system", str(path))
        return really(path, flags, *args, **how)

    def flock(file, how):
        assert how & (fcntl.LOCK_SH | fcntl.LOCK_UN), "an exclusive lock"
        return locked(file, how)

    def refused(*args, **how):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", guarded)
    monkeypatch.setattr(fcntl, "flock", flock)
    for name in ("pwrite", "pwritev", "ftruncate", "truncate", "posix_fallocate", "mkdir", "rmdir", "rename", "unlink"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr(os, "access", lambda path, mode, **how: not mode & os.W_OK)
    return tried


@pytest.mark.parametrize("kind", DAMAGES)
def test_looking_at_a_store_changes_no_byte_of_it_in_whatever_state_it_is(store_of_two, read_only, kind, request):
    request.getfixturevalue("monkeypatch").undo()
    damage(store_of_two, kind)
    request.getfixturevalue("read_only")
    before = everything(store_of_two)
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two)]) in (0, 1), kind
    assert everything(store_of_two) == before


@pytest.mark.parametrize("kind", ["nothing", "an entry", "an object", "a header", "no changes"])
def test_looking_changes_no_byte_of_a_store_that_is_in_use(store_of_two, kind):
    storage = opened(store_of_two, capacity=MIB)
    damage(store_of_two, kind)
    before = everything(store_of_two)
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two)]) in (0, 1), kind
    assert everything(store_of_two) == before
    storage.close()


@pytest.mark.parametrize("version", ["kvarve-files/1", "kvarve-slabs/1", "kvarve-slabs/3", "kvarve-slabs/5"])
def test_looking_at_a_store_of_another_version_is_refused_and_changes_no_byte_of_it(store_of_two, version, capsys):
    (store_of_two / "kvarve.json").write_text(json.dumps({"format": version}))
    before = everything(store_of_two)
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two)]) == 2
        assert f"another version of kvarve ({version!r})" in " ".join(capsys.readouterr().err.split())
    assert everything(store_of_two) == before


def test_looking_works_where_nothing_can_be_written(store_of_two, read_only, capsys):
    before = everything(store_of_two)
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two), "--json", "-"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert everything(store_of_two) == before
    assert read_only == []


def test_reading_an_open_store_takes_no_process_number_and_blocks_no_call(tmp_path):
    folder = tmp_path / "store"
    storage = opened(folder, capacity=MIB)
    assert all(store(storage, pages("full", *range(12))))
    before = everything(folder)
    for does in LOOKS:
        assert main(["storage", does, str(folder)]) == 0
    assert everything(folder) == before
    assert [path.name for path in folder.rglob("process-*")] == ["process-0"]
    storage.close()
    storage = opened(folder, capacity=MIB)
    assert storage._folder.number == 0 and storage._folder.alone()
    assert intact(storage, pages("full", *range(12))) == set(pages("full", *range(12)))
    storage.close()


def test_looking_holds_no_file_open_afterwards(store_of_two):
    before = len([*Path("/proc/self/fd").iterdir()])
    for does in LOOKS:
        main(["storage", does, str(store_of_two)])
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_slab_that_is_removed_during_a_check_is_no_damage(store_of_two):
    (model,) = (each for each in maintenance.models(store_of_two) if each.label == LABEL)
    with maintenance.inspect(store_of_two, model) as inspection:
        storage = opened(store_of_two, capacity=MIB)
        with storage._changing():
            for slab in [*storage._index.slabs.values()]:
                storage._allocator.remove(slab, "a test")
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
    (model,) = (each for each in maintenance.models(store_of_two) if each.label == LABEL)
    with maintenance.inspect(store_of_two, model) as inspection:
        assert inspection.lost == []
        assert len(inspection.objects()) == 14


# --- headers


def test_a_flipped_bit_in_either_header_costs_nothing(store_of_two):
    everybody = pages("full", *range(12)) + pages("window", 1, 2)
    path = table(store_of_two)
    whole = path.read_bytes()
    rng = random.Random(7)
    for first in (0, len(whole) - ENTRY_BYTES):
        for at in range(first, first + 56, 3):
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
        assert unpack_header(pack_header(shape, 7, 9), 7) == (shape, 9)
    assert Shape.within(most + 4096, 1 << 50).slots == 0
    for beyond in (Shape(4096, (most >> 12) + 1), Shape(most + 4096, 1), Shape(4096, 0), Shape(5000, 1), Shape(0, 9)):
        assert unpack_header(pack_header(beyond, 7, 9), 7) is None
    assert slot_bytes_for(1) == 4096


# --- a model without a readable description


MARKERS = [b"", b"{", b'{"label": "no hex", "description": ""}', b'{"label": "00"}', b"[" * 100_000, b"\xff" * 70_000]
MARKERS += [json.dumps({"label": OTHER_LABEL.hex(), "description": "of another folder"}).encode()]


@pytest.mark.parametrize("marker", MARKERS, ids=lambda marker: repr(marker[:30]))
def test_a_damaged_model_hinders_no_other_models_opening_and_is_reported(store_of_two, caplog, capsys, marker):
    (store_of_two / "models" / MODEL / "model.json").write_bytes(marker)
    before = everything(store_of_two / "models" / MODEL)
    check_folder(store_of_two, MIB, OTHER_LABEL, "model B")
    other = FileStorage(store_of_two, MIB, OTHER_LABEL, "model B", disk=WithoutSync())
    assert get(other, "b") == b"of model B"
    for i in range(100):  # as many as there is room for
        assert put(other, **{f"page-{i}": bytes(4096)}) == [True]
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
    check_folder(store_of_two, MIB, LABEL, "model A")
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


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_a_models_name_that_is_no_file_is_refused_in_one_line(store_of_two, tmp_path, what):
    path = store_of_two / "models" / MODEL / "model.json"
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"model\.json is (no regular file|a link)") as refusal:
        opened(store_of_two, capacity=MIB)
    assert "\n" not in str(refusal.value)
    other = FileStorage(store_of_two, MIB, OTHER_LABEL, "model B", disk=WithoutSync())
    assert there(other, "b") == "b"
    other.close()


def test_what_a_model_calls_itself_cannot_play_with_the_terminal(store_of_two, capsys):
    path = store_of_two / "models" / MODEL / "model.json"
    path.write_text(json.dumps({"label": LABEL.hex(), "description": "\x1b[2J\nmodel\ud800 A"}))
    assert main(["storage", "stat", str(store_of_two)]) == 0
    assert "\x1b" not in capsys.readouterr().out


# --- commands that change something


def test_gc_and_drop_refuse_a_folder_of_another_user_and_change_nothing(store_of_two, monkeypatch, capsys):
    before = everything(store_of_two)
    monkeypatch.setattr("kvarve.storage.file.disk.Disk.uid", lambda disk: os.geteuid() + 1)
    for words in (["gc"], ["drop", "--all", "--yes"], ["gc", "--unused-for", "1s"]):
        assert main(["storage", words[0], str(store_of_two), *words[1:]]) == 2
        assert "belongs to user" in capsys.readouterr().err
    assert everything(store_of_two) == before
    for does in LOOKS:
        assert main(["storage", does, str(store_of_two)]) == 0
    assert everything(store_of_two) == before


def test_a_store_can_be_read_while_another_process_stores_and_evicts(tmp_path):
    folder = tmp_path / "store"
    storage = opened(folder)
    (model,) = maintenance.models(folder)
    seen = 0
    for turn in range(20):
        assert all(store(storage, pages("full", *range(9 * turn, 9 * turn + 9)) + pages("state", turn)))
        with maintenance.inspect(folder, model) as inspection:
            assert inspection.lost == []
            seen += len(inspection.objects())
            names = {each.name for each in inspection.objects()}
            assert names == {page.name for page in known(turn) if storage.exists([page.name]) == [True]}
    assert seen > 100
    storage.close()


def known(turn: int) -> list[Page]:
    return pages("full", *range(9 * turn + 9)) + pages("state", *range(turn + 1))


def test_a_store_that_was_made_by_an_earlier_version_is_refused_in_one_line_that_says_what_to_do(store_of_two):
    (store_of_two / "kvarve.json").write_text('{"format": "kvarve-slabs/2"}')
    before = everything(store_of_two)
    for call in (lambda: opened(store_of_two), lambda: maintenance.models(store_of_two)):
        with pytest.raises(StorageError, match=r"another version .*empty this folder or give another one") as refusal:
            call()
        assert "\n" not in str(refusal.value)
    assert everything(store_of_two) == before
    assert table_path(store_of_two / "models" / MODEL / "slab-000000").exists()


# --- files that cannot be read


class Unreadable(WithoutSync):
    """A file of this name, in the model's folder, cannot be read, or not even be opened."""

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
            raise OSError(self.error, os.strerror(self.error), name)


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADMSG, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["slab-000000.table", "slab-000000", "clock"])
def test_a_file_that_cannot_be_read_costs_a_check_that_file_alone(store_of_two, name, error):
    (model,) = (each for each in maintenance.models(store_of_two) if each.label == LABEL)
    with maintenance.inspect(store_of_two, model, Unreadable(name, error)) as inspection:
        lost, found = inspection.lost, {each.name for each in inspection.objects()}
    whole = name == "clock" or (name == "slab-000000" and error != errno.EACCES)
    assert len(lost) == (not whole) and all(f"{MODEL}/slab-000000" in each for each in lost)
    assert {page.name for page in pages("window", 1, 2)} <= found
    assert ({page.name for page in pages("full", *range(12))} <= found) is whole


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADMSG, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["model.json", MODEL])
def test_a_model_that_cannot_be_read_hinders_no_other_models_opening_and_is_reported(
    store_of_two, name, error, caplog, capsys, monkeypatch
):
    disk = Unreadable(name, error)
    other = FileStorage(store_of_two, MIB, OTHER_LABEL, "model B", disk=disk)
    for i in range(100):
        assert put(other, **{f"page-{i}": bytes(4096)}) == [True]
    other.close()
    damaged = name == "model.json" or error == errno.EACCES
    assert caplog.text.count("cannot be read") == damaged, "said once"
    monkeypatch.setattr("kvarve.storage.file.maintenance.Disk", lambda: disk)
    for does in ("stat", "ls"):
        assert main(["storage", does, str(store_of_two)]) == 0
        assert ("cannot be read" in capsys.readouterr().out) == (damaged and does == "stat")


def test_a_clock_that_cannot_be_read_hinders_no_opening(store_of_two):
    storage = FileStorage(store_of_two, MIB, LABEL, "model A", disk=Unreadable("clock", errno.EIO))
    assert intact(storage, pages("full", *range(12))) == set(pages("full", *range(12)))
    storage.close()
