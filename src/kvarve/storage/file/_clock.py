"""The clock of a file store, in whose ns objects have their times: setting the wall clock does not expire objects."""

import struct
import zlib
from dataclasses import dataclass

from kvarve.storage.file.disk import Directory, Disk

CLOCK = "clock"  # its file in a model's folder
_PAIR = struct.Struct("<16sqqqI")
_LATEST_NS = 1 << 62  # the year 2116, far from the end of 64 bits
_NEAR_NS = 60_000_000_000  # how far the saved clock may be behind stored objects: it is saved twice as often


@dataclass
class Clock:
    """The age of a store, in ns. It never goes back, and runs evenly while the store is open, whatever the wall clock.

    The store saves (boot, time since boot, wall time, store time) at one moment. Within one boot of the machine only
    the time since boot counts, so all processes agree; after a reboot the wall clock tells how long the store was
    closed, and if it has gone back, no time has passed. `file`: -1 if there is none.
    """

    disk: Disk
    file: int
    damaged: bool = False  # what was saved cannot be read: the wall clock counts from now on
    _boot: bytes = b""
    _behind_ns: int = 0  # store time at boot
    _led_ns: int = 0  # how far times of stored objects have advanced it

    def __post_init__(self) -> None:
        self._boot = self.disk.boot()
        since_boot, wall = self.disk.since_boot_ns(), self._wall_ns()
        raw = b""
        if self.file >= 0:
            try:
                raw = self.disk.peek(self.file, _PAIR.size, 0)
            except OSError:
                raw = b"unreadable"
        now = wall
        if len(raw) == _PAIR.size and zlib.crc32(raw[:-4]) == int.from_bytes(raw[-4:], "little"):
            boot, then_since_boot, then_wall, then, _ = _PAIR.unpack(raw)
            same = boot == self._boot and since_boot >= then_since_boot
            passed = since_boot - then_since_boot if same else max(0, wall - then_wall)
            now = min(max(then, 0) + passed, _LATEST_NS)
        else:
            self.damaged = bool(raw.strip(b"\0"))
        self._behind_ns = now - since_boot

    def _wall_ns(self) -> int:
        return min(max(self.disk.wall_ns(), 0), _LATEST_NS)

    def now_ns(self) -> int:
        return self._behind_ns + self.disk.since_boot_ns()

    def at_least(self, time_ns: int) -> None:
        """Advance to the time of a stored object, as the saved clock is older; by a minute in all at most."""
        ahead_ns = min(max(0, time_ns - self.now_ns()), _NEAR_NS - self._led_ns)
        self._behind_ns += ahead_ns
        self._led_ns += ahead_ns

    def save(self) -> None:
        since_boot = self.disk.since_boot_ns()
        plain = _PAIR.pack(self._boot, since_boot, self._wall_ns(), self._behind_ns + since_boot, 0)[:-4]
        self.disk.write(self.file, [plain + zlib.crc32(plain).to_bytes(4, "little")], 0)


def read_clock(disk: Disk, folder: Directory) -> Clock:
    """The clock of a model; nothing is written, and it may have none."""
    try:
        with disk.reading(folder, CLOCK) as file:
            return Clock(disk, file)
    except OSError:
        return Clock(disk, -1)
