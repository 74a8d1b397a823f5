"""The file that says a store's format has some thirty bytes, and damage to it costs no page: the slabs say it too."""

import json
import os
from pathlib import Path

import pytest
from file_disks import MIB, Open, Rigged, WithoutSync, everything, throw, trouble

from kvarve.cli.main import main
from kvarve.errors import StorageError
from kvarve.storage import FileStorage, check_storage, open_storage
from kvarve.storage.base import Damaged
from kvarve.storage.file.folder import Wanted, check_folder
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.testing.suite import LABEL, get, put

MARKER = "kvarve.json"


@pytest.fixture
def filled(opened: Open, folder: Path) -> Path:
    """A closed store of one object."""
    storage = opened()
    assert put(storage, a=b"1") == [True]
    storage.close()
    return folder


def damaged(marker: Path, how: str) -> None:
    if how == "missing":
        marker.unlink()
    else:
        marker.write_bytes({"empty": b"", "noise": os.urandom(30), "long": b"[" * 99_999}[how])


def test_any_flipped_bit_in_the_file_that_says_the_format_costs_nothing(filled: Path) -> None:
    marker = filled / MARKER
    whole = marker.read_bytes()
    digit = 8 * whole.index(b"4")
    for bit in (*range(0, 8 * len(whole), 7), *range(digit, digit + 8)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        marker.write_bytes(data)
        check_folder(Wanted(filled, MIB, LABEL, "model A"), WithoutSync())


@pytest.mark.parametrize("how", ["a bit", "missing", "empty", "noise", "long"])
def test_a_damaged_format_is_written_anew_and_said(filled: Path, opened: Open, how: str, caplog, capsys) -> None:
    marker = filled / MARKER
    whole = marker.read_bytes()
    if how == "a bit":
        marker.write_bytes(whole.replace(b"/4", b"/5"))
    else:
        damaged(marker, how)
    assert main(["storage", "verify", str(filled)]) == 1
    assert f"{MARKER} is damaged or missing, but its data are in this format" in capsys.readouterr().out
    storage = opened()
    assert get(storage, "a") == b"1"
    assert marker.read_bytes() == whole
    assert caplog.text.count("it is written anew") == 1
    opened().close()
    assert caplog.text.count("it is written anew") == 1
    assert main(["storage", "verify", str(filled)]) == 0


def test_a_format_that_cannot_be_read_is_written_anew(filled: Path, opened: Open) -> None:
    disk = Rigged()
    disk.fail(trouble(), "open", MARKER)
    assert get(opened(disk=disk), "a") == b"1"


def test_the_table_of_any_model_says_the_format_and_either_of_its_headers_does(filled: Path, opened: Open) -> None:
    (table,) = filled.rglob("*.table")
    data = bytearray(table.read_bytes())
    data[10] ^= 1
    table.write_bytes(data)
    (filled / MARKER).write_bytes(b"")
    other = FileStorage(filled, MIB, b"another", "model B", disk=WithoutSync())
    other.close()
    assert get(opened(), "a") == b"1"


@pytest.mark.parametrize("how", ["missing", "empty", "noise"])
def test_where_neither_the_format_nor_a_slab_can_be_read_nothing_is_touched(filled: Path, how: str) -> None:
    for table in filled.rglob("*.table"):
        table.write_bytes(bytes(table.stat().st_size))
    damaged(filled / MARKER, how)
    before = everything(filled)
    with pytest.raises(StorageError, match="is not empty and not a kvarve" if how == "missing" else "is damaged"):
        FileStorage(filled, MIB, LABEL, "model A", disk=WithoutSync())
    for does in ("stat", "verify", "gc", "drop --all --yes"):
        command, *words = does.split()
        assert main(["storage", command, str(filled), *words]) == 2
    assert everything(filled) == before


def test_a_server_starts_without_a_damaged_storage_and_uses_it_once_it_is_mended(filled: Path, caplog) -> None:
    """What one does by hand, a probe of the breaker does each two seconds."""
    (filled / MARKER).write_bytes(b"{")
    hidden = filled.parent / "models"
    (filled / "models").rename(hidden)
    before = everything(filled)
    url = f"file://{filled}?capacity=1MiB"
    with pytest.raises(Damaged, match=r"kvarve\.json is damaged"):
        open_storage(url, label=LABEL, description="model A")
    check_storage(url, label=LABEL, description="model A")
    storage = open_storage(url, label=LABEL, description="model A", answers=False)
    assert f"{url}: served without this storage" in caplog.text
    for call in (lambda: storage.exists(["a"]), storage.usage, lambda: put(storage, b=b"2")):
        with pytest.raises(StorageError, match=r"kvarve\.json is damaged"):
            call()
    assert everything(filled) == before
    hidden.rename(filled / "models")
    assert get(storage, "a") == b"1"
    storage.close()
    with pytest.raises(StorageError, match="closed"):
        storage.exists(["a"])


def test_one_damaged_tier_of_two_costs_that_one_alone(filled: Path, tmp_path: Path) -> None:
    (filled / MARKER).write_bytes(b"{")
    (filled / "models").rename(tmp_path / "models")
    urls = [f"file://{filled}?capacity=1MiB", f"file://{tmp_path}/far?capacity=1MiB"]
    storage = open_storage(urls, label=LABEL, description="model A", answers=False)
    assert put(storage, b=b"2") == [True]
    assert get(storage, "b") == b"2"
    storage.close()


def test_a_disk_that_answers_nothing_when_the_store_is_opened_is_damage(filled: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda *_: throw(trouble()))
        storage = open_storage(f"file://{filled}?capacity=1MiB", label=LABEL, description="model A", answers=False)
        with pytest.raises(Damaged, match="Input/output error"):
            storage.exists(["a"])
    assert get(storage, "a") == b"1"
    storage.close()


@pytest.mark.parametrize("version", ["kvarve-slabs/44", "kvarve-slabs/1", "kvarve-files/4"])
def test_a_store_of_another_version_is_refused_and_not_taken_for_a_damaged_one(filled: Path, version, capsys) -> None:
    (filled / MARKER).write_text(json.dumps({"format": version, "owner": "unheard of"}, indent=1) + "\n")
    before = everything(filled)
    url = f"file://{filled}?capacity=1MiB"
    for call in (
        lambda: open_storage(url, label=LABEL, description="model A", answers=False),
        lambda: check_folder(Wanted(filled, MIB, LABEL, "model A"), WithoutSync()),
        lambda: FolderUpkeep(filled).contents().models,
    ):
        with pytest.raises(StorageError, match=f"another version .*{version}.*empty this folder or give another") as it:
            call()
        assert not isinstance(it.value, Damaged) and "\n" not in str(it.value)
    for does in ("stat", "ls", "verify"):
        assert main(["storage", does, str(filled)]) == 2
        assert f"another version of kvarve ({version!r})" in " ".join(capsys.readouterr().err.split())
    assert everything(filled) == before
