"""Links are not followed, and files that another user owns or may write are refused."""

import os
from pathlib import Path

import pytest
from file_disks import MIB, WithoutSync, everything

from kvarve.cli import main
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
from kvarve.storage.file import maintenance
from kvarve.storage.file.disk import Directory
from kvarve.storage.file.folder import check_folder
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

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
    return folder / "models" / LABEL.hex()[:16]


def replaced(path: Path, precious: Path, how: str) -> None:
    """A link to the precious file stands where a file of ours was."""
    path.unlink(missing_ok=True)
    path.symlink_to(precious) if how == "link" else path.hardlink_to(precious)


def use(opened, folder: Path) -> None:
    """All calls of a store, as far as they succeed; the errors of the others."""
    for do in (
        lambda: opened().close(),
        lambda: put(opened(), **{f"more-{i}": bytes(4096) for i in range(300)}),
        lambda: get(opened(), "small-1"),
        lambda: opened(64 << 10, label=OTHER_LABEL),
    ):
        try:
            do()
        except StorageError as error:
            assert "\n" not in str(error)
    for command in ("stat", "ls", "verify", "gc", "drop --all --yes"):
        does, *words = command.split()
        assert main(["storage", does, str(folder), *words]) in (0, 1, 2)


# --- links


@pytest.mark.parametrize("size_bytes", [100, 1 << 20])
@pytest.mark.parametrize("how", ["link", "hard link"])
@pytest.mark.parametrize(
    "name",
    ["slab-000000", "slab-000000.table", "changes", "clock", "process-0", "model.json", "model.json~", "slab-000005"],
)
def test_what_a_link_in_the_place_of_a_file_leads_to_is_never_changed(opened, folder, tmp_path, name, how, size_bytes):
    model = filled(opened, folder)
    precious = tmp_path / "precious"
    precious.write_bytes((PRECIOUS * 64)[:size_bytes])
    replaced(model / name, precious, how)
    before = everything(precious)
    use(opened, folder)
    assert everything(precious) == before


@pytest.mark.parametrize("name", ["kvarve.json", "kvarve.lock", "kvarve.json~"])
@pytest.mark.parametrize("how", ["link", "hard link"])
def test_a_folder_whose_own_files_are_links_is_refused_and_they_are_left_alone(opened, folder, tmp_path, name, how):
    filled(opened, folder)
    precious = tmp_path / "precious"
    precious.write_bytes((folder / name).read_bytes() if (folder / name).exists() else PRECIOUS)
    replaced(folder / name, precious, how)
    before = everything(precious)
    use(opened, folder)
    assert everything(precious) == before
    if not name.endswith("~"):
        with pytest.raises(StorageError, match="is a link" if how == "link" else "2 names"):
            opened()


@pytest.mark.parametrize("at", ["", "models", "models/" + LABEL.hex()[:16]])
def test_a_folder_that_is_a_link_is_refused_and_nothing_is_written_behind_it(opened, folder, tmp_path, at):
    filled(opened, folder)
    (folder / at).rename(tmp_path / "elsewhere")
    (folder / at).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = everything(tmp_path / "elsewhere")
    for call in (opened, lambda: check_folder(folder, MIB, LABEL, "model A")):
        with pytest.raises(StorageError, match=r"is a link, .* name what it leads to"):
            call()
    assert everything(tmp_path / "elsewhere") == before


def test_a_slab_that_is_a_link_costs_itself_alone(opened, folder, tmp_path, caplog):
    model = filled(opened, folder)
    (model / "slab-000000").rename(tmp_path / "moved")
    (model / "slab-000000").symlink_to(tmp_path / "moved")
    storage = opened()
    assert there(storage, "small-1", "large") == "large"
    assert put(storage, **{"small-1": b"anew"}) == [True]
    assert get(storage, "small-1") == b"anew"
    assert "slab-000000 is a link" in caplog.text


def test_a_link_that_replaces_the_folder_while_it_is_open_is_not_followed(opened, folder, tmp_path):
    """As a user with write access to the folder above can do."""
    storage = opened()
    put(storage, a=b"1")
    folder.rename(tmp_path / "moved")
    theirs = tmp_path / "theirs" / "models" / LABEL.hex()[:16]
    theirs.mkdir(parents=True)
    (theirs / "slab-000001").write_bytes(PRECIOUS)
    folder.symlink_to(tmp_path / "theirs", target_is_directory=True)
    before = everything(tmp_path / "theirs")
    for _ in range(3):
        with pytest.raises(StorageError, match="was removed or moved away"):
            put(storage, **{f"page-{i}": bytes(9000) for i in range(5)})
    assert everything(tmp_path / "theirs") == before


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


def test_a_tree_of_another_user_is_refused_and_nothing_in_it_is_changed(opened, folder):
    model = filled(opened, folder)
    before = everything(folder)
    with pytest.raises(StorageError, match=r"belongs to user \d+, not to user \d+, .*: give another folder"):
        opened(disk=AnotherUser())
    with pytest.raises(StorageError, match="belongs to user"):
        check_folder(folder, MIB, LABEL, "model A", AnotherUser())
    assert everything(folder) == before
    assert model.exists()


def test_an_empty_folder_of_another_user_is_not_taken_for_ones_own(folder, tmp_path):
    folder.mkdir()
    with pytest.raises(StorageError, match="belongs to user"):
        FileStorage(folder, MIB, LABEL, "model A", disk=AnotherUser())
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("name", ["slab-000000", "slab-000000.table"])
def test_a_slab_of_another_user_is_left_alone_and_the_rest_goes_on(opened, folder, name):
    model = filled(opened, folder)
    before = everything(model / "slab-000000", model / "slab-000000.table")
    storage = opened(disk=Given(name))
    assert there(storage, "small-1", "large") == "large"
    assert put(storage, **{f"small-{i}": b"anew" for i in range(5)}) == [True] * 5
    storage.close()
    assert everything(model / "slab-000000", model / "slab-000000.table") == before


def test_a_process_number_that_another_user_has_taken_is_skipped(opened, folder):
    """`sudo kvarve storage stat` left such a file behind, and the server could not open its own store any more."""
    filled(opened, folder)
    storage = opened(disk=Given("process-0"))
    assert storage._folder.number == 1
    assert there(storage, "small-1", "large") == "small-1 large"
    assert storage._folder.alone()


@pytest.mark.parametrize("name", ["kvarve.lock", "changes", "clock", "model.json", "kvarve.json"])
def test_a_store_with_a_file_of_another_user_in_it_is_refused(opened, folder, name):
    filled(opened, folder)
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


def test_a_slab_that_others_may_write_to_is_left_alone(opened, folder):
    model = filled(opened, folder)
    (model / "slab-000000").chmod(0o620)
    before = everything(model / "slab-000000")
    storage = opened()
    assert there(storage, "small-1", "large") == "large"
    assert everything(model / "slab-000000") == before


def test_folders_and_files_are_for_their_owner_alone_whatever_the_umask(opened, folder):
    before = os.umask(0)
    try:
        filled(opened, folder)
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}


def test_folders_made_above_a_new_one_are_writable_by_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        FileStorage(tmp_path / "a" / "b" / "store", MIB, LABEL, "model A", disk=WithoutSync()).close()
    finally:
        os.umask(before)
    modes = [(tmp_path / place).stat().st_mode & 0o777 for place in ("a", "a/b", "a/b/store")]
    assert modes == [0o755, 0o755, 0o700]


def test_a_folder_in_a_world_writable_one_is_as_good_as_its_own_mode(opened, folder, tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    storage = FileStorage(tmp_path / "tmp" / "store", MIB, LABEL, "model A", disk=WithoutSync())
    assert put(storage, a=b"1") == [True]
    storage.close()


def test_another_user_may_read_a_store_and_may_not_change_it(opened, folder):
    filled(opened, folder)
    before = everything(folder)
    (model,) = maintenance.models(folder)
    with maintenance.inspect(folder, model, AnotherUser()) as inspection:
        assert len(inspection.objects()) == 6
        assert inspection.verify(lambda name, data: True) == (6, [])
    with pytest.raises(StorageError, match="belongs to user"):
        FileStorage(folder, 1 << 62, LABEL, "model A", for_maintenance=True, disk=AnotherUser())
    assert everything(folder) == before
