"""`kvarve storage ls|stat|verify|gc|drop` on folders that real caches have filled, and that others have open."""

import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from filling import a_config, an_identity, prompt, run, settle

import forks
from kvarve.cli import main
from kvarve.keys import group_name, root_key
from kvarve.memory.record import HEADER_BYTES
from kvarve.model import ModelIdentity
from kvarve.prefix_cache import PrefixCache
from kvarve.storage import FileStorage
from kvarve.storage.file import maintenance
from kvarve.storage.file.disk import Disk

DAY_S = 86400
OURS, THEIRS = an_identity(), an_identity(weights="w2")

# Has a model open as a server would; answers for each line of names which of them it finds.
HOLDER = """
import sys
from kvarve.storage import FileStorage
folder, label, description = sys.argv[1:]
storage = FileStorage(folder, 64 << 20, bytes.fromhex(label), description)
print("open", flush=True)
for line in sys.stdin:
    names = line.split()
    sizes = storage.get(names, [memoryview(bytearray(1 << 20)) for _ in names])
    print(*("no" if size is None else "yes" for size in sizes), flush=True)
storage.close()
"""

# Dies while it fills two slots.
DIES = """
import os, sys
from kvarve.storage import FileStorage
folder, label, description = sys.argv[1:]
storage = FileStorage(folder, 64 << 20, bytes.fromhex(label), description)
with storage._changing():
    index = storage._index
    slab = next(iter(index.slabs.values()))
    for _ in range(2):
        assert index.seize(slab, *slab.take_free(1))
os._exit(0)
"""

Said = tuple[int, str, str]
Say = Callable[..., Said]
Ask = Callable[[list[str]], list[bool]]


def group_of(identity: ModelIdentity, salt: str = "") -> str:
    return group_name(root_key(identity.fingerprint(), salt))


def fill(storage: FileStorage | str, identity: ModelIdentity, salt: str = "") -> None:
    """Two prompts through a cache of its own, and to storage with all of it."""
    if isinstance(storage, str):
        cache = PrefixCache(identity, a_config(storage=storage))
    else:
        cache = PrefixCache(identity, a_config(), storage=storage)
    for seed in (1, 2):
        run(cache, prompt(4.5, seed), salt)
    settle(cache)
    cache.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}?capacity=64MiB"


@pytest.fixture
def filled(url: str, folder: Path) -> Path:
    """Two models, one of them under two salts."""
    fill(url, OURS)
    fill(url, OURS, "tenant")
    fill(url, THEIRS)
    return folder


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


@contextmanager
def process(script: str, folder: Path, identity: ModelIdentity) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, "-c", script, str(folder), identity.fingerprint().hex(), str(identity)]
    with forks.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0


@pytest.fixture
def server(filled: Path) -> Iterator[Ask]:
    """Another process has OURS open; says which of some names it finds."""
    with process(HOLDER, filled, OURS) as child:
        assert child.stdin is not None and child.stdout is not None
        stdin, stdout = child.stdin, child.stdout
        assert stdout.readline() == "open\n"

        def ask(names: list[str]) -> list[bool]:
            stdin.write(" ".join(names) + "\n")
            stdin.flush()
            return [word == "yes" for word in stdout.readline().split()]

        yield ask


def model_of(folder: Path, identity: ModelIdentity) -> maintenance.Model:
    return next(model for model in maintenance.models(folder) if model.label == identity.fingerprint())


def names_in(folder: Path, identity: ModelIdentity, salt: str | None = None) -> list[str]:
    with maintenance.inspect(folder, model_of(folder, identity)) as inspection:
        names = sorted(each.name for each in inspection.objects())
    return [name for name in names if salt is None or name.startswith(group_of(identity, salt))]


def everything(folder: Path) -> list[tuple[str, int, float]]:
    """All objects, by their last use: name, uses, how much older than the newest."""
    found = []
    for model in maintenance.models(folder):
        with maintenance.inspect(folder, model) as inspection:
            listed = inspection.objects()
        found += [(each.name, each.uses, round(each.used_s_ago - listed[0].used_s_ago, 9)) for each in listed]
    return found


def overwrite(folder: Path, identity: ModelIdentity, name: str, data: bytes, at: int = 0) -> None:
    """Write into the slot of an object, past the store."""
    with maintenance.inspect(folder, model_of(folder, identity)) as inspection:
        slab, row = inspection.place(name)
        path, place = slab.path, slab.shape.slot_at(row)
    with path.open("r+b") as file:
        file.seek(place + at)
        file.write(data)


def record_of(folder: Path, identity: ModelIdentity, name: str) -> bytes:
    with maintenance.opened(folder, model_of(folder, identity)) as storage:
        buffer = bytearray(1 << 16)
        (size,) = storage.get([name], [memoryview(buffer)])
    assert size is not None
    return bytes(buffer[:size])


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder: its time of change and content."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


# --- ls


def test_ls_lists_pages_of_all_models_what_was_used_last_first(filled: Path, say: Say) -> None:
    answer = told(say("ls", filled, "--limit", 0, "--json", "-"))
    assert answer["more"] == 0
    ages = [each["used_s_ago"] for each in answer["objects"]]
    assert ages == sorted(ages)
    assert {each["name"] for each in answer["objects"]} == {*names_in(filled, OURS), *names_in(filled, THEIRS)}
    for each in answer["objects"]:
        assert each["name"] == f"{each['group']}-{each['key']}.{each['pool']}.{each['rank']}of{each['ranks']}"
        assert each["bytes"] == 4096
        assert each["model"] == (OURS if each["name"] in names_in(filled, OURS) else THEIRS).fingerprint().hex()


def test_ls_says_how_many_more_there_are(filled: Path, say: Say) -> None:
    all_of_them = len(names_in(filled, OURS)) + len(names_in(filled, THEIRS))
    code, out, _ = say("ls", filled, "--limit", 3)
    assert code == 0
    assert f"{all_of_them} objects" in out and f"{all_of_them - 3} more are not shown" in out
    assert sum("4 KiB" in line for line in out.splitlines()[:-1]) == 3


def test_ls_of_a_group_lists_one_salt_alone_and_its_first_digits_will_do(filled: Path, say: Say) -> None:
    group = group_of(OURS, "tenant")
    for words in (group, group[:6]):
        answer = told(say("ls", filled, "--group", words, "--limit", 0, "--json", "-"))
        assert sorted(each["name"] for each in answer["objects"]) == names_in(filled, OURS, "tenant")


def test_ls_orders_as_it_is_asked_to(filled: Path, say: Say) -> None:
    oldest = names_in(filled, OURS, "")[0]
    with closing(FileStorage(filled, 64 << 20, OURS.fingerprint(), str(OURS))) as storage:
        storage.get([oldest], [memoryview(bytearray(4096))])
    assert told(say("ls", filled, "--json", "-"))["objects"][0]["name"] == oldest
    stored = [each["stored_s_ago"] for each in told(say("ls", filled, "--by", "stored", "--json", "-"))["objects"]]
    assert stored == sorted(stored)
    assert told(say("ls", filled, "--by", "size", "--json", "-"))["objects"]


# --- stat


def test_stat_counts_pages_by_model_group_and_pool(filled: Path, say: Say, url: str) -> None:
    answer = told(say("stat", url, "--json", "-"))
    assert answer["capacity_bytes"] == 64 << 20
    assert answer["bytes"] == sum(path.stat().st_size for path in filled.rglob("*") if path.is_file())
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


def test_stat_tells_people_the_same_and_the_share_of_a_capacity_that_was_said(filled: Path, say: Say, url: str) -> None:
    code, out, _ = say("stat", url)
    assert code == 0 and "in 2 models" in out and "of 64 MiB" in out
    for identity in (OURS, THEIRS):
        assert str(identity) in out and identity.fingerprint().hex()[:12] in out
    assert group_of(OURS, "tenant") in out
    code, out, _ = say("stat", filled)
    assert code == 0 and "% of" not in out


def test_stat_says_which_models_are_in_use(server: Ask, filled: Path, say: Say) -> None:
    answer = told(say("stat", filled, "--json", "-"))
    assert {model["fingerprint"]: model["in_use"] for model in answer["models"]} == {
        OURS.fingerprint().hex(): True,
        THEIRS.fingerprint().hex(): False,
    }


def test_nothing_is_used_or_changed_by_being_looked_at(filled: Path, say: Say) -> None:
    before, files = everything(filled), tree(filled)
    for words in (["ls"], ["stat"], ["verify"]):
        assert say(words[0], filled)[0] == 0
    assert everything(filled) == before
    assert tree(filled) == files


# --- verify


def test_verify_reads_everything_of_every_model(filled: Path, say: Say) -> None:
    answer = told(say("verify", filled, "--json", "-"))
    assert answer["ok"]
    assert {model["fingerprint"]: model["read"] for model in answer["models"]} == {
        identity.fingerprint().hex(): len(names_in(filled, identity)) for identity in (OURS, THEIRS)
    }


@pytest.mark.parametrize("at", [0, HEADER_BYTES + 3, 4095], ids=["header", "payload", "padding"])
def test_verify_finds_what_is_damaged_beside_a_server(server: Ask, filled: Path, say: Say, at: int) -> None:
    hurt, *others = names_in(filled, OURS)
    overwrite(filled, OURS, hurt, bytes([record_of(filled, OURS, hurt)[at] ^ 4]), at)
    for _ in range(2):
        answer = told(say("verify", filled, "--json", "-"), code=1)
        assert [(each["name"], each["why"]) for model in answer["models"] for each in model["damaged"]] == [
            (hurt, "its seal or its checksum is wrong")
        ]
    assert all(server([hurt, *others])), "the reader notices by the checksum"


def test_verify_finds_a_page_that_lies_in_the_place_of_another(filled: Path, say: Say) -> None:
    one, other = names_in(filled, OURS)[:2]
    overwrite(filled, OURS, one, record_of(filled, OURS, other))
    code, out, _ = say("verify", filled)
    assert code == 1 and "1 damaged: a server that reads one drops it" in out
    assert f"{one}: holds another page, {other.split('-', 1)[1]}" in out


def test_verify_finds_a_page_of_another_model(filled: Path, say: Say) -> None:
    one, foreign = names_in(filled, OURS)[0], names_in(filled, THEIRS)[0]
    overwrite(filled, OURS, one, record_of(filled, THEIRS, foreign))
    code, out, _ = say("verify", filled)
    assert code == 1 and f"{one}: holds a page of another model, {THEIRS.fingerprint().hex()[:12]}" in out


def test_verify_leaves_alone_what_is_no_page_by_its_name(filled: Path, say: Say) -> None:
    storage = FileStorage(filled, 64 << 20, OURS.fingerprint(), str(OURS))
    storage.put(["note"], [memoryview(b"not a page")])
    code, out, _ = say("verify", filled)
    assert code == 0 and "1 object without a page's name: not checked" in out
    assert storage.exists(["note"]) == [True]
    storage.close()


def test_verify_counts_a_file_that_is_no_slab_any_more(filled: Path, say: Say) -> None:
    (table,) = model_of(filled, THEIRS).folder.glob("slab-*.table")
    os.truncate(table, 4000)
    for _ in range(2):
        code, out, _ = say("verify", filled)
        assert code == 1 and f"{table.with_suffix('')}: neither header of its table" in out
    assert "bytes were those of damaged slabs" in say("gc", filled)[1]
    assert say("verify", filled)[0] == 0
    assert "damaged" not in say("gc", filled)[1]


def test_what_a_server_evicts_meanwhile_is_no_damage(filled: Path) -> None:
    names = names_in(filled, OURS)
    storage = FileStorage(filled, 64 << 20, OURS.fingerprint(), str(OURS))

    def intact(name: str, record: memoryview) -> bool:
        """Another process gives the slot to another object while this one is being read."""
        storage.delete([name])
        return False

    with maintenance.inspect(filled, model_of(filled, OURS)) as inspection:
        assert inspection.verify(intact) == (0, [])
    assert storage.exists(names) == [False] * len(names)
    storage.close()


# --- gc


def test_gc_drops_what_is_older_than_the_urls_ttl_and_nothing_without_one(server: Ask, filled: Path, say: Say) -> None:
    names = names_in(filled, OURS)
    answer = told(say("gc", f"file://{filled}?ttl=1d", "--json", "-"))
    assert [model["expired"] for model in answer["models"]] == [0, 0]
    assert [model["expired"] for model in told(say("gc", filled, "--json", "-"))["models"]] == [0, 0]
    assert all(server(names))
    answer = told(say("gc", f"file://{filled}?ttl=0.000000001s", "--json", "-"))
    counts = {model["fingerprint"]: model["expired"] for model in answer["models"]}
    assert counts[OURS.fingerprint().hex()] == len(names)
    assert not any(server(names))


def test_a_process_that_died_leaves_nothing_to_gc(server: Ask, filled: Path, say: Say) -> None:
    with process(DIES, filled, OURS):
        pass
    assert say("gc", filled)[1].count("nothing to free") == 2
    (ours,) = (model for model in told(say("stat", filled, "--json", "-"))["models"] if model["in_use"])
    assert ours["slots"]["reserved"] == ours["slots"]["broken"] == 0


class LongAgo(Disk):
    """As it was 40 days ago, on this machine before it was started anew."""

    def wall_ns(self) -> int:
        return time.time_ns() - 40 * DAY_S * 10**9

    def boot(self) -> bytes:
        return b"the boot before."


@pytest.fixture
def with_an_old_model(filled: Path) -> Path:
    """A third model, unused for 40 days."""
    old = an_identity(weights="old")
    fill(FileStorage(filled, 64 << 20, old.fingerprint(), str(old), disk=LongAgo()), old)
    clock = model_of(filled, old).folder / "clock"
    os.utime(clock, (time.time() - 40 * DAY_S,) * 2)
    return filled


def test_gc_removes_models_unused_for_so_long_and_inspection_is_no_use(with_an_old_model: Path, say: Say) -> None:
    folder, old = with_an_old_model, an_identity(weights="old").fingerprint().hex()
    for words in ("ls", "stat", "verify", "gc"):
        assert say(words, folder)[0] == 0
    answer = told(say("gc", folder, "--unused-for", "41d", "--json", "-"))
    assert not any(model["removed"] for model in answer["models"]) and len(answer["models"]) == 3
    code, out, _ = say("gc", folder, "--unused-for", "30d")
    assert code == 0 and f"({old[:12]}): not used for 40 d: removed" in out
    assert {model.label for model in maintenance.models(folder)} == {OURS.fingerprint(), THEIRS.fingerprint()}


def test_gc_keeps_an_old_model_that_a_process_has_open(with_an_old_model: Path, say: Say) -> None:
    old = an_identity(weights="old")
    with process(HOLDER, with_an_old_model, old) as child:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        os.utime(model_of(with_an_old_model, old).folder / "clock", (time.time() - 40 * DAY_S,) * 2)
        answer = told(say("gc", with_an_old_model, "--unused-for", "30d", "--json", "-"))
    assert not any(model["removed"] for model in answer["models"])
    assert names_in(with_an_old_model, old)


# --- drop


def test_drop_of_a_group_leaves_the_other_salt_to_the_server(server: Ask, filled: Path, say: Say) -> None:
    ours, tenants, theirs = names_in(filled, OURS, ""), names_in(filled, OURS, "tenant"), names_in(filled, THEIRS)
    code, out, _ = say("drop", filled, "--group", group_of(OURS, "tenant")[:8], "--yes")
    assert code == 0 and f"{len(tenants)} objects dropped" in out
    assert all(server(ours)) and not any(server(tenants))
    assert names_in(filled, THEIRS) == theirs


def test_drop_without_a_terminal_lists_what_it_would_remove_and_removes_nothing(filled: Path, say: Say) -> None:
    before = everything(filled)
    group = group_of(OURS, "tenant")
    for words, what in (
        (["--group", group], f"would drop group {group}: {len(names_in(filled, OURS, 'tenant'))} objects"),
        (["--model", THEIRS.fingerprint().hex()[:4]], "would drop 1 model, "),
        (["--all"], "would drop 2 models, "),
    ):
        code, out, error = say("drop", filled, *words)
        assert code == 2 and what in out
        assert error == "kvarve: nothing was dropped: say --yes to do it\n"
    assert everything(filled) == before


class Person(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("Yes\n", 1), ("\n", 2), ("n\n", 2), ("", 2)])
def test_drop_asks_at_a_terminal(
    filled: Path, say: Say, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    monkeypatch.setattr("sys.stdin", Person(answer))
    code, out, error = say("drop", filled, "--model", THEIRS.fingerprint().hex()[:12])
    assert code == 0 and error == "Do it? [y/N] "
    assert ("nothing was dropped" in out) == (left == 2)
    assert len(maintenance.models(filled)) == left


@pytest.mark.parametrize("words", [["--all"], ["--model", OURS.fingerprint().hex()]], ids=["all", "model"])
def test_drop_refuses_a_model_that_is_in_use_and_drops_nothing(
    server: Ask, filled: Path, say: Say, words: list[str]
) -> None:
    before = everything(filled)
    error = complaint(say("drop", filled, *words, "--yes"))
    assert "is in use" in error and OURS.fingerprint().hex()[:12] in error
    assert everything(filled) == before


def test_drop_all_leaves_a_folder_that_can_be_filled_again(filled: Path, say: Say, url: str) -> None:
    assert told(say("drop", filled, "--all", "--yes", "--json", "-"))["dropped"]
    assert told(say("stat", filled, "--json", "-"))["models"] == []
    assert say("verify", filled)[0] == 0
    fill(url, OURS)
    assert names_in(filled, OURS)


# --- errors


@pytest.mark.parametrize("does", ["ls", "stat", "verify", "gc", "drop --all --yes"])
def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, say: Say, does: str) -> None:
    command, *words = does.split()
    assert "no such folder" in complaint(say(command, tmp_path / "typo", *words))
    assert [*tmp_path.iterdir()] == []


def test_a_foreign_folder_is_left_alone(tmp_path: Path, say: Say) -> None:
    assert "there is no kvarve storage in it" in complaint(say("ls", tmp_path))
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "thesis.tex").write_text("precious")
    assert "not a kvarve storage folder" in complaint(say("drop", tmp_path, "--all", "--yes"))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("form", ["kvarve-files/1", "kvarve-slabs/9"])
def test_a_folder_of_another_format_is_named_as_such(tmp_path: Path, say: Say, form: str) -> None:
    (tmp_path / "kvarve.json").write_text(json.dumps({"format": form}))
    assert f"another version of kvarve ({form!r})" in complaint(say("stat", tmp_path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ls memory://name?capacity=1GiB", "ask its server with kvarve storage status"),
        ("stat mooncake://host:1/segment", "managed by its master"),
        ("ls tape:///dev/st0", "there is no storage of the kind 'tape'"),
        ("ls relative/path", "neither an absolute path nor a storage URL"),
        ("ls file://store/pages", "three slashes"),
        ("ls {url}&ttl=soon", "ttl=soon is not a time"),
        ("ls file://{folder}?capacity=lots", "'lots' is not a size"),
        ("ls file://{folder}?size=1", "unknown parameter 'size'"),
        ("ls {folder}/kvarve.json", "is not a folder"),
        ("ls {folder} --group ffffffffffffffff", "no group begins with 'ffffffffffffffff'"),
        ("ls {folder} --by name", "--by: 'name' is no order; known: used, stored, size"),
        ("ls {folder} --limit some", "--limit: 'some' is not a whole number"),
        ("ls {folder} --json /no/such/folder/file", "not a file that can be written"),
        ("gc {folder} --unused-for ever", "--unused-for: ever is not a time: write 90s, 30m, 12h, 7d or 2w"),
        ("drop {folder}", "give one of --group, --model and --all"),
        ("drop {folder} --all --model 00", "give one of --group, --model and --all"),
        ("drop {folder} --group zz --yes", "no group begins with 'zz'"),
        ("drop {folder} --model zz --yes", "no model begins with 'zz'"),
        ("drop {folder} --group= --yes", "several groups begin with ''"),
        ("ls", "URL is required"),
        ("lss {folder}", "unknown command 'lss': did you mean ls?"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(filled: Path, say: Say, url: str, words: str, says: str) -> None:
    before = tree(filled)
    assert says in complaint(say(*words.format(folder=filled, url=url).split()))
    assert everything(filled) and tree(filled).keys() >= before.keys()


def test_json_goes_to_a_file_beside_what_people_read(filled: Path, say: Say, tmp_path: Path) -> None:
    code, out, _ = say("stat", filled, "--json", tmp_path / "stat.json")
    assert code == 0 and str(OURS) in out
    assert len(json.loads((tmp_path / "stat.json").read_text())["models"]) == 2
