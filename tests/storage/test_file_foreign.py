"""Files of users below a storage folder: they are never touched or counted, and block no call."""

import json
import logging
import os
from pathlib import Path

import pytest
from file_disks import MIB, everything, total

from kvarve.cli import main
from kvarve.storage import FileStorage
from kvarve.testing.faulty_disk import Died, FaultyDisk
from kvarve.testing.suite import LABEL, OTHER_LABEL, get, put, there

CAPACITY, SMALL = 240 << 10, 12 << 10
PRECIOUS = bytes(range(256)) * 40


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
    for i in range(first, first + 80):
        assert put(storage, **{f"page-{i}": bytes(4096)}) == [True]
    assert storage.usage().evicted > 0 or there(storage, f"page-{first}") == ""


def live(opened, folder: Path) -> None:
    """The life of a store: opened, filled, filled by another model, shrunk, maintained."""
    storage = opened(CAPACITY)
    use_up(storage, 0)
    storage.close()
    other = opened(CAPACITY, OTHER_LABEL, "model B")
    use_up(other, 1000)
    other.close()
    smaller = opened(CAPACITY // 2, OTHER_LABEL, "model B")
    assert put(smaller, x=b"1") == [True]
    smaller.close()
    for command in ("stat", "ls", "verify", "gc", "gc --unused-for 0.000000001s", "drop --all --yes"):
        does, *words = command.split()
        assert main(["storage", does, str(folder), *words]) in (0, does == "verify")
    again = opened(CAPACITY)
    assert put(again, a=b"1") == [True]
    again.close()


@pytest.mark.parametrize("name", ["Qwen3-8B", "0123456789abcdef", "0123", "lost+found", "x\ny"])
def test_a_checkpoint_below_the_storage_folder_survives_all_that_a_store_does(opened, folder, name):
    opened(CAPACITY).close()
    mine = weights(folder / "models" / name)
    before = everything(mine)
    live(opened, folder)
    assert everything(mine) == before


@pytest.mark.parametrize("name", ["Qwen3-8B", "0123456789abcdef"])
def test_what_a_link_leads_to_survives_all_that_a_store_does(opened, folder, tmp_path, name):
    opened(CAPACITY).close()
    mine = weights(tmp_path / "home" / name)
    (folder / "models" / name).symlink_to(mine, target_is_directory=True)
    before = everything(tmp_path / "home")
    live(opened, folder)
    assert everything(tmp_path / "home") == before
    assert (folder / "models" / name).is_symlink()


def test_a_store_below_a_link_is_another_ones(opened, folder, tmp_path):
    """A link of a model's name, which leads to a whole model of another store."""
    elsewhere = opened(MIB)
    put(elsewhere, a=b"1")
    elsewhere.close()
    folder.rename(tmp_path / "theirs")
    opened(CAPACITY, OTHER_LABEL, "model B").close()
    (name,) = (path.name for path in (tmp_path / "theirs" / "models").iterdir())
    (folder / "models" / name).symlink_to(tmp_path / "theirs" / "models" / name, target_is_directory=True)
    before = everything(tmp_path / "theirs")
    use_up(opened(CAPACITY, OTHER_LABEL, "model B"), 0)
    assert everything(tmp_path / "theirs") == before


@pytest.mark.parametrize(
    "said",
    [
        {"label": "00" * 32, "description": "of another folder"},
        {"label": "0123456789abcdef"},
        {"model_type": "qwen3"},
        ["0123456789abcdef"],
    ],
    ids=str,
)
def test_a_folder_is_a_model_only_if_its_name_begins_the_label_that_is_said_in_it(opened, folder, said):
    opened(CAPACITY).close()
    mine = weights(folder / "models" / "0123456789abcdef")
    (mine / "model.json").write_text(json.dumps(said))
    before = everything(mine)
    live(opened, folder)
    assert everything(mine) == before


def test_files_of_users_in_a_models_own_folder_survive_it(opened, folder):
    storage = opened(CAPACITY)
    use_up(storage, 0)
    names = [
        "slab-000001.bak",
        "slab-1",
        "slab-000001.table.old",
        "process-",
        "process-01",
        "notes.txt",
        "model.json.orig",
    ]
    for name in names:
        (storage._folder.model.path / name).write_bytes(PRECIOUS)
    (storage._folder.model.path / "slab-000777").mkdir()
    weights(storage._folder.model.path / "slab-000777" / "x")
    mine = [storage._folder.model.path / name for name in (*names, "slab-000777")]
    before = everything(*mine)
    use_up(storage, 100)
    storage.close()
    live(opened, folder)
    assert everything(*mine) == before


@pytest.mark.parametrize("kind", ["slab-*.table", "slab-??????", "slab-*"])
def test_slabs_of_an_idle_model_that_have_a_second_name_hinder_no_other_model(opened, folder, tmp_path, kind):
    """A backup, as `cp -l` makes it."""
    storage = opened(CAPACITY)
    use_up(storage, 0)
    storage.close()
    mine = tmp_path / "backup"
    mine.mkdir()
    for path in (folder / "models").glob(f"*/{kind}"):
        os.link(path, mine / path.name)
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    assert before
    other = opened(CAPACITY // 2, OTHER_LABEL, "model B")
    for i in range(80):
        put(other, **{f"page-{i}": bytes(4096)})
    other.close()
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_the_folder_of_a_model_that_is_dropped_stays_with_what_is_not_ours(opened, folder, caplog):
    storage = opened()
    put(storage, a=b"1")
    notes = storage._folder.model.path / "notes.txt"
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
    (folder / "models" / "Qwen3-8B" / "model.safetensors").write_bytes(bytes(2 * CAPACITY))
    (folder / "thesis.tex").write_bytes(bytes(2 * CAPACITY))
    storage = opened(CAPACITY)
    names = [f"page-{i}" for i in range(30)]
    assert all(storage.put(names, [memoryview(bytes(4096))] * 30))
    assert all(storage.exists(names))
    assert CAPACITY // 2 < storage._folder.bytes() <= CAPACITY
    storage.close()
    assert main(["storage", "drop", str(folder), "--all", "--yes"]) == 0
    capsys.readouterr()
    assert main(["storage", "stat", str(folder), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["models"] == [] and told["bytes"] < before


def test_each_removal_says_what_goes_and_why(opened, folder, caplog):
    caplog.set_level(logging.INFO, "kvarve")
    storage = opened(CAPACITY)
    model = storage._folder.model.path
    for size in (4096, 20_000):
        for i in range(40):
            put(storage, **{f"{size}-{i}": bytes(size)})
    swaps = [record.message for record in caplog.records if "what is stored now is used more" in record.message]
    assert swaps and all(message.startswith(f"{model}/slab-") for message in swaps)
    storage.close()
    caplog.clear()
    other = opened(CAPACITY, OTHER_LABEL, "model B")
    for i in range(200):
        put(other, **{f"page-{i}": bytes(4096)})
    assert f"{model}: removed with all that is ours in it: nothing is left of it" in caplog.text
    before = {path.name for path in other._folder.model.path.iterdir()}
    other.close()
    caplog.clear()
    smaller = opened(CAPACITY // 2, OTHER_LABEL, "model B")
    gone = before - {path.name for path in smaller._folder.model.path.iterdir()}
    slabs = {name for name in gone if "." not in name}
    assert slabs
    for name in slabs:
        assert f"{smaller._folder.model.path / name}: removed: the capacity is smaller than it was" in caplog.text


def test_a_removal_that_is_cut_short_leaves_a_model_that_can_be_used_and_removed(tmp_path):
    """The model's name is removed last: any process may remove slabs that belong to no model."""
    count, died = 0, True
    while died:
        folder = tmp_path / f"store-{count}"
        folder.mkdir()
        disk = FaultyDisk(folder)
        storage = FileStorage(folder, CAPACITY, LABEL, "model A", threads=1, disk=disk)
        assert all(storage.put(["a", "b"], [memoryview(bytes(4096)), memoryview(bytes(9000))]))
        storage.close()
        disk.dies_at, died = len(disk.events) + count, False
        other = None
        try:
            other = FileStorage(folder, SMALL, OTHER_LABEL, "model B", threads=1, disk=disk)
            other.close()
        except Died:
            died = True
        mine = folder / "models" / LABEL.hex()[:16]
        assert (mine / "model.json").exists() or not [*mine.glob("*")], "the model can be found as long as it has files"
        again = FileStorage(folder, CAPACITY, LABEL, "model A", threads=1)
        assert put(again, a=bytes(4096), c=b"3") == [True, True]
        assert get(again, "a") == bytes(4096)
        again.close()
        assert main(["storage", "drop", str(folder), "--all", "--yes"]) == 0
        assert main(["storage", "gc", str(folder)]) == 0
        assert [*(folder / "models").iterdir()] in ([], [folder / "models" / OTHER_LABEL.hex()[:16]])
        count += 1
    assert count > 8
