"""What a killed process has left where all processes make things goes with the next one; all else stays."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
from kvarve.reference.engine.rank_processes import started
from kvarve.system import orphans
from kvarve.system.orphans import MARK, locked, sweep, temporary_folder
from kvarve.system.regions import SHARED, shared_region

WORKS = """
import sys
from kvarve.reference.engine.rank_processes import started
from kvarve.system.regions import shared_region

with started(print, None, 1) as (place, listener):
    region = shared_region(4096)
    print(place.folder, region.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, with a path that sockets may have."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


@contextmanager
def working() -> Iterator[tuple["subprocess.Popen[str]", list[Path]]]:
    """A process, and what it has made: where its ranks meet, and shared memory."""
    with forks.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            folder, name = process.stdout.readline().split()
            yield process, [Path(folder), SHARED / name]
        finally:
            process.kill()


def test_what_a_killed_process_has_left_goes_with_the_next_and_what_is_in_use_stays(short_tmp: Path) -> None:
    with working() as (process, made):
        assert (made[0] / "cache").is_socket() and made[0].parent == short_tmp
        with started(print, None, 1) as (place, _):
            region = shared_region(4096)
            assert all(path.exists() for path in made), "in use"
            process.kill()
            process.wait()
            assert all(path.exists() for path in made), "left behind"
        assert not place.folder.exists()
        with started(print, None, 1) as (place, _):
            other = shared_region(4096)
            assert not any(path.exists() for path in made)
            assert place.folder.exists() and region.name is not None and (SHARED / region.name).exists()
    assert not [*short_tmp.iterdir()]
    del region, other


def test_a_file_that_was_swept_before_it_was_locked_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = os.open(tmp_path / "file", os.O_RDONLY)
    sweep([tmp_path / "file"])
    assert not (tmp_path / "file").exists() and not locked(made)
    os.close(made)


def test_a_folder_that_only_has_such_a_name_stays(short_tmp: Path) -> None:
    for name in ("kvarve-ranks-baseline", "kvarve-ranks-linkedto"):
        (short_tmp / name).mkdir()
    (short_tmp / "kvarve-ranks-baseline" / "data").touch()
    (short_tmp / "kvarve-ranks-linkedto" / MARK).touch()
    (short_tmp / "kvarve-ranks-thelinks").symlink_to("kvarve-ranks-linkedto")
    lock = os.open(short_tmp / "kvarve-ranks-linkedto", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with temporary_folder("kvarve-ranks-"):
        sweep(short_tmp.iterdir())
    assert (short_tmp / "kvarve-ranks-baseline" / "data").exists()
    assert (short_tmp / "kvarve-ranks-thelinks" / MARK).exists(), "it is in use"
    os.close(lock)
    with temporary_folder("kvarve-ranks-"):
        assert not (short_tmp / "kvarve-ranks-linkedto").exists() and (short_tmp / "kvarve-ranks-thelinks").is_symlink()


def test_where_folders_cannot_be_locked_one_is_made_all_the_same(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(orphans.fcntl, "flock", refused)
    with temporary_folder("kvarve-ranks-") as folder, temporary_folder("kvarve-ranks-"):
        assert folder.exists()
    assert not [*short_tmp.iterdir()]


def test_links_and_what_other_users_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link, file, pipe = (tmp_path / name for name in ("target", "link", "file", "pipe"))
    target.touch()
    link.symlink_to(target)
    file.touch()
    os.mkfifo(pipe)
    with monkeypatch.context() as patch:
        patch.setattr(orphans.os, "geteuid", lambda: os.getuid() + 1)
        sweep([target, file, tmp_path / "none"])
    sweep([link, pipe])
    assert target.exists() and link.is_symlink() and file.exists() and pipe.exists()
