"""`kvarve storage ls|stat|verify|gc|drop` on folders that real caches have filled, and that others have open."""

import io
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from filling import a_config, an_identity, prompt, run, settle

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cli.main import main
from kvarve.pages.keys import group_name, root_key
from kvarve.pages.pools import ModelIdentity
from kvarve.records.record import HEADER_BYTES
from kvarve.storage import FileStorage
from kvarve.storage.file.disk import Disk
from kvarve.storage.file.maintenance import FolderUpkeep
from kvarve.storage.upkeep import Model

DAY_S = 86400
OURS, THEIRS, OLD = an_identity(), an_identity(weights="w2"), an_identity(weights="old")

Said = tuple[int, str, str]
Say = Callable[..., Said]


def group_of(identity: ModelIdentity, salt: str = "") -> str:
    return group_name(root_key(identity.fingerprint(), salt))


def opened(folder: Path, identity: ModelIdentity = OURS, disk: Disk | None = None) -> FileStorage:
    return FileStorage(folder, 64 << 20, identity.fingerprint(), str(identity), disk=disk)


def fill(folder: Path, identity: ModelIdentity, salt: str = "", disk: Disk | None = None) -> None:
    """Two prompts through a cache of its own, and to storage with all of it."""
    cache = PrefixCache(identity, a_config(), storage=opened(folder, identity, disk))
    for seed in (1, 2):
        run(cache, prompt(4.5, seed), salt)
    settle(cache)
    cache.shutdown()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one of them under two salts, in a folder that no test changes."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    for identity, salt in ((OURS, ""), (OURS, "tenant"), (THEIRS, "")):
        fill(folder, identity, salt)
    return folder


@pytest.fixture
def filled(shared: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(shared, tmp_path / "store"))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run `kvarve storage` with these words: exit code, standard output and standard error. There is no terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def say(*words: object) -> Said:
        capsys.readouterr()
        code = main(["storage", *map(str, words)])
        return code, *capsys.readouterr()  # type: ignore[return-value]

    return say


def told(said: Said, code: int = 0) -> Any:
    """A command's output with `--json -`."""
    assert (said[0], said[2]) == (code, "")
    return json.loads(said[1])


def complaint(said: Said) -> str:
    code, out, error = said
    assert (code, out) == (2, ""), said
    assert error.startswith("kvarve: ") and error.endswith("\n") and error.count("\n") == 1
    return error


@pytest.fixture
def server(filled: Path) -> Iterator[FileStorage]:
    """Has OURS open."""
    with closing(opened(filled)) as storage:
        yield storage


def has(storage: FileStorage, names: list[str]) -> set[bool]:
    return {size is not None for size in storage.get(names, [memoryview(bytearray(1 << 16)) for _ in names])}


def model_of(folder: Path, identity: ModelIdentity) -> Model:
    return next(model for model in FolderUpkeep(folder).contents().models if model.label == identity.fingerprint())


def names_in(folder: Path, identity: ModelIdentity, salt: str | None = None) -> list[str]:
    with FolderUpkeep(folder).inspect(model_of(folder, identity)) as inspection:
        names = sorted(each.name for each in inspection.objects())
    return [name for name in names if salt is None or name.startswith(group_of(identity, salt))]


def everything(folder: Path) -> list[tuple[str, int, float]]:
    """All objects, by their last use: name, uses, how much older than the newest."""
    found = []
    for model in FolderUpkeep(folder).contents().models:
        with FolderUpkeep(folder).inspect(model) as inspection:
            listed = inspection.objects()
        found += [(each.name, each.uses, round(each.used_s_ago - listed[0].used_s_ago, 9)) for each in listed]
    return found


def overwrite(folder: Path, identity: ModelIdentity, name: str, data: bytes, at: int = 0) -> None:
    """Write into the slot of an object, past the store."""
    with FolderUpkeep(folder).inspect(model_of(folder, identity)) as inspection:
        slab, row = inspection.place(name)
        path, place = slab.path, slab.shape.slot_at(row)
    with path.open("r+b") as file:
        file.seek(place + at)
        file.write(data)


def record_of(folder: Path, identity: ModelIdentity, name: str) -> bytes:
    with FolderUpkeep(folder).opened(model_of(folder, identity)) as storage:
        buffer = bytearray(1 << 16)
        (size,) = storage.get([name], [memoryview(buffer)])
    assert size is not None
    return bytes(buffer[:size])


# --- ls


def test_ls_lists_pages_of_all_models_what_was_used_last_first(shared: Path, say: Say) -> None:
    answer = told(say("ls", shared, "--limit", 0, "--json", "-"))
    assert answer["more"] == 0
    ages = [each["used_s_ago"] for each in answer["objects"]]
    assert ages == sorted(ages)
    ours, theirs = names_in(shared, OURS), names_in(shared, THEIRS)
    assert {each["name"] for each in answer["objects"]} == {*ours, *theirs}
    for each in answer["objects"]:
        assert each["name"] == f"{each['group']}-{each['key']}.{each['pool']}.{each['rank']}of{each['ranks']}"
        assert each["bytes"] == 4096
        assert each["model"] == (OURS if each["name"] in ours else THEIRS).fingerprint().hex()
    answer = told(say("ls", shared, "--group", group_of(OURS, "tenant")[:6], "--limit", 0, "--json", "-"))
    assert sorted(each["name"] for each in answer["objects"]) == names_in(shared, OURS, "tenant")
    code, out, _ = say("ls", shared, "--limit", 3)
    total = len(ours) + len(theirs)
    assert code == 0 and f"{total} objects" in out and f"{total - 3} more are not shown" in out
    assert sum("4 KiB" in line for line in out.splitlines()[:-1]) == 3


def test_ls_orders_as_it_is_asked_to(filled: Path, say: Say) -> None:
    oldest = names_in(filled, OURS, "")[0]
    with closing(opened(filled)) as storage:
        has(storage, [oldest])
    assert told(say("ls", filled, "--json", "-"))["objects"][0]["name"] == oldest
    stored = [each["stored_s_ago"] for each in told(say("ls", filled, "--by", "stored", "--json", "-"))["objects"]]
    assert stored == sorted(stored)
    assert told(say("ls", filled, "--by", "size", "--json", "-"))["objects"]


# --- stat


def test_stat_counts_pages_by_model_group_and_pool_and_says_which_models_are_in_use(
    server: FileStorage, filled: Path, say: Say, tmp_path: Path
) -> None:
    url = f"file://{filled}?capacity=64MiB"
    answer = told(say("stat", url, "--json", "-"))
    assert answer["capacity_bytes"] == 64 << 20
    assert answer["bytes"] == sum(path.stat().st_size for path in filled.rglob("*") if path.is_file())
    assert {model["fingerprint"]: model["in_use"] for model in answer["models"]} == {
        OURS.fingerprint().hex(): True,
        THEIRS.fingerprint().hex(): False,
    }
    found = {
        (model["fingerprint"], row["group"], row["pool"]): row["objects"]
        for model in answer["models"]
        for row in model["groups"]
    }
    expected = Counter(
        (identity.fingerprint().hex(), name.split("-", 1)[0], name.split(".")[1])
        for identity in (OURS, THEIRS)
        for name in names_in(filled, identity)
    )
    assert found == dict(expected) and len(found) == 9
    code, out, _ = say("stat", url, "--json", tmp_path / "stat.json")
    assert code == 0 and "in 2 models" in out and "of 64 MiB" in out and group_of(OURS, "tenant") in out
    for identity in (OURS, THEIRS):
        assert str(identity) in out and identity.fingerprint().hex()[:12] in out
    assert len(json.loads((tmp_path / "stat.json").read_text())["models"]) == 2
    assert "% of" not in say("stat", filled)[1], "no capacity was said"


def test_nothing_is_used_or_changed_by_being_looked_at(filled: Path, say: Say) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in filled.rglob("*")
        }

    before, content = everything(filled), files()
    for words in (["ls"], ["stat"], ["verify"]):
        assert say(words[0], filled)[0] == 0
    assert everything(filled) == before
    assert files() == content


# --- verify


def test_verify_reads_everything_and_finds_what_is_damaged_beside_a_server(
    server: FileStorage, filled: Path, say: Say
) -> None:
    answer = told(say("verify", filled, "--json", "-"))
    assert answer["ok"]
    assert {model["fingerprint"]: model["read"] for model in answer["models"]} == {
        identity.fingerprint().hex(): len(names_in(filled, identity)) for identity in (OURS, THEIRS)
    }
    hurt, others = names_in(filled, OURS)[:3], names_in(filled, OURS)[3:]
    for name, at in zip(hurt, (0, HEADER_BYTES + 3, 4095), strict=True):  # header, payload, padding
        overwrite(filled, OURS, name, bytes([record_of(filled, OURS, name)[at] ^ 4]), at)
    answer = told(say("verify", filled, "--json", "-"), code=1)
    damaged = {each["name"]: each["why"] for model in answer["models"] for each in model["damaged"]}
    assert damaged == dict.fromkeys(hurt, "its seal or its checksum is wrong")
    assert has(server, [*hurt, *others]) == {True}, "the reader notices by the checksum"


def test_verify_says_whose_page_lies_in_the_place_of_another_and_leaves_alone_what_is_no_page(
    filled: Path, say: Say
) -> None:
    one, other, third, *_ = names_in(filled, OURS)
    overwrite(filled, OURS, one, record_of(filled, OURS, other))
    overwrite(filled, OURS, third, record_of(filled, THEIRS, names_in(filled, THEIRS)[0]))
    with closing(opened(filled)) as storage:
        storage.put(["note"], [memoryview(b"not a page")])
    code, out, _ = say("verify", filled)
    assert code == 1 and "2 damaged: a server that reads one drops it" in out
    assert f"{one}: holds another page, {other.split('-', 1)[1]}" in out
    assert f"{third}: holds a page of another model, {THEIRS.fingerprint().hex()[:12]}" in out
    assert "1 object without a page's name: not checked" in out


def test_verify_counts_a_file_that_is_no_slab_any_more_and_gc_frees_it(filled: Path, say: Say) -> None:
    (table,) = model_of(filled, THEIRS).folder.glob("slab-*.table")
    os.truncate(table, 4000)
    code, out, _ = say("verify", filled)
    assert code == 1 and f"{table.with_suffix('')} is damaged" in out and "neither header of its table" in out
    assert "bytes were those of damaged slabs" in say("gc", filled)[1]
    assert say("verify", filled)[0] == 0
    assert say("gc", filled)[1].count("nothing to free") == 2


def test_what_a_server_evicts_meanwhile_is_no_damage(server: FileStorage, filled: Path) -> None:
    names = names_in(filled, OURS)

    def intact(name: str, record: memoryview) -> bool:
        """Another process gives the slot to another object while this one is being read."""
        server.delete([name])
        return False

    with FolderUpkeep(filled).inspect(model_of(filled, OURS)) as inspection:
        assert inspection.verify(intact) == (0, [])
    assert server.exists(names) == [False] * len(names)


# --- gc


def test_gc_drops_what_is_older_than_the_urls_ttl_and_nothing_without_one(
    server: FileStorage, filled: Path, say: Say
) -> None:
    names = names_in(filled, OURS)
    for url in (f"file://{filled}?ttl=1d", filled):
        assert [model["expired"] for model in told(say("gc", url, "--json", "-"))["models"]] == [0, 0]
    assert has(server, names) == {True}
    answer = told(say("gc", f"file://{filled}?ttl=0.000000001s", "--json", "-"))
    counts = {model["fingerprint"]: model["expired"] for model in answer["models"]}
    assert counts[OURS.fingerprint().hex()] == len(names)
    assert has(server, names) == {False}


class LongAgo(Disk):
    """As it was 40 days ago, on this machine before it was started anew."""

    def wall_ns(self) -> int:
        return time.time_ns() - 40 * DAY_S * 10**9

    def boot(self) -> bytes:
        return b"the boot before."


def test_gc_removes_models_that_no_process_has_used_for_so_long_and_inspection_is_no_use(
    filled: Path, say: Say
) -> None:
    fill(filled, OLD, disk=LongAgo())

    def age() -> None:
        os.utime(model_of(filled, OLD).folder / "clock", (time.time() - 40 * DAY_S,) * 2)

    with closing(opened(filled, OLD)):
        age()
        answer = told(say("gc", filled, "--unused-for", "30d", "--json", "-"))
        assert not any(model["removed"] for model in answer["models"]), "a process has it open"
    age()
    for words in ("verify", "gc"):
        assert say(words, filled)[0] == 0
    answer = told(say("gc", filled, "--unused-for", "41d", "--json", "-"))
    assert not any(model["removed"] for model in answer["models"]) and len(answer["models"]) == 3
    code, out, _ = say("gc", filled, "--unused-for", "30d")
    assert code == 0 and f"({OLD.fingerprint().hex()[:12]}): not used for 40 d: removed" in out
    assert {model.label for model in FolderUpkeep(filled).contents().models} == {
        OURS.fingerprint(),
        THEIRS.fingerprint(),
    }


# --- drop


def test_drop_of_a_group_leaves_the_other_salt_to_the_server(server: FileStorage, filled: Path, say: Say) -> None:
    ours, tenants, theirs = names_in(filled, OURS, ""), names_in(filled, OURS, "tenant"), names_in(filled, THEIRS)
    code, out, _ = say("drop", filled, "--group", group_of(OURS, "tenant")[:8], "--yes")
    assert code == 0 and f"{len(tenants)} objects dropped" in out
    assert has(server, ours) == {True} and has(server, tenants) == {False}
    assert names_in(filled, THEIRS) == theirs


def test_drop_without_a_terminal_lists_what_it_would_remove_and_removes_nothing(shared: Path, say: Say) -> None:
    before = everything(shared)
    group = group_of(OURS, "tenant")
    for words, what in (
        (["--group", group], f"would drop group {group}: {len(names_in(shared, OURS, 'tenant'))} objects"),
        (["--model", THEIRS.fingerprint().hex()[:4]], "would drop 1 model, "),
        (["--all"], "would drop 2 models, "),
    ):
        code, out, error = say("drop", shared, *words)
        assert code == 2 and what in out
        assert error == "kvarve: nothing was dropped: without a terminal it needs --yes\n"
    assert everything(shared) == before


class Person(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_drop_asks_at_a_terminal(filled: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, left in (("\n", 2), ("n\n", 2), ("", 2), ("Yes\n", 1)):
        monkeypatch.setattr("sys.stdin", Person(answer))
        code, out, error = say("drop", filled, "--model", THEIRS.fingerprint().hex()[:12])
        assert code == 0 and error == "Do it? [y/N] "
        assert ("nothing was dropped" in out) == (left == 2)
        assert len(FolderUpkeep(filled).contents().models) == left


def test_drop_refuses_a_model_that_is_in_use_and_drops_nothing(server: FileStorage, filled: Path, say: Say) -> None:
    before = everything(filled)
    for words in (["--all"], ["--model", OURS.fingerprint().hex()]):
        error = complaint(say("drop", filled, *words, "--yes"))
        assert "is in use" in error and OURS.fingerprint().hex()[:12] in error
    assert everything(filled) == before


# --- errors


def test_a_folder_that_is_none_of_ours_is_neither_made_nor_changed(tmp_path: Path, say: Say) -> None:
    for does in ("ls", "stat", "verify", "gc", "drop --all --yes"):
        command, *words = does.split()
        assert "no such folder" in complaint(say(command, tmp_path / "typo", *words))
    assert "there is no kvarve storage in it" in complaint(say("ls", tmp_path))
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not a kvarve storage folder" in complaint(say("drop", tmp_path, "--all", "--yes"))
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    (tmp_path / "kvarve.json").write_text(json.dumps({"format": "kvarve-slabs/9"}))
    assert "another version of kvarve ('kvarve-slabs/9')" in complaint(say("stat", tmp_path))


WRONG = (
    ("ls memory://name?capacity=1GiB", "ask its server with kvarve storage status"),
    ("stat mooncake://host:1/segment", "managed by its master"),
    ("ls tape:///dev/st0", "unknown storage 'tape'"),
    ("ls relative/path", "relative/path: no such folder"),
    ("ls file://store/pages", "three slashes"),
    ("ls file://{folder}?ttl=soon", "ttl=soon cannot be read as a time"),
    ("ls file://{folder}?capacity=lots", "'lots' cannot be read as a size"),
    ("ls {folder}/kvarve.json", "is not a folder"),
    ("ls {folder} --json /no/such/folder/file", "cannot be written as a file"),
    ("gc {folder} --unused-for ever", "--unused-for: ever cannot be read as a time: write 90s, 30m, 12h, 7d or 2w"),
    ("drop {folder}", "drop needs one of --group, --model and --all"),
    ("drop {folder} --model zz --yes", "no model begins with 'zz'"),
    ("drop {folder} --group= --yes", "several groups begin with ''"),
    ("ls", "URL is required"),
)


def test_what_cannot_be_is_said_in_one_line(shared: Path, say: Say) -> None:
    before = everything(shared)
    for words, says in WRONG:
        assert says in complaint(say(*words.format(folder=shared).split())), words
    assert everything(shared) == before
