"""`kvarve storage stat, ls, verify, gc, drop` of a bucket, by listing it. When an object was used is not known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path

from kvarve.errors import StorageError
from kvarve.storage.base import group_of
from kvarve.storage.objects._bucket import PAGE, Bucket, Settings
from kvarve.storage.upkeep import Contents, Inspection, Model, Stored, Upkeep
from kvarve.system.background import WorkerPool


class BucketUpkeep(Upkeep):
    def __init__(self, settings: Settings) -> None:
        self.where, self.capacity_bytes, self.advice = settings.where, settings.capacity_bytes, settings.lifecycle()
        self._settings, self._bucket = settings, Bucket(settings)
        self._objects: dict[bytes, list[Stored]] = {}  # by label, as they were listed

    def contents(self) -> Contents:
        models = []
        for label, description in self._bucket.models().items():
            if not (objects := self._listed(label)):
                continue
            size_bytes = sum(each.size_bytes for each in objects)
            models.append(Model(label, description, Path(self._bucket.root(label)), size_bytes, False, inf))
        return Contents(models, sum(model.file_bytes for model in models), [])

    @contextmanager
    def inspect(self, model: Model) -> Iterator[Inspection]:
        yield _Inspection(self._bucket, model.label, self._listed(model.label), self._settings.threads)

    def collect(self, model: Model) -> dict[str, int]:
        """The oldest of all models go first where there is more than the URL's capacity."""
        ttl_s, capacity_bytes = self._settings.ttl_s, self.capacity_bytes
        labels = {*self._objects, *self._bucket.models()} if capacity_bytes is not None else {model.label}
        found = [(each, label) for label in labels for each in self._listed(label)]
        left_bytes, victims = inf if capacity_bytes is None else capacity_bytes, list[str]()
        for each, label in sorted(found, key=lambda it: it[0].stored_s_ago):
            left_bytes -= each.size_bytes
            if (left_bytes < 0 or each.stored_s_ago > (inf if ttl_s is None else ttl_s)) and label == model.label:
                victims.append(each.name)
        self._delete(model.label, victims)
        return {"expired": len(victims), "damaged_bytes": 0}

    def drop(self, model: Model, group: str) -> int:
        names = [each.name for each in self._listed(model.label) if each.group == group]
        self._delete(model.label, names)
        return len(names)

    def drop_model(self, model: Model, why: str) -> bool:
        """Whether servers use it is not known: they lose their hits, and may store more meanwhile."""
        self._delete(model.label, [each.name for each in self._listed(model.label)])
        self._bucket.forget(model.label)
        return True

    def _listed(self, label: bytes) -> list[Stored]:
        """The objects of a label, the youngest first."""
        if label not in self._objects:
            now, found = datetime.now(UTC), list[Stored]()
            for part in self._bucket.listed(label):
                for each in part:
                    age_s = max(0.0, (now - each.stored).total_seconds())
                    found.append(
                        Stored(each.name, group_of(each.name), each.size_bytes, each.size_bytes, age_s, age_s, 0)
                    )
            self._objects[label] = sorted(found, key=lambda it: it.stored_s_ago)
        return self._objects[label]

    def _delete(self, label: bytes, names: Sequence[str]) -> None:
        if names and self._settings.read_only:
            raise StorageError(f"{self.where}: nothing is removed with read_only=yes")
        gone = {*names}
        for at in range(0, len(names), PAGE):
            self._bucket.delete(label, names[at : at + PAGE])
        self._objects[label] = [each for each in self._listed(label) if each.name not in gone]


class _Inspection(Inspection):
    def __init__(self, bucket: Bucket, label: bytes, objects: list[Stored], threads: int) -> None:
        self._bucket, self._label, self._objects, self._threads = bucket, label, objects, threads
        self.lost: list[str] = []
        self.lost_objects = 0

    def objects(self) -> list[Stored]:
        return self._objects

    def states(self) -> dict[str, int]:
        return {}

    def verify(
        self, intact: Callable[[str, memoryview], bool], tick: Callable[[int, int], None] = lambda read, of: None
    ) -> tuple[int, list[str]]:
        """An object that is gone meanwhile is not damage. StorageError: one cannot be read."""
        read, damaged = list[str](), list[str]()

        def check(each: Stored) -> None:
            data = self._bucket.read(self._label, each.name, each.size_bytes)
            if data is not None:
                (read if intact(each.name, memoryview(data)) else damaged).append(each.name)
            tick(len(read) + len(damaged), len(self._objects))

        pool = WorkerPool(self._threads, "kvarve verifies")
        for future in [pool.run(partial(check, each)) for each in self._objects]:
            future.result()
        return len(read) + len(damaged), sorted(damaged)
