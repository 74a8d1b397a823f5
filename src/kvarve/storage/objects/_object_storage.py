"""Pages in a bucket: one object for each. A question about objects that this process knows of costs no request.

What is wrong with one object is an answer about it: a miss. A call of which every request failed raises. The library
tries again what may pass, for some seconds (`bucket.RETRY_S`), and backs off meanwhile.
"""

import json
import logging
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from kvarve.errors import StorageError
from kvarve.storage.base import (
    ANY_NAME,
    Storage,
    StorageUsage,
    check_batch,
    check_names,
    check_pieces,
    check_settings,
    firsts,
    in_group,
)
from kvarve.storage.objects._bucket import NO_BUCKET, Bucket, Settings, code_of, key_of
from kvarve.storage.objects._calls import Batch, Calls
from kvarve.storage.objects._known import LISTED_MOST, hashed, known_at
from kvarve.system.background import BackgroundCall

log = logging.getLogger(__name__)

LIST_S = 600.0  # from the end of a listing to the next one
T = TypeVar("T")


class ObjectStorage(Storage):
    """Objects of one label in a bucket that may have others, which are neither seen nor touched."""

    def __init__(self, settings: Settings, label: bytes, description: str) -> None:
        check_settings(1, label)
        self.description = description
        self.counts: Counter[str] = Counter()
        self._settings, self._label, self._bucket = settings, label, Bucket(settings)
        self._root = self._bucket.root(label)
        self._obstore, self._store = self._bucket.obstore, self._bucket.store
        self._calls = Calls(settings.threads, settings.where)
        self._known = known_at((*settings.place, label.hex()))
        self._described, self._mode = settings.read_only, "create"
        self._turn = threading.Condition()
        self._deleting: set[str] = set()  # under way, perhaps without their callers: a put of one comes after that
        self._pid, self._closing = os.getpid(), threading.Event()
        self._lister = BackgroundCall("kvarve lists objects", self._list)

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._check(names)
        if [*names] == [ANY_NAME]:  # whether it answers at all
            self._all([0], lambda batch, i: self._bucket.check(self._root))
            return [False]
        known = self._known.has(names)
        asked = [i for i, there in enumerate(known) if not there]
        for i, size in self._all(asked, lambda batch, i: self._head(names[i])).items():
            known[i] = size is not None
        return known

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int | None]:
        check_batch(names, into)
        self._check(names)

        def read(batch: Batch[int | None], i: int) -> int | None:
            result = self._found(names[i], lambda key: self._obstore.get(self._store, key))
            if result is None:
                return None
            size, view = int(result.meta["size"]), into[i]
            if size > view.nbytes:  # another program's: no more of it comes than is wanted
                data = memoryview(next(iter(result.stream(view.nbytes)), b"") if view.nbytes else b"")[: view.nbytes]
            elif (whole := self._whole(result)) is not None:
                data, size = memoryview(whole), len(whole)
            else:
                return 0
            with batch.memory():
                view[: data.nbytes] = data
            return size

        sizes = self._all(range(len(names)), read)
        return [sizes[i] for i in range(len(names))]

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        return self.put_pieces(names, [(view,) for view in data])

    def put_pieces(self, names: Sequence[str], data: Sequence[Sequence[memoryview]]) -> list[bool]:
        check_pieces(names, data)
        self._check(names)
        if self._settings.read_only:
            return [False] * len(names)
        known, first = self._known.has(names), firsts(names)

        def write(batch: Batch[bool | None], i: int) -> bool:
            name = names[i]
            with self._turn:
                self._turn.wait_for(lambda: name not in self._deleting)
            if known[i] and self._head(name) is not None:
                return True
            with batch.memory():
                whole = b"".join(data[i])  # so that no caller who has left changes what is sent
            try:
                self._send(key_of(name, self._root), whole)
            except self._bucket.exists_error:
                self.counts["there already"] += 1
            self._known.tell(name, True)
            return True

        if not self._described and names:
            self._described = True
            about = json.dumps({"description": self.description}).encode()
            self._calls.apart(lambda: self._send(f"{self._root}/about.json", about))
        stored = self._all([*first.values()], write)
        return [bool(stored[first[name]]) for name in names]

    def delete(self, names: Sequence[str]) -> list[bool]:
        self._check(names)

        def remove(batch: Batch[bool | None], i: int) -> bool:
            if self._settings.read_only or self._head(names[i]) is None:
                return False
            with self._removing(batch, names[i : i + 1]):
                self._obstore.delete(self._store, key_of(names[i], self._root))
            return True

        removed = self._all([*firsts(names).values()], remove)
        return [bool(removed.get(i)) for i in range(len(names))]

    def drop(self, group: str | None = None) -> int:
        """Lists all objects of the label. One that its caller leaves stops at the next thousand."""
        self._check([] if group is None else [group])

        def remove(batch: Batch[int | None], i: int) -> int:
            count = 0
            for part in self._bucket.listed(self._label):
                names = [each.name for each in part if in_group(each.name, group)]
                with self._removing(batch, names):
                    self._bucket.delete(self._label, names)
                count += len(names)
            return count

        return 0 if self._settings.read_only else self._all([0], remove)[0] or 0

    def usage(self) -> StorageUsage:
        """What the bucket holds is not known without listing it."""
        self._check([])
        return StorageUsage(capacity_bytes=self._settings.capacity_bytes, read_only=self._settings.read_only or None)

    def close(self) -> None:
        self._closing.set()
        if os.getpid() == self._pid:
            self._calls.close()

    # --- inside

    def _check(self, names: Sequence[str]) -> None:
        check_names(names)
        if os.getpid() != self._pid:  # the library's threads are the parent's
            raise StorageError("this storage is closed, or was opened before a fork")
        self._calls.require_open()

    def _all(self, work: Sequence[int], do: Callable[[Batch[T | None], int], T | None]) -> dict[int, T | None]:
        """An answer for each, None where a request failed, unless all did."""
        answers = self._calls.each(work, do)
        errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
        self.counts["failed"] += len(errors)
        for error in errors:
            if not isinstance(error, (StorageError, *self._bucket.errors)):
                raise error  # a bug
        if errors and len(errors) == len(answers):
            raise errors[0] if isinstance(errors[0], StorageError) else self._bucket.trouble(errors[0])
        return {i: None if isinstance(answer, Exception) else answer for i, answer in answers.items()}

    def _found(self, name: str, ask: Callable[[str], Any]) -> Any:
        """The answer to a question about an object, None if there is no such object."""
        try:
            answer = ask(key_of(name, self._root))
        except FileNotFoundError as error:
            if code_of(error) in NO_BUCKET:
                raise self._bucket.trouble(error) from None
            answer = None
        self._known.tell(name, answer is not None)
        return answer

    def _whole(self, result: Any) -> Any:
        """The bytes of an object. None: the server has less of it than it says, since an answer that was cut off cannot
        be gone on with; its reader finds it too short, and deletes it."""
        try:
            return result.bytes()
        except self._bucket.errors as error:
            if code_of(error) != "InvalidRange":
                raise
            self.counts["cut"] += 1
            return None

    def _head(self, name: str) -> Any:
        return self._found(name, partial(self._obstore.head, self._store))

    @contextmanager
    def _removing(self, batch: Batch[T], names: Sequence[str]) -> Iterator[None]:
        """Left: their caller is gone, and nothing is to be removed."""
        with batch.memory(), self._turn:
            self._deleting.update(names)
        try:
            yield
        finally:
            for name in names:
                self._known.tell(name, False)
            with self._turn:
                self._deleting.difference_update(names)
                self._turn.notify_all()

    def _send(self, key: str, whole: bytes) -> None:
        """Store an object in one request, unless it is there: then the library raises. A server that knows no such
        condition replaces it, by the same bytes."""
        try:
            self._obstore.put(self._store, key, whole, mode=self._mode, use_multipart=False)
        except self._bucket.errors as error:
            if code_of(error) != "NotImplemented" or self._mode != "create":
                raise
            self._mode = "overwrite"
            self._send(key, whole)

    def _list(self) -> None:
        """Learn which objects are there, now and then, for as long as the storage is open."""
        while not self._closing.is_set():
            hashes = array("Q")
            self._known.listing()
            try:
                for part in self._bucket.listed(self._label):
                    hashes.extend(hashed(each.name) for each in part)
                    if self._closing.is_set() or len(hashes) > LISTED_MOST:
                        break
                self._known.listed(hashes)
            except StorageError as error:  # then they are asked for one by one
                log.info("its objects cannot be listed: %s", error)
            self._closing.wait(LIST_S)
