"""What time it is in a file store. Times of objects are ns of it, so that nobody who sets a clock can make them old."""

import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass

from kvarve.storage.disk import Disk

_PAIR = struct.Struct("<16sqqqI")
_LATEST_NS = 1 << 62  # in the year 2116, and far enough from where 64 bits end
_NEAR_NS = 60_000_000_000  # so far the clock may have been behind what is stored: it is written twice as often


@dataclass
class Clock:
    """The age of a store, in ns. It goes on evenly while the store is open, whatever somebody sets the wall clock to.

    What was (boot, time since boot, wall time, store time) together is kept with the store. Within one boot of the
    machine the time since boot alone counts, so all processes agree; after another one the wall clock says for how long
    the store was closed, and if that has gone back, no time has passed. It never goes back. `file`: -1 if there
    is none.
    """

    disk: Disk
    file: int
    _boot: bytes = b""
    _behind_ns: int = 0  # store time at boot
    _led_ns: int = 0  # how far what is stored has moved it

    def __post_init__(self) -> None:
        self._boot = self.disk.boot()
        since_boot, wall = self.disk.since_boot_ns(), self._wall_ns()
        raw = b""
        if self.file >= 0:
            with suppress(OSError):  # what cannot be read says as little as what is damaged
                raw = self.disk.peek(self.file, _PAIR.size, 0)
        now = wall
        if len(raw) == _PAIR.size and zlib.crc32(raw[:-4]) == int.from_bytes(raw[-4:], "little"):
            boot, then_since_boot, then_wall, then, _ = _PAIR.unpack(raw)
            same = boot == self._boot and since_boot >= then_since_boot
            passed = since_boot - then_since_boot if same else max(0, wall - then_wall)
            now = min(max(then, 0) + passed, _LATEST_NS)
        self._behind_ns = now - since_boot

    def _wall_ns(self) -> int:
        return min(max(self.disk.wall_ns(), 0), _LATEST_NS)

    def now_ns(self) -> int:
        return self._behind_ns + self.disk.since_boot_ns()

    def at_least(self, time_ns: int) -> None:
        """Something in the store is from then: what was kept of the clock is older. A minute of that is believed."""
        ahead_ns = min(max(0, time_ns - self.now_ns()), _NEAR_NS - self._led_ns)
        self._behind_ns += ahead_ns
        self._led_ns += ahead_ns

    def save(self) -> None:
        since_boot = self.disk.since_boot_ns()
        plain = _PAIR.pack(self._boot, since_boot, self._wall_ns(), self._behind_ns + since_boot, 0)[:-4]
        self.disk.write(self.file, [plain + zlib.crc32(plain).to_bytes(4, "little")], 0)
