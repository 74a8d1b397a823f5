"""The map of a store that several servers share, in a Redis or Valkey, by plain commands.

    OBJECT   hash    a field for each slot that has the object, so that a slot that has it no more is removed alone
    lease    string  the process that gives an owner's slots, until it has not said so for LEASE_S
    used     list    for an owner: slots of its that others have read

Nothing here is believed: the header of a slot decides. What is lost is written again by the owners.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvarve.errors import ConfigError, StorageError
from kvarve.storage.hf3fs._slot_layout import Extent, Slot, Title, can_be, fits
from kvarve.storage.redis.redis_backend import read_settings
from kvarve.storage.redis.redis_storage import RedisStorage
from kvarve.storage.redis.servers import Settings, library
from kvarve.storage.redis.wire import Refused, Wire, command
from kvarve.storage.urls import parse_url

LEASE_S = 60.0
_MOST_USES = 1 << 16  # of one owner's slots: those before are forgotten
_USES_S = 3600
_TOGETHER = 4096  # commands that are sent before their answers are read
_SLOT = struct.Struct("<QIQQIQQ")
_LEASE = b"%d" % int(1000 * LEASE_S)

_Command = tuple[Any, ...]  # the key, as text; the word, and what follows the key
T = TypeVar("T")


def map_settings(setting: str) -> Settings:
    """Where the server of a map is. ConfigError; nothing is touched."""
    if "@" in setting:
        raise ConfigError("metadata=redis://...: a password cannot stand in a URL: give user= and password_file=")
    if not re.match("rediss?://", setting):
        raise ConfigError(
            f"metadata={setting}: it must be redis://host:6379/0 of a Redis or Valkey that several processes share; "
            "leave it out where one is alone with its store"
        )
    settings = read_settings(parse_url(setting))
    if settings.ttl_s is not None:
        raise ConfigError(f"metadata={setting}: metadata cannot have a ttl")
    library()
    return settings


def packed(slot: Slot) -> bytes:
    return _SLOT.pack(*slot.extent, *slot[1:])


def unpacked(data: bytes) -> Slot | None:
    """None: it is no slot that can be."""
    if len(data) != _SLOT.size:
        return None
    *extent, place, generation, size_bytes = _SLOT.unpack(data)
    slot = Slot(Extent(*extent), place, generation, size_bytes)
    return slot if can_be(slot.extent) and fits(slot) else None


class RedisMap(RedisStorage):
    """`token` names this process. StorageError of every call: the server cannot be reached, or takes nothing more."""

    def __init__(self, settings: Settings, store: str, token: bytes) -> None:
        super().__init__(settings, f"3fs {store}".encode(), "")
        self.token = token

    # --- objects

    def find(self, label: bytes, names: Sequence[str]) -> list[list[Slot]]:
        """All slots that are said to have each object. What cannot be one is removed with what is beside it."""
        keys = [_object(label, name) for name in names]
        told = self._ask([(key, b"HKEYS") for key in keys], _fields)
        found = [[unpacked(field) for field in fields or ()] for fields in told]
        self._ask([(key, b"UNLINK") for key, slots in zip(keys, found, strict=True) if None in slots], Wire.number)
        return [[slot for slot in slots if slot is not None] for slots in found]

    def publish(self, objects: Iterable[Title]) -> None:
        if None in self._ask([(_object(*it[:2]), b"HSET", packed(it.slot), b"") for it in objects], Wire.number):
            raise StorageError("the Redis of this store takes no more entries")

    def withdraw(self, objects: Iterable[Title]) -> None:
        """These are not in their slots."""
        self._ask([(_object(*it[:2]), b"HDEL", packed(it.slot)) for it in objects], Wire.number)

    def tell_used(self, uses: Mapping[int, Sequence[Slot]]) -> None:
        """Tell the owners of these slots; a full list loses its oldest."""
        self._ask([(f"used:{owner:x}", b"RPUSH", *map(packed, slots)) for owner, slots in uses.items()], Wire.number)
        self._ask([(f"used:{owner:x}", b"LTRIM", b"%d" % -_MOST_USES, b"-1") for owner in uses], Wire.done)
        self._ask([(f"used:{owner:x}", b"EXPIRE", b"%d" % _USES_S) for owner in uses], Wire.number)

    def names(self, label: bytes, group: str | None) -> Iterator[list[str]]:
        """Those of a label's objects, or of one of its groups, in parts. The server looks through all its keys."""
        before = self._key(_object(label, ""))
        for _, keys in self._keys(before + (b"*" if group is None else group.encode() + b"-*")):
            yield [key[len(before) :].decode("ascii", "replace") for key in keys]

    # --- owners

    def holders(self, owners: Sequence[int]) -> list[bytes | None]:
        """The process that gives each owner's slots."""
        buffer = memoryview(bytearray(64))
        asked = [(f"lease:{owner:x}", b"GET") for owner in owners]
        return [it or None for it in self._ask(asked, lambda wire: bytes(buffer[: wire.payload(buffer) or 0]))]

    def hold(self, owners: Sequence[int]) -> tuple[set[int], bool]:
        """Of these owners, those whose slots this process gives from now on for LEASE_S, and no other does; and whether
        one of them was nobody's until now. StorageError: it is not known whose they are."""
        words = (b"SET", self.token, b"NX", b"PX", _LEASE)
        taken = self._ask([(f"lease:{owner:x}", *words) for owner in owners], Wire.done)
        holders = dict(zip(owners, self.holders(owners), strict=True))
        mine = {owner for owner, holder in holders.items() if holder == self.token}
        held = self._ask([(f"lease:{owner:x}", b"PEXPIRE", _LEASE) for owner in mine], Wire.number)
        if None in holders.values() or {*held} - {1}:
            raise StorageError("the Redis of this store neither gives a lease nor says whose it is")
        return mine, True in taken

    def let_go(self, owners: Sequence[int]) -> None:
        self._ask([(f"lease:{owner:x}", b"DEL") for owner in self.hold(owners)[0]], Wire.number)

    def used(self, owners: Iterable[int]) -> Iterator[list[Slot]]:
        """The slots of these owners that others have used, in parts. A part is forgotten when the next is asked for."""
        keys = [f"used:{owner:x}" for owner in owners]
        while keys:
            told = self._ask([(key, b"LRANGE", b"0", b"%d" % (_TOGETHER - 1)) for key in keys], Wire.texts)
            yield [slot for some in told for it in some or () if (slot := unpacked(it)) is not None]
            lengths = [(key, len(some)) for key, some in zip(keys, told, strict=True) if some]
            self._ask([(key, b"LTRIM", b"%d" % length, b"-1") for key, length in lengths], Wire.done)
            keys = [key for key, length in lengths if length == _TOGETHER]

    def _ask(self, commands: Sequence[_Command], read: Callable[[Wire], T]) -> list[T | None]:
        """The answer of each command, whose key comes first. None: its server is gone, or has refused it."""
        answers: list[T | None] = []
        for at in range(0, len(commands), _TOGETHER):
            some = commands[at : at + _TOGETHER]

            def ask(wire: Wire, part: Sequence[int], some: Sequence[_Command] = some) -> list[T | Refused | None]:
                wire.send([command(some[i][1], self._key(some[i][0]), *some[i][2:]) for i in part])
                return [self._answer(partial(read, wire)) for _ in part]

            answers += self._each([key for key, *_ in some], ask)
        return answers


def _fields(wire: Wire) -> list[bytes]:
    """Of a hash; an empty one of what is none."""
    try:
        return wire.texts()
    except Refused as refusal:
        if not refusal.words.startswith("WRONGTYPE"):
            raise
        return [b""]


def _object(label: bytes, name: str) -> str:
    return f"{label.hex()[:16]}:{name}"
