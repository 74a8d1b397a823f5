"""Pages in Redis: one string per object, which the server evicts and expires by its own rules.

A put is `SET key payload NX PX ttl`, so nothing is replaced. All commands of a call are sent before their answers are
read, except that of a get at most `AHEAD_BYTES` are under way, since the server buffers what is not read yet. In a
cluster each server is asked in turn; of one that is gone all objects are missing, and a call of which every server
failed raises. So it is with keys: one that the server refuses is missing, and a server that refuses every key of a call
has failed.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvarve.errors import StorageError
from kvarve.storage.base import Storage, StorageUsage, check_batch, check_names, check_pieces, check_settings
from kvarve.storage.redis.servers import Server, Servers, Settings
from kvarve.storage.redis.wire import Refused, Wire, command

AHEAD_BYTES = 8 << 20  # of payloads that were asked for and not read yet
_PAGE = 1000  # keys that the server looks at for one answer
_ELSEWHERE = ("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN")  # another server has the key, or none now
T = TypeVar("T")


class RedisStorage(Storage):
    """Objects of one label in a Redis that may have other keys, which are neither seen nor touched."""

    def __init__(self, settings: Settings, label: bytes, description: str) -> None:
        check_settings(1, label)
        self.counts: Counter[str] = Counter()
        self._prefix = b"kvarve:%s:" % hashlib.sha256(label).hexdigest()[:16].encode()  # no special characters of MATCH
        ttl = () if settings.ttl_s is None else (b"PX", b"%d" % max(1, round(1000 * settings.ttl_s)))
        options = (b"NX", *ttl)
        self._set = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
        self._options = b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in options)
        self._servers, self._cluster = Servers(settings), settings.cluster
        self._pid = os.getpid()

    def exists(self, names: Sequence[str]) -> list[bool]:
        return self._count(b"EXISTS", names)

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)

        def ask(wire: Wire, part: Sequence[int]) -> list[int | Refused | None]:
            sizes: list[int | Refused | None] = []
            sent = ahead_bytes = 0
            for at, i in enumerate(part):
                if sent == at or ahead_bytes <= AHEAD_BYTES // 2:
                    first = sent
                    while sent < len(part) and (sent == at or ahead_bytes < AHEAD_BYTES):
                        ahead_bytes += into[part[sent]].nbytes
                        sent += 1
                    wire.send([b"".join(command(b"GET", self._key(names[part[j]])) for j in range(first, sent))])
                sizes.append(self._size(wire, into[i]))
                if wire.closed:  # the rest is asked by another one
                    break
                ahead_bytes -= into[i].nbytes
            return sizes

        return self._each(names, ask)

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        return self.put_pieces(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        check_pieces(names, data)

        def ask(wire: Wire, part: Sequence[int]) -> list[bool | Refused | None]:
            pieces: list[bytes | memoryview] = []
            for i in part:
                key = self._key(names[i])
                pieces.append(b"%s$%d\r\n%s\r\n$%d\r\n" % (self._set, len(key), key, sum(map(len, data[i]))))
                pieces += data[i]
                pieces.append(self._options)
            wire.send(pieces)
            return [self._answer(lambda: wire.done() or True, full=False) for _ in part]

        return [bool(stored) for stored in self._each(names, ask)]

    def touch(self, names: Sequence[str]) -> None:
        self._count(b"TOUCH", names)

    def delete(self, names: Sequence[str]) -> list[bool]:
        return self._count(b"UNLINK", names)

    def drop(self, group: str | None = None) -> int:
        """The server looks through all its keys, whosever they are."""
        check_names([] if group is None else [group])
        self._require_open()
        pattern = self._prefix + (b"*" if group is None else group.encode() + b"-*")
        count, refused = 0, list[Refused]()
        for server, keys in self._keys(pattern):
            with self._servers.wire(server) as wire:
                wire.send([b"".join(command(b"UNLINK", key) for key in keys)])
                answers = [self._answer(wire.number) for _ in keys]
            count += sum(answer for answer in answers if isinstance(answer, int))
            refused += [answer for answer in answers if isinstance(answer, Refused)]
        if refused:
            raise StorageError(f"{refused[0]}: removed {count} objects, and {len(refused)} are still there")
        return count

    def usage(self) -> StorageUsage:
        """Of all that the servers have: how much they may hold, and how many keys they have evicted. What they hold is
        not only ours."""
        self._require_open()
        most = evicted = 0
        for server in self._servers.all():
            with self._servers.wire(server) as wire:
                wire.send([command(b"INFO", b"memory"), command(b"INFO", b"stats")])
                lines = (wire.text() + wire.text()).decode("utf-8", "replace").splitlines()
            told = dict(line.split(":", 1) for line in lines if ":" in line)
            most += int(told.get("maxmemory", 0))
            evicted += int(told.get("evicted_keys", 0))
        return StorageUsage(capacity_bytes=most or None, evicted=evicted)

    def close(self) -> None:
        if os.getpid() == self._pid:  # after a fork the connections are the parent's
            self._servers.close()

    # --- inside

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _keys(self, pattern: bytes) -> Iterator[tuple[Server, list[bytes]]]:
        """Keys, in parts, and the server that has them."""
        for server in self._servers.all():
            cursor: bytes | None = None
            while cursor != b"0":
                with self._servers.wire(server) as wire:
                    wire.send([command(b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", b"%d" % _PAGE)])
                    cursor, keys = wire.page()
                yield server, keys

    def _require_open(self) -> None:
        if self._servers.closed or os.getpid() != self._pid:
            raise StorageError("this storage is closed, or was opened before a fork")

    def _count(self, word: bytes, names: Sequence[str]) -> list[bool]:
        """For each name, whether a command has found its key."""
        check_names(names)

        def ask(wire: Wire, part: Sequence[int]) -> list[bool | Refused | None]:
            wire.send([b"".join(command(word, self._key(names[i])) for i in part)])
            return [self._answer(lambda: wire.number() > 0) for _ in part]

        return [bool(done) for done in self._each(names, ask)]

    def _size(self, wire: Wire, into: memoryview) -> int | Refused | None:
        """The answer of a GET. A value of another type has no byte of an object: it is too short, as its reader sees,
        who deletes it then."""
        answer = self._answer(partial(wire.payload, into))
        if isinstance(answer, Refused) and answer.words.startswith("WRONGTYPE "):
            self.counts["of another type"] += 1
            return 0
        return answer

    def _answer(self, read: Callable[[], T], full: T | None = None) -> T | Refused | None:
        """One answer, which may be a refusal. None, or `full` if the server has no memory left: it has not done what it
        was told to. StorageError: the server is one of a cluster, which the URL does not say."""
        try:
            return read()
        except Refused as refusal:
            if refusal.words.startswith("OOM "):
                self.counts["no space"] += 1
                return full
            if refusal.words.startswith(_ELSEWHERE):
                if not self._cluster:
                    raise StorageError(f"{refusal}: it is a server of a cluster: give its URL cluster=yes") from None
                self.counts["at another server"] += 1
                self._servers.forget_layout()
                return None
            return refusal

    def _each(
        self, names: Sequence[str], ask: Callable[[Wire, Sequence[int]], list[T | Refused | None]]
    ) -> list[T | None]:
        """The answer for each name, of the server that has it. None where that is gone or has refused, unless all are
        or have."""
        self._require_open()
        answers: list[T | None] = [None] * len(names)
        errors: list[StorageError] = []
        parts = self._servers.by_server([self._key(name) for name in names])
        for server, part in parts:
            found: list[T | Refused | None] = []
            try:
                while len(found) < len(part):
                    with self._servers.wire(server) as wire:
                        found += ask(wire, part[len(found) :])
                refusals = [answer for answer in found if isinstance(answer, Refused)]
                if len(refusals) == len(part):
                    raise refusals[0]
            except StorageError as error:
                errors.append(error)
                self._servers.forget_layout()
                self._require_open()
            else:
                self.counts["refused"] += len(refusals)
                for i, answer in zip(part, found, strict=True):
                    answers[i] = None if isinstance(answer, Refused) else answer
        if errors and len(errors) == len(parts):
            raise errors[0]
        self.counts["server gone"] += len(errors)
        return answers
