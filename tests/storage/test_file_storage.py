"""Files as a storage: what a disk, a crash, another program or another process can do to it."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import FileStorage, Storage
from kvarve.storage.files import check_folder
from kvarve.testing import CapacitySuite, MakeStorage, StorageSuite
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there


class TestFileStorage(StorageSuite, CapacitySuite):
    @pytest.fixture
    def make_storage(self, tmp_path: Path) -> Iterator[MakeStorage]:
        opened = []

        def make(
            *,
            label: bytes = LABEL,
            description: str = "model A",
            capacity_bytes: int = 64 << 20,
            place: str = "here",
        ) -> Storage:
            opened.append(FileStorage(tmp_path / place, capacity_bytes, label, description))
            return opened[-1]

        yield make
        for storage in opened:
            storage.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(folder: Path) -> Iterator[FileStorage]:
    storage = FileStorage(folder, 1 << 20, LABEL, "model A")
    yield storage
    storage.close()


def reopened(storage: FileStorage, folder: Path) -> FileStorage:
    storage.close()
    return FileStorage(folder, 1 << 20, LABEL, "model A")


def the_file_of(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"pages/*/{name}")
    return path


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything below the folder: names, times, contents."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def refusal_of(folder: Path, label: bytes = LABEL) -> str:
    """What opening says, and checking too; both leave everything as it was."""
    before = snapshot(folder.parent)
    with pytest.raises(StorageError) as checked:
        check_folder(folder, 1 << 20, label, "model B")
    with pytest.raises(StorageError) as opened:
        FileStorage(folder, 1 << 20, label, "model B")
    assert snapshot(folder.parent) == before
    assert str(checked.value) == str(opened.value)
    assert "\n" not in str(opened.value)
    return str(opened.value)


def test_a_folder_of_another_model_is_named_and_left_as_it_was(storage, folder):
    put(storage, a=b"1")
    storage.close()
    told = refusal_of(folder, OTHER_LABEL)
    for part in (str(folder), "another model or format", "model A", "model B", "give another one or empty this one"):
        assert part in told


def test_a_folder_with_other_peoples_files_is_refused(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    assert "not a kvarve storage folder" in refusal_of(folder)


@pytest.mark.parametrize("leftover", ["kvarve.lock", "kvarve.json~", "lost+found"])
def test_what_an_interrupted_opening_leaves_is_an_empty_folder(folder, leftover):
    folder.mkdir()
    (folder / leftover).mkdir() if leftover == "lost+found" else (folder / leftover).write_text("half")
    storage = FileStorage(folder, 100, LABEL, "model A")
    assert put(storage, a=b"1") == [True]
    storage.close()


@pytest.mark.parametrize(
    "marker",
    [b"", b"{", b"[]", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b"{}", b'{"format": "kvarve-files/1"}']
    + [b'{"format": "kvarve-files/1", "label": 7, "description": ""}']
    + [b'{"format": "kvarve-files/1", "label": "no hex", "description": ""}'],
    ids=lambda marker: repr(marker[:40]),
)
def test_a_damaged_marker_is_refused(storage, folder, marker):
    storage.close()
    (folder / "kvarve.json").write_bytes(marker)
    assert "kvarve.json is damaged" in refusal_of(folder)


def test_a_folder_of_a_later_format_is_refused(storage, folder):
    storage.close()
    (folder / "kvarve.json").write_text(json.dumps({"format": "kvarve-files/2", "owner": "unheard of"}))
    told = refusal_of(folder)
    assert "kvarve-files/2" in told
    assert "kvarve-files/1" in told


def test_a_regular_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("precious")
    assert "is not a folder" in refusal_of(tmp_path / "file")
    with pytest.raises(StorageError, match="is not a folder"):
        check_folder(tmp_path / "file" / "below" / "it", 100, LABEL, "model A")
    with pytest.raises(StorageError, match="is not a folder"):
        FileStorage(tmp_path / "file" / "below" / "it", 100, LABEL, "model A")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_link_to_nowhere_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="is not a folder"):
        FileStorage(tmp_path / "link", 100, LABEL, "model A")
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_may_not_be_written_is_refused(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert "no permission" in refusal_of(folder)


@pytest.mark.parametrize("place", ["store", "./store", "../store", "", "~/store", "/nul\0l"])
def test_a_path_that_is_not_absolute_is_refused(place):
    with pytest.raises(ConfigError, match="absolute path"):
        FileStorage(place, 100, LABEL, "model A")


def test_checking_a_folder_that_is_not_there_makes_none(folder):
    assert check_folder(folder / "deep", 100, LABEL, "model A") == folder / "deep"
    assert not folder.exists()


def test_the_marker_says_whose_pages_these_are(storage, folder):
    assert json.loads((folder / "kvarve.json").read_text()) == {
        "format": "kvarve-files/1",
        "label": LABEL.hex(),
        "description": "model A",
    }


def test_what_a_crash_left_half_written_is_removed_at_opening(storage, folder):
    put(storage, a=b"whole")
    half = the_file_of(folder, "a").with_name("0123abcd.0~")
    half.write_bytes(b"half")
    again = reopened(storage, folder)
    assert not half.exists()
    assert again.usage().bytes == 5
    again.close()


def test_strange_files_among_the_pages_are_neither_counted_nor_removed(storage, folder):
    put(storage, a=b"1")
    near = the_file_of(folder, "a").parent
    (near / "not a name").write_text("precious")
    (near / os.fsdecode(b"not-utf8-\xff")).write_text("precious")
    (near / "subfolder").mkdir()
    (near / "link").symlink_to(near / "a")
    again = reopened(storage, folder)
    assert (again.usage().objects, again.usage().bytes) == (1, 1)
    again.close()
    assert len(list(near.iterdir())) == 5


def test_a_file_cut_short_answers_its_length(storage, folder):
    put(storage, a=b"0123456789")
    os.truncate(the_file_of(folder, "a"), 4)
    buffer = bytearray(b"..........")
    assert storage.get(["a"], [memoryview(buffer)]) == [4]
    assert buffer == b"0123......"
    assert storage.usage().bytes == 4


def test_a_file_removed_behind_its_back_is_a_miss_and_leaves_the_books(storage, folder):
    put(storage, a=b"0123456789", b=b"1", c=b"2")
    the_file_of(folder, "a").unlink()
    the_file_of(folder, "b").unlink()
    assert get(storage, "a") is None
    assert storage.exists(["a"]) == [False]
    assert storage.delete(["b", "c"]) == [False, True]
    assert (storage.usage().objects, storage.usage().bytes) == (0, 0)
    assert put(storage, a=b"again") == [True]
    assert get(storage, "a") == b"again"


def test_a_page_stored_anew_while_a_reader_misses_it_stays_in_the_books(storage, folder, monkeypatch):
    put(storage, a=b"old")
    the_file_of(folder, "a").unlink()
    real = os.open

    def open_just_before_a_put(path, flags, *mode):
        try:
            return real(path, flags, *mode)
        except FileNotFoundError:
            monkeypatch.undo()
            put(storage, a=b"new one")
            raise

    monkeypatch.setattr(os, "open", open_just_before_a_put)
    assert get(storage, "a") is None
    assert storage.usage().bytes == 7
    assert get(storage, "a") == b"new one"


def test_room_is_found_where_files_were_removed_behind_its_back(folder):
    storage = FileStorage(folder, 20, LABEL, "model A")
    put(storage, a=bytes(10), b=bytes(10))
    the_file_of(folder, "b").unlink()
    assert put(storage, c=bytes(10)) == [True]
    assert there(storage, *"abc") == "a c"
    storage.close()


def test_pages_go_on_being_stored_when_their_folder_was_removed(storage, folder):
    put(storage, a=b"1")
    the_file_of(folder, "a").unlink()
    for shard in (folder / "pages").iterdir():
        shard.rmdir()
    (folder / "pages").rmdir()
    assert put(storage, a=b"2") == [True]
    assert get(storage, "a") == b"2"


def test_a_storage_whose_whole_folder_is_gone_says_so_and_does_not_make_it_anew(storage, folder):
    folder.rename(folder.with_name("moved"))
    with pytest.raises(StorageError, match="stored 0 of 1 objects"):
        put(storage, a=b"1")
    assert get(storage, "a") is None
    assert not folder.exists()


def test_objects_are_for_their_owner_alone(storage, folder):
    put(storage, a=b"1")
    assert the_file_of(folder, "a").stat().st_mode & 0o077 == 0


def test_a_full_disk_is_trouble_that_leaves_no_temporary_file_and_the_old_object(storage, folder, monkeypatch):
    put(storage, b=b"old")
    real = os.pwritev

    def full_after_one_byte(file, buffers, offset):
        if offset > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, [buffers[0][:1]], offset)

    monkeypatch.setattr(os, "pwritev", full_after_one_byte)
    with pytest.raises(StorageError, match=r"stored 1 of 3 objects: .*No space left"):
        put(storage, a=b"1", b=b"22", c=b"3")
    monkeypatch.undo()
    assert not list(folder.rglob("*~"))
    assert [get(storage, name) for name in "abc"] == [b"1", b"old", None]
    assert storage.usage().bytes == 4
    assert put(storage, b=b"22") == [True]


def test_the_old_object_stays_until_the_new_one_takes_its_place(storage, folder, monkeypatch):
    put(storage, a=b"old")
    real = Path.replace
    seen = []

    def look_and_replace(unfinished, target):
        seen.append((target.read_bytes(), unfinished.read_bytes()))
        return real(unfinished, target)

    monkeypatch.setattr(Path, "replace", look_and_replace)
    put(storage, a=b"new")
    assert seen == [(b"old", b"new")]


def test_an_object_without_room_is_not_written_at_all(storage, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("it was written"))
    assert put(storage, a=bytes((1 << 20) + 1)) == [False]


def test_of_two_models_that_open_an_empty_folder_at_once_one_is_refused(folder, monkeypatch):
    real = fcntl.flock

    def lock_just_after_the_other(*arguments):
        monkeypatch.undo()
        FileStorage(folder, 100, OTHER_LABEL, "model B").close()
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", lock_just_after_the_other)
    with pytest.raises(StorageError, match="another model"):
        FileStorage(folder, 100, LABEL, "model A")
    FileStorage(folder, 100, OTHER_LABEL, "model B").close()


def test_a_medium_that_fails_to_read_is_trouble_and_not_a_miss(storage, monkeypatch):
    put(storage, a=b"1", b=b"2")
    real = os.preadv
    reads = []

    def fails_the_second_time(*arguments):
        reads.append(arguments)
        if len(reads) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", fails_the_second_time)
    with pytest.raises(StorageError, match=r"read 1 of 2 objects: .*Input/output error"):
        storage.get(["a", "b"], [memoryview(bytearray(1)) for _ in "ab"])
    assert get(storage, "b") == b"2"


def test_a_disk_that_takes_and_gives_a_few_bytes_at_a_time_stores_whole_objects(storage, monkeypatch):
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: real_write(file, [buffers[0][:3]], at))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real_read(file, [buffers[0][:2]], at))
    put(storage, a=b"0123456789")
    assert get(storage, "a") == b"0123456789"


def test_a_disk_that_takes_nothing_is_trouble_and_not_an_endless_loop(storage, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError, match="takes no more bytes"):
        put(storage, a=b"1")


def test_a_file_that_shrinks_while_it_is_read_answers_what_was_read(storage, monkeypatch):
    put(storage, a=b"0123456789")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:4]], at) if at == 0 else 0)
    assert get(storage, "a") == b"0123"


def test_a_file_system_without_locks_is_refused(folder, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StorageError, match="No locks available"):
        FileStorage(folder, 100, LABEL, "model A")


def test_one_folder_is_opened_once(storage, folder):
    put(storage, a=b"1")
    with pytest.raises(StorageError, match=f"open already, in process {os.getpid()}"):
        FileStorage(folder, 100, LABEL, "model A")
    assert get(storage, "a") == b"1"


def test_closing_frees_the_folder_though_somebody_holds_a_copy_of_the_lock(storage, folder):
    (lock,) = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == folder / "kvarve.lock"]
    copy = os.dup(lock)
    reopened(storage, folder).close()
    os.close(copy)


OPEN_AND_WAIT = """
import sys
from kvarve.storage import FileStorage
storage = FileStorage(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]), "model A")
storage.put(["from-child"], [memoryview(b"1")])
print("open", flush=True)
sys.stdin.read()
"""

# The parent of this pair ends at once; its child lives on, with every descriptor that a fork copies.
OPEN_FORK_AND_LEAVE_A_CHILD = """
import os, sys
from kvarve.errors import StorageError
from kvarve.storage import FileStorage
storage = FileStorage(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]), "model A")
storage._lock.acquire()  # as a thread in the middle of a call would
if os.fork():
    os._exit(0)
try:
    storage.usage()
except StorageError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def python(script: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, str(folder), LABEL.hex()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_folder_belongs_to_one_process_until_that_dies_however_it_dies(folder):
    with python(OPEN_AND_WAIT, folder) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StorageError, match=f"open already, in process {other.pid}"):
            FileStorage(folder, 1 << 20, LABEL, "model A")
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        storage = FileStorage(folder, 1 << 20, LABEL, "model A")
        assert get(storage, "from-child") == b"1"
        storage.close()


def test_a_forked_child_cannot_use_the_folder_and_does_not_keep_it_from_others(folder):
    with python(OPEN_FORK_AND_LEAVE_A_CHILD, folder) as other:
        assert "before a fork" in other.stdout.readline()
        other.wait()
        FileStorage(folder, 1 << 20, LABEL, "model A").close()
        other.stdin.close()  # the orphan ends here, not before
