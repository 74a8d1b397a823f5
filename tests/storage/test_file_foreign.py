"""Files of users below a storage folder: they are never touched or counted, and block no call."""

import json
import os
from pathlib import Path

import inspect_files
import pytest
from file_disks import WithoutSync, everything, model_of, total

from kvarve.cli.main import main
from kvarve.storage import FileStorage
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there
from tests.sim.faulty_disk import Died, FaultyDisk

CAPACITY, SMALL = 96 << 10, 12 << 10
PRECIOUS = bytes(range(256)) * 40
NAMES = [
    *("slab-000001.bak", "slab-1", "slab-000001.table.old", "process-", "process-01", "notes.txt", "model.json.orig"),
    *("slab-٠٠٠٠٠٧", "slab-²²²²²²", "slab-00000７", "slab-000007\n", "\nslab-000007", "slab-0000007", "Slab-000007"),
    *("slab-000007.table\n", "slab-000007.TABLE", "slab-000007.table.table", "slab-032767", "slab-999999"),
    *("slab--00001", "slab-000007.quarantined", "slab-000007 "),
    *("process-٣", "process-²", "process-1\n", "process-4096", "process--1"),
]
SAID = [
    {"label": "00" * 32, "description": "of another folder"},
    {"model_type": "qwen3"},
    ["0123456789abcdef"],
]


def weights(folder: Path) -> Path:
    """A checkpoint, as people keep them."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(PRECIOUS)
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "slab-000000.table").write_bytes(PRECIOUS)
    return folder


def use_up(storage, first: int) -> None:
    """Store until an object had to be evicted."""
    for at in range(first, first + 20, 10):
        assert put(storage, **{f"page-{i}": bytes(4096) for i in range(at, at + 10)}) == [True] * 10
    assert storage.usage().evicted > 0 or there(storage, f"page-{first}") == ""


def live(opened, folder: Path) -> None:
    """The life of a store: filled by two models, shrunk, maintained."""
    for label in (LABEL, OTHER_LABEL):
        storage = opened(CAPACITY, label)
        use_up(storage, 0)
        storage.close()
    smaller = opened(CAPACITY // 2, OTHER_LABEL)
    assert put(smaller, x=b"1") == [True]
    smaller.close()
    for command in ("gc --unused-for 0.000000001s", "drop --all --yes"):
        does, *words = command.split()
        assert main(["storage", does, str(folder), *words]) == 0
    again = opened(CAPACITY)
    assert put(again, a=b"1") == [True]
    again.close()


def test_files_of_users_below_a_storage_folder_survive_all_that_a_store_does(opened, folder, tmp_path):
    opened(CAPACITY, OTHER_LABEL).close()
    models = folder / "models"
    mine = [weights(models / name) for name in ("0123456789abcdef", "x\ny")]
    for number, said in enumerate(SAID):
        mine.append(weights(models / f"abcdef012345678{number}"))
        (mine[-1] / "model.json").write_text(json.dumps(said))
    weights(tmp_path / "home")
    (models / "Qwen3-4B").symlink_to(tmp_path / "home", target_is_directory=True)
    own = model_of(folder, OTHER_LABEL)
    for name in NAMES:
        (own / name).write_bytes(PRECIOUS)
        mine.append(own / name)
    mine.append(weights(own / "slab-000777" / "x").parent)
    before = everything(*mine, tmp_path / "home")
    live(opened, folder)
    assert everything(*mine, tmp_path / "home") == before


def test_slabs_of_an_idle_model_that_have_a_second_name_hinder_no_other_model(opened, folder, tmp_path):
    """A backup, as `cp -l` makes it."""
    storage = opened(CAPACITY)
    use_up(storage, 0)
    storage.close()
    (tmp_path / "backup").mkdir()
    for path in (folder / "models").glob("*/slab-*"):
        os.link(path, tmp_path / "backup" / path.name)
    before = {path.name: path.read_bytes() for path in (tmp_path / "backup").iterdir()}
    assert before
    other = opened(CAPACITY // 2, OTHER_LABEL, "model B")
    for i in range(30):
        put(other, **{f"page-{i}": bytes(4096)})
    assert {path.name: path.read_bytes() for path in (tmp_path / "backup").iterdir()} == before


def test_the_folder_of_a_model_that_is_dropped_stays_with_what_is_not_ours(opened, folder, caplog):
    storage = opened()
    put(storage, a=b"1")
    notes = model_of(folder) / "notes.txt"
    notes.write_text("precious")
    storage.close()
    assert main(["storage", "drop", str(folder), "--all", "--yes"]) == 0
    assert [*notes.parent.iterdir()] == [notes]
    assert "it holds files that are not of this store" in caplog.text
    assert main(["storage", "stat", str(folder)]) == 0
    assert there(opened(), "a") == "", "and the model can be opened again"


def test_what_is_not_ours_counts_as_nothing_and_takes_no_room(opened, folder, capsys):
    opened(CAPACITY).close()
    before = total(folder)
    (folder / "models" / "Qwen3-8B").mkdir()
    for name in ("models/Qwen3-8B/model.safetensors", "thesis.tex"):
        (folder / name).write_bytes(bytes(2 * CAPACITY))
    storage, names = opened(CAPACITY), [f"page-{i}" for i in range(8)]
    assert all(storage.put(names, [memoryview(bytes(4096))] * 8)) and all(storage.exists(names))
    assert CAPACITY // 3 < inspect_files.file_bytes(storage) <= CAPACITY
    storage.close()
    assert main(["storage", "drop", str(folder), "--all", "--yes"]) == 0

    def stat():
        capsys.readouterr()
        assert main(["storage", "stat", str(folder), "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)

    left = stat()
    assert left["models"] == [] and left["bytes"] < before
    (folder / "notes.txt").write_bytes(bytes(1000))
    assert stat()["bytes"] == left["bytes"]


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.long)])
def test_a_removal_that_is_cut_short_leaves_a_model_that_can_be_used_and_removed(tmp_path, step):
    """The model's name is removed last: any process may remove slabs that belong to no model."""
    count, died = step - 1, True
    while died:
        folder = tmp_path / f"store-{count}"
        folder.mkdir()
        disk = FaultyDisk(folder)
        storage = FileStorage(folder, CAPACITY, LABEL, "model A", threads=1, disk=disk)
        assert all(storage.put(["a", "b"], [memoryview(bytes(4096)), memoryview(bytes(9000))]))
        storage.close()
        disk.dies_at, died = len(disk.events) + count, False
        try:
            FileStorage(folder, SMALL, OTHER_LABEL, "model B", threads=1, disk=disk).close()
        except Died:
            died = True
        mine = model_of(folder)
        assert (mine / "model.json").exists() or not [*mine.glob("*")], "the model can be found as long as it has files"
        again = FileStorage(folder, CAPACITY, LABEL, "model A", threads=1, disk=WithoutSync())
        assert put(again, a=bytes(4096), c=b"3") == [True, True]
        assert get(again, "a") == bytes(4096)
        again.close()
        assert main(["storage", "drop", str(folder), "--all", "--yes"]) == 0
        assert main(["storage", "gc", str(folder)]) == 0
        assert [*(folder / "models").iterdir()] in ([], [model_of(folder, OTHER_LABEL)])
        count += step
    assert count > 8
