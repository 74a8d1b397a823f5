"""The metadata server of a machine: it is started when needed, killed, stopped, raced for, lied to and starved."""

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hf3fs_laws import audit
from hf3fs_metadata_suite import LABEL, LONG_S, K, look, number, store, there
from hf3fs_server import Local, ended, runs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import until

import forks
from kvarve.errors import StorageError
from kvarve.storage import deadline
from kvarve.storage.hf3fs.metadata import STORE_FILE, Metadata, Slot, open_metadata
from kvarve.storage.hf3fs.metadata.calls import CALLS, BadCall, answer
from kvarve.storage.hf3fs.metadata.frames import HEADER_BYTES, pack, read_header, read_rest
from kvarve.storage.hf3fs.metadata.metadata_server import MOST_CONNECTIONS, near
from kvarve.storage.hf3fs.metadata.slot_table import SlotTable


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """One whose server no test ends."""
    folder = tmp_path_factory.mktemp("running")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        local = Local(folder)
        local.open().exists(["a"])
        yield local
        local.close()


def test_a_killed_server_costs_no_error_and_nothing_that_was_committed(local: Local) -> None:
    metadata = local.open(4)
    store(metadata, "a", "b")
    request = number()
    (slot,) = metadata.reserve(request, ["c"], [K], LONG_S)
    local.kill()
    assert there(metadata, "a", "b", "c") == "a b"
    assert metadata.commit(request, ["c"], [slot], [1]) == [True], "what it had reserved is still reserved"
    local.kill()
    assert metadata.commit(request, ["c"], [slot], [1]) == [True]
    assert [found and found[0] for found in metadata.lookup(["c"], number(), LONG_S)] == [slot]
    assert store(metadata, "d", "e") == [True, True]
    assert there(metadata, *"abcde") == "b c d e" or there(metadata, *"abcde") == "a c d e"


@pytest.mark.long
def test_a_client_of_many_threads_asks_the_next_server_by_new_connections(local: Local) -> None:
    metadata = local.open(1000)

    def work(worker: int) -> bool:
        names = [f"w{worker}.{i}" for i in range(10)]
        return all(store(metadata, *names)) and metadata.exists(names) == [True] * 10

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
    local.kill()
    assert metadata.usage().objects == 160


@pytest.mark.long
def test_a_server_killed_in_mid_call_loses_nothing_that_it_answered_and_leaks_no_slot(local: Local) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    some, slots = random.Random(seed), 12
    metadata, committed = local.open(slots), dict[str, Slot]()
    metadata.exists(["a"])  # which starts a server
    at, kills, answered = 0, 0, True
    with ThreadPoolExecutor(1) as pool:
        while kills < 60 or not answered:
            at += 1
            # One at a time: a call stands two lost connections, and one death may cost it both.
            if answered and kills < 60 and some.random() < 0.1:
                kills, killing = kills + 1, pool.submit(local.kill)
            answered = not kills or killing.done()  # so the calls that follow find the next server
            names, request = [f"n{at}.{i}" for i in range(some.randint(1, 3))], number()
            given_ = metadata.reserve(request, names, [K] * len(names), LONG_S)
            assert all(isinstance(slot, Slot) for slot in given_), "no slot has leaked"
            assert not {slot[:2] for slot in given_} & {slot[:2] for slot in committed.values()}
            assert metadata.commit(request, names, given_, [5] * len(names)) == [True] * len(names)
            committed |= dict(zip(names, given_, strict=True))
            reader = number()
            found = metadata.lookup([*committed], reader, LONG_S)
            assert [each and each.slot for each in found] == [*committed.values()]
            metadata.release(reader)
            while len(committed) > slots - 3:
                name = some.choice([*committed])
                del committed[name]
                metadata.delete([name])
        killing.result()
    metadata.drop()
    assert all(store(metadata, *(f"last{i}" for i in range(slots))))


def test_a_server_that_stands_still_costs_its_callers_their_deadline_and_answers_nothing_wrong_later(
    running: Local,
) -> None:
    metadata = running.open()
    metadata.drop()
    store(metadata, "a", "b")
    with running.stopped():
        for call in (metadata.usage, lambda: metadata.exists(["a"]), lambda: look(metadata, "a")):
            with deadline(0.05), pytest.raises(StorageError, match="in time"):
                call()
    assert metadata.exists(["x", "a", "b"]) == [False, True, True]
    assert metadata.usage().objects == 2


@pytest.mark.long
def test_a_server_that_is_told_to_end_removes_its_socket_and_the_next_one_knows_what_it_knew(local: Local) -> None:
    metadata = local.open(3)
    store(metadata, "a")
    store(metadata, "b")
    store(metadata, "c")
    local.kill(signal.SIGTERM)
    assert not (local.folder / "socket").exists()
    assert ended(local.run("--idle-s", "0")) == (0, ""), "nobody asks it"
    assert store(metadata, "d") == [True]
    assert there(metadata, *"abcd") == "b c d"


@pytest.mark.long
def test_many_clients_start_one_server_which_outlives_its_starter(local: Local) -> None:
    code = (
        "import sys; from pathlib import Path; from kvarve.storage.hf3fs.metadata import open_metadata;"
        f"m = open_metadata(None, Path(sys.argv[1]), {LABEL!r}, {64 * K}, None);"
        "print(m.exists(['a'])); m.close()"
    )
    command = [sys.executable, "-c", code, str(local.store)]
    processes = [forks.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["[False]\n"] * 3
    pid = local.pid()
    assert runs(pid)
    store(local.open(), "a")
    assert local.pid() == pid


@pytest.mark.long
def test_its_folder_is_for_one_user_and_refused_if_others_may_enter(local: Local) -> None:
    local.open().exists(["a"])
    assert stat.S_IMODE(local.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in local.folder.iterdir()} == {0o600}
    local.kill()
    local.folder.chmod(0o755)
    code, errors = ended(local.run())
    assert code == 2
    assert "mode 0700" in errors
    with pytest.raises(StorageError, match="log says why"):
        local.open().exists(["a"])
    local.folder.chmod(0o700)


def _answers(metadata: Metadata) -> bool:
    try:
        return all(store(metadata, "a"))
    except StorageError:
        return False


def test_a_server_that_is_run_by_hand_is_asked_and_never_started(local: Local, tmp_path: Path) -> None:
    path = tmp_path / "by-hand" / "socket"
    setting = f"unix:{path}"
    with pytest.raises(StorageError, match="by-hand"):
        open_metadata(setting, local.store, LABEL, 64 * K, None).exists(["a"])
    command = [sys.executable, "-m", "kvarve.storage.hf3fs.metadata", str(path.parent)]
    with forks.Popen(command) as process:
        try:
            metadata = open_metadata(setting, local.store, LABEL, 64 * K, None)
            until(lambda: _answers(metadata), "a server that listens")
            (tmp_path / "other").mkdir()
            other = open_metadata(setting, tmp_path / "other", LABEL, 64 * K, None)
            with pytest.raises(StorageError, match="metadata of another store"):
                other.exists(["a"])
        finally:
            process.terminate()
    with pytest.raises(StorageError):
        metadata.exists(["a"])
    metadata.close()
    other.close()


@pytest.mark.long
def test_a_call_that_cannot_wait_for_the_server_that_it_starts_does_not_end_it(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started, goes_on = subprocess.run, list[object](), threading.Event()

    def held(command: Any, **how: Any) -> Any:
        started.append(command)
        assert goes_on.wait(LONG_S)
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", held)
    metadata = local.open()
    while not started:
        with deadline(0.1), pytest.raises(StorageError, match="in time"):
            metadata.exists(["a"])
    goes_on.set()
    assert metadata.exists(["a"]) == [False]
    assert len(started) == 1


@pytest.mark.long
def test_a_store_kept_by_another_machine_is_refused_until_its_file_says_otherwise(local: Local) -> None:
    file = local.store / STORE_FILE
    local.open().exists(["a"])
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], "machine of another name", ""]))
    with pytest.raises(StorageError, match="kept by machine of another name"):
        local.open()
    file.write_text("\n".join([*lines, ""]))
    assert not local.open().rebuilding(number(), LONG_S)
    file.unlink()
    (local.store / "slots-4096-7").touch()
    assert local.open().rebuilding(number(), LONG_S), "nothing is known of it, and it may have objects"


@pytest.mark.long
def test_two_places_for_the_metadata_of_one_machine_are_refused(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two servers would remove the files of which it does not know."""
    (local.store / "kvarve.json").touch()  # a folder with its marker alone is a new store
    local.open().exists(["a"])
    with monkeypatch.context() as other:
        other.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        with pytest.raises(StorageError, match="elsewhere"):
            local.open()
    assert not local.open().rebuilding(number(), LONG_S)


def test_the_last_client_that_opened_a_store_says_its_capacity_and_not_the_last_that_connected(local: Local) -> None:
    first = local.open(64)
    first.exists(["a"])
    last = local.open(32)
    assert last.usage().capacity_bytes == 32 * K
    local.kill()
    assert first.usage().capacity_bytes == 32 * K, "by a new connection to another server"


@pytest.mark.parametrize("said", ["", "\xff", "kvarve hf3fs 1\n"])
def test_a_file_that_is_not_ours_is_refused(local: Local, said: str) -> None:
    (local.store / STORE_FILE).write_bytes(said.encode("latin-1"))
    with pytest.raises(StorageError, match=STORE_FILE):
        local.open()


def connected(local: Local) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(60)
    with near(local.folder / "socket") as address:
        link.connect(address)
    return link


def said(link: socket.socket) -> bytes:
    data = b""
    try:
        while more := link.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


HELLO = CALLS.index("hello")


def test_foreign_bytes_end_their_connection_and_no_other(running: Local) -> None:
    metadata = running.open()
    store(metadata, "a")
    foreign = [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, os.urandom(1 << 16), b"kvm1" + b"\xff" * 16]
    foreign.append(pack(99, 1, [], [])[:HEADER_BYTES])
    for data in foreign:
        with connected(running) as link:
            try:
                link.sendall(data)
            except OSError:
                continue
            assert said(link) == b""
        assert there(metadata, "a") == "a"
    assert runs(running.pid())


def test_clients_that_say_half_a_call_or_read_no_answer_hold_nobody_up(running: Local) -> None:
    metadata, names = running.open(2000), [f"n{i}" for i in range(1000)]
    store(metadata, *names)
    store_id = (running.store / STORE_FILE).read_text().splitlines()[1]
    hello = pack(HELLO, 1, [store_id, LABEL.hex()], [2000 * K, 0, 0, 0])
    ask = pack(CALLS.index("lookup"), 2, names, [number(), 1000])
    links = [connected(running) for _ in range(10)]
    for at, link in enumerate(links):
        link.sendall(hello)
        link.recv(HEADER_BYTES, socket.MSG_WAITALL)
        link.setblocking(False)
        try:
            while at % 2 and link.send(ask) == len(ask):
                pass
            link.send(ask[: 1 + 100 * at])
        except BlockingIOError:
            pass
    for _ in range(10):
        assert metadata.exists(names) == [True] * 1000
    for link in links:
        link.close()


def test_more_connections_than_it_keeps_close_the_idle_ones_and_clients_notice_nothing(running: Local) -> None:
    metadata = running.open()
    store(metadata, "a")
    links = [connected(running) for _ in range(MOST_CONNECTIONS + 50)]
    for _ in range(3):
        assert there(metadata, "a") == "a"
    for link in links:
        link.close()


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda rest: b"kvm1" + rest))
def test_any_bytes_are_a_header_or_none(data: bytes) -> None:
    if len(data) >= HEADER_BYTES:
        try:
            header = read_header(data)
            if header.rest_bytes <= len(data) - HEADER_BYTES:
                names, numbers = read_rest(header, data[HEADER_BYTES:])
                assert read_header(pack(header.kind, header.tag, names, numbers)) == header
        except BadCall:
            pass


numbers = st.lists(st.integers(-1, 9) | st.sampled_from([K, 2 * K, 1 << 40, (1 << 63) - 1]) | st.just(K), max_size=9)
words = st.sampled_from(["a", "b", "g-1", "", "..", "a/b", "x" * 201, "\n"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*CALLS, "none"]), st.lists(words, max_size=3), numbers), max_size=20))
@example([("reserve", ["a"], [7, 0, K])])
def test_any_call_is_carried_out_or_none(calls: list[tuple[str, list[str], list[int]]]) -> None:
    table = SlotTable(8 * K, None, (10**15, 0), empty=False)
    for at, (call, names, given_) in enumerate(calls):
        try:
            told = answer(table, LABEL, call, names, given_, float(at))
            assert all(0 <= each < 1 << 63 for each in told)
        except BadCall:
            pass
        audit(table)
