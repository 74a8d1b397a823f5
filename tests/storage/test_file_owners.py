"""Links are not followed, and files that another user owns or may write are refused."""

import os
from contextlib import closing
from pathlib import Path

import inspect_files
import pytest
from file_disks import MIB, WithoutSync, everything, model_of, table_path

from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.folder import Wanted, check_folder
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.testing.suite import LABEL, get, put, there

PRECIOUS = bytes(range(256)) * 64


class AnotherUser(WithoutSync):
    """The store is opened by another user than the owner of its files, as when root's server finds a user's folder."""

    def uid(self) -> int:
        return os.geteuid() + 1


class Given(WithoutSync):
    """One file, given by its name, belongs to another user."""

    def __init__(self, name: str) -> None:
        self.name, self.inode = name, 0

    def _told(self, found: os.stat_result) -> os.stat_result:
        if found.st_ino != self.inode:
            return found
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))

    def stat(self, file: int) -> os.stat_result:
        return self._told(super().stat(file))

    def look(self, folder: Directory, name: str) -> os.stat_result:
        return self._told(super().look(folder, name))

    def entries(self, folder: Directory) -> dict[str, os.stat_result]:
        found = super().entries(folder)
        if self.name in found:
            self.inode = found[self.name].st_ino
        return {name: self._told(it) for name, it in found.items()}


def filled(opened, folder: Path) -> Path:
    """A closed store with two slabs; the folder of its model."""
    storage = opened()
    assert put(storage, **{f"small-{i}": bytes(4096) for i in range(5)}) == [True] * 5
    assert put(storage, large=bytes(9000)) == [True]
    storage.close()
    return model_of(folder)


# --- links


@pytest.mark.parametrize("at", ["", "models", "models/" + LABEL.hex()[:16]])
def test_a_folder_that_is_a_link_is_refused_and_nothing_is_written_behind_it(opened, folder, tmp_path, at):
    filled(opened, folder)
    (folder / at).rename(tmp_path / "elsewhere")
    (folder / at).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = everything(tmp_path / "elsewhere")
    for call in (opened, lambda: check_folder(Wanted(folder, MIB, LABEL, "model A"))):
        with pytest.raises(StorageError, match=r"is a link, .* name what it leads to"):
            call()
    assert everything(tmp_path / "elsewhere") == before


def test_a_link_that_takes_the_place_of_the_folder_in_the_middle_of_a_put_gets_nothing(folder, tmp_path):
    theirs = tmp_path / "theirs" / "models" / LABEL.hex()[:16]
    theirs.mkdir(parents=True)
    before = everything(tmp_path / "theirs")

    class Exchanged(WithoutSync):
        armed = False

        def allocate(self, file: int, size_bytes: int) -> None:
            super().allocate(file, size_bytes)
            if self.armed:  # the slots of a new slab are there, its table is not
                self.armed = False
                folder.rename(tmp_path / "moved")
                folder.symlink_to(tmp_path / "theirs", target_is_directory=True)

    disk = Exchanged()
    storage = FileStorage(folder, MIB, LABEL, "model A", disk=disk)
    put(storage, a=b"1")
    disk.armed = True
    with pytest.raises(StorageError, match="moved away"):
        put(storage, large=bytes(9000))
    storage.close()
    assert everything(tmp_path / "theirs") == before


# --- owners


def test_a_tree_of_another_user_may_be_read_and_is_not_changed(opened, folder, tmp_path):
    filled(opened, folder)
    (tmp_path / "empty").mkdir()
    before, (model,) = everything(folder), FolderUpkeep(folder).contents().models
    for call in (
        lambda: opened(disk=AnotherUser()),
        lambda: opened(1 << 62, for_maintenance=True, disk=AnotherUser()),
        lambda: check_folder(Wanted(folder, MIB, LABEL, "model A"), AnotherUser()),
        lambda: FileStorage(tmp_path / "empty", MIB, LABEL, "model A", disk=AnotherUser()),
    ):
        with pytest.raises(StorageError, match=r"belongs to user \d+, not to user \d+, .*: give another folder"):
            call()
    with FolderUpkeep(folder, disk=AnotherUser()).inspect(model) as inspection:
        assert len(inspection.objects()) == 6
        assert inspection.verify(lambda name, data: True) == (6, [])
    assert everything(folder) == before and [*(tmp_path / "empty").iterdir()] == []


@pytest.mark.parametrize("how", ["its slots are another's", "its table is another's", "others may write", "a link"])
def test_a_slab_that_may_be_anothers_is_left_alone_and_the_rest_goes_on(opened, folder, tmp_path, how):
    slots, disk = filled(opened, folder) / "slab-000000", WithoutSync()
    if how == "others may write":
        slots.chmod(0o620)
    elif how == "a link":
        slots.rename(tmp_path / "moved")
        slots.symlink_to(tmp_path / "moved")
    else:
        disk = Given(slots.name + ".table" * ("table" in how))
    before = everything(slots, table_path(slots), *tmp_path.glob("moved"))
    storage = opened(disk=disk)
    assert there(storage, "small-1", "large") == "large"
    assert put(storage, **{f"small-{i}": b"anew" for i in range(5)}) == [True] * 5
    assert get(storage, "small-1") == b"anew"
    storage.close()
    assert everything(slots, table_path(slots), *tmp_path.glob("moved")) == before


def test_a_process_number_that_another_user_has_taken_is_skipped(opened, folder):
    """`sudo kvarve storage stat` left such a file behind, and the server could not open its own store any more."""
    filled(opened, folder)
    storage = opened(disk=Given("process-0"))
    assert inspect_files.process(storage) == 1
    assert there(storage, "small-1", "large") == "small-1 large"
    assert inspect_files.is_alone(storage)


def test_a_store_with_a_file_of_another_user_in_it_is_refused(opened, folder):
    filled(opened, folder)
    for name in ("kvarve.lock", "changes", "clock", "model.json", "kvarve.json"):
        with pytest.raises(StorageError, match=f"{name} belongs to user"):
            opened(disk=Given(name))


# --- modes


@pytest.mark.parametrize("at", ["", "models", "models/" + LABEL.hex()[:16]])
def test_a_folder_that_others_may_write_to_is_refused_with_what_to_do(opened, folder, at):
    filled(opened, folder)
    for mode, fits in ((0o770, False), (0o702, False), (0o755, True), (0o700, True)):
        (folder / at).chmod(mode)
        if fits:
            assert there(opened(), "large") == "large"
            continue
        with pytest.raises(StorageError, match=rf"may be written to by others \(mode {mode:o}\): chmod go-w"):
            opened()


def test_folders_and_files_are_for_their_owner_alone_whatever_the_umask(tmp_path):
    before, folder = os.umask(0), tmp_path / "a" / "store"
    try:
        with closing(FileStorage(folder, MIB, LABEL, "model A", disk=WithoutSync())) as storage:
            assert put(storage, a=b"1") == [True]
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert folder.parent.stat().st_mode & 0o777 == 0o755, "what it made above it"
