"""The table of a slab: one entry of 256 bytes for each slot. Columns and bytes; no file is known here.

    table   header, entries, zeros up to whole blocks, the header once more as its last 256 bytes
    header  magic 8, format u32, 0 u32, owner u64 (of the label), identity u64, slot bytes u64, slots u64, check u64
    entry   check u64; state u8, 0 u24, generation u32; length u64; stored u64 (ns); name 200, zeros behind; 0 u64;
            used u64 (ns), uses u64

Little-endian. An entry lies within one sector of the disk, so a power cut leaves the old one or the new one; its check,
a checksum with the slab and the row in it, detects damage and misplaced writes. Time and number of uses are outside the
check, as they change with every use: a wrong one costs a miss at most. Checks are computed for a whole table at once,
by numpy. Values are accepted within bounds only: legal names, lengths that fit, counts that can be added to.
"""

import hashlib
import itertools
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvarve.storage.base import LEGAL, is_name
from kvarve.storage.file.disk import BLOCK_BYTES

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

# Whatever changes in a folder so that this version cannot read it changes this number.
_FORMAT = 3
FORMAT = f"kvarve-slabs/{_FORMAT + 1}"
_HEADER = struct.Struct("<8sIIQQQQ")
_MAGIC = b"kvarveSL"
_CHECK_BYTES = 8
SLAB_BYTES = 16 << 30  # of the slots of one slab, at most

ENTRY_BYTES = 256  # and of a header
ENTRY_WORDS = ENTRY_BYTES // 8
NAME_BYTES = 200
_CHECK, _STATE, _LENGTH, _STORED, _NAME, _USED, _USES = 0, 1, 2, 3, 4, 30, 31
_CHECKED = slice(1, _USED)
USED_AT = 8 * _USED  # within the entry; 16 bytes, `STAMP`
STAMP = struct.Struct("<QQ")

# The states of a row. Only the first two are written. In the table a row is FREE also while a call of this process
# fills it, and if its slot could not be written or read: it is RETIRED for this process. BROKEN: the entry fails its
# check, as another process may have half written it, or the disk cannot read it. DUPLICATE: another row has its name.
STATES = ("free", "stored", "reserved", "retired", "broken", "duplicate")
FREE, STORED, RESERVED, RETIRED, BROKEN, DUPLICATE = range(6)

MOST_USES = 1 << 40
_SECOND_NS = 1_000_000_000
_MASK = (1 << 64) - 1


def _odd_numbers(count: int) -> Words:
    """Odd 64-bit numbers with nothing in common (splitmix64), the same for ever."""
    found, state = [], 0
    for _ in range(count):
        state = state + 0x9E3779B97F4A7C15 & _MASK
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        found.append((mixed ^ mixed >> 31) | 1)
    return np.array(found, np.uint64)


_WEIGHTS = _odd_numbers(ENTRY_WORDS)


def _checks(entries: Words, identity: int, rows: Rows) -> Words:
    """The check of each entry in its row of this slab."""
    words = entries[:, _CHECKED]
    total = (words ^ words >> np.uint64(31)) @ _WEIGHTS[_CHECKED]  # modulo 2**64, as everything here
    total += rows.astype(np.uint64) * _WEIGHTS[0] + np.uint64(identity)
    total ^= total >> np.uint64(29)
    total *= _WEIGHTS[_USED]
    return np.asarray(total ^ total >> np.uint64(32), np.uint64)


@dataclass(frozen=True)
class Shape:
    """Number and size of a slab's slots, and the offsets of slots and entries in its two files."""

    slot_bytes: int
    slots: int

    @property
    def table_bytes(self) -> int:
        return -(-ENTRY_BYTES * (self.slots + 2) // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def bytes(self) -> int:
        return self.table_bytes + self.slots_bytes

    @property
    def slots_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def headers_at(self) -> tuple[int, int]:
        return 0, self.table_bytes - ENTRY_BYTES

    def entry_at(self, row: int) -> int:
        return ENTRY_BYTES * (row + 1)

    def slot_at(self, row: int) -> int:
        return row * self.slot_bytes

    @staticmethod
    def within(slot_bytes: int, size_bytes: int) -> "Shape":
        """As many slots as fit into `size_bytes`, perhaps none."""
        slots = max(0, min(size_bytes // (slot_bytes + ENTRY_BYTES), SLAB_BYTES // slot_bytes))
        while slots and Shape(slot_bytes, slots).bytes > size_bytes:
            slots -= 1
        return Shape(slot_bytes, slots)


def slot_bytes_for(size_bytes: int) -> int:
    """The size of the slot for an object of this size."""
    return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES


class Header(NamedTuple):
    """Of a slab. `owner`: the id of its model."""

    owner: int
    identity: int
    shape: Shape

    def packed(self) -> bytes:
        plain = _HEADER.pack(_MAGIC, _FORMAT, 0, self.owner, self.identity, self.shape.slot_bytes, self.shape.slots)
        return plain + hashlib.sha256(plain).digest()[:_CHECK_BYTES]


def read_header(raw: bytes) -> Header | None:
    """None: this is no header, or one of another format, or of an impossible shape."""
    plain, check = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + _CHECK_BYTES]
    if len(check) < _CHECK_BYTES or hashlib.sha256(plain).digest()[:_CHECK_BYTES] != check:
        return None
    magic, format_, _, owner, identity, slot_bytes, slots = _HEADER.unpack(plain)
    if (magic, format_) != (_MAGIC, _FORMAT) or not slots or not slot_bytes or slot_bytes % BLOCK_BYTES:
        return None
    return Header(owner, identity, Shape(slot_bytes, slots)) if slots * slot_bytes <= SLAB_BYTES else None


def owner_of(label: bytes) -> int:
    """The id of a model in the headers of its tables."""
    return int.from_bytes(hashlib.sha256(label).digest()[:8], "little")


@dataclass
class Columns:
    """Some entries side by side. `names` has those of STORED rows only, in their order."""

    state: npt.NDArray[np.uint8]
    generation: npt.NDArray[np.uint32]
    length: Rows
    stored: Rows
    used: Rows
    uses: Rows
    names: list[str]

    def only(self, rows: npt.NDArray[np.bool_]) -> "Columns":
        """Some of these entries."""
        names = list(itertools.compress(self.names, rows[self.state == STORED].tolist()))
        return Columns(names=names, **{column: getattr(self, column)[rows] for column in NUMBERS})


NUMBERS = ("state", "generation", "length", "stored", "used", "uses")  # the columns of numbers


def read_entries(
    raw: bytes | bytearray,
    identity: int,
    first_row: int,
    slot_bytes: int,
    *,
    named: bool = True,
) -> Columns:
    """The entries from `first_row` on. An entry that fails its check is BROKEN, one never written is FREE."""
    entries = np.frombuffer(raw, np.uint64).reshape(-1, ENTRY_WORDS)
    rows = np.arange(first_row, first_row + len(entries))
    whole = entries[:, _CHECK] == _checks(entries, identity, rows)
    state = (entries[:, _STATE] & np.uint64(0xFF)).astype(np.uint8)
    blank = ~whole & (state == FREE)
    blank[blank] = ~entries[blank][:, _CHECKED].any(axis=1)
    length = entries[:, _LENGTH].astype(np.int64)
    whole &= (state <= STORED) & (length >= 0) & (length <= slot_bytes)
    state[~whole] = BROKEN
    state[blank] = FREE
    names = np.ndarray((len(entries),), f"S{NAME_BYTES}", raw, 8 * _NAME, (ENTRY_BYTES,))
    found = names[state == STORED].tolist() if named else []
    if not all(found) or b"".join(found).translate(None, LEGAL) or b"." in found or b".." in found:
        nameless = [not is_name(name.decode("ascii", "replace")) for name in found]
        state[np.flatnonzero(state == STORED)[nameless]] = BROKEN
        found = names[state == STORED].tolist()
    return Columns(
        state,
        (entries[:, _STATE] >> np.uint64(32)).astype(np.uint32),
        length,
        entries[:, _STORED].astype(np.int64),
        entries[:, _USED].astype(np.int64),
        np.minimum(entries[:, _USES], MOST_USES).astype(np.int64),
        b"\n".join(found).decode().split("\n") if found else [],
    )


def count_of_stored(raw: bytes) -> int:
    """How many entries seem to be those of objects, whatever their check."""
    entries = np.frombuffer(raw, np.uint64, len(raw) // ENTRY_BYTES * ENTRY_WORDS).reshape(-1, ENTRY_WORDS)
    return int(((entries[:, _STATE] & np.uint64(0xFF) == STORED) & (entries[:, _NAME] != 0)).sum())


def are_states(raw: bytes, state: npt.NDArray[np.uint8], generation: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    """Which entries have these states and generations, whatever else they have."""
    words = np.frombuffer(raw, np.uint64, len(state) * ENTRY_WORDS)[_STATE::ENTRY_WORDS]
    return np.asarray(words == state_words(state, generation))


def state_words(state: npt.NDArray[np.uint8], generation: npt.NDArray[np.uint32]) -> Words:
    """States and generations as they are written."""
    return np.asarray(state.astype(np.uint64) | generation.astype(np.uint64) << np.uint64(32))


def times(found: Columns, now_ns: int) -> tuple[Rows, Rows]:
    """When objects were stored and used, clipped: not after now, and not used before they were stored."""
    stored = np.where((found.stored < 0) | (found.stored > now_ns), now_ns, found.stored)
    # A second of slack: a call counts up from now, so that the objects that it uses have an order.
    return stored, np.where((found.used < stored) | (found.used > now_ns + _SECOND_NS), stored, found.used)


def write_entries(columns: Columns, identity: int, rows: Rows) -> bytes:
    """The entries for these rows, one behind the other; `columns.names` has one name for each, "" if it has none."""
    entries = np.zeros((len(rows), ENTRY_WORDS), np.uint64)
    entries[:, _STATE] = state_words(columns.state, columns.generation)
    entries[:, _LENGTH] = columns.length
    entries[:, _STORED] = columns.stored
    names = np.ndarray((len(rows),), f"S{NAME_BYTES}", entries, 8 * _NAME, (ENTRY_BYTES,))
    names[:] = [name.encode("ascii") for name in columns.names]
    entries[:, _CHECK] = _checks(entries, identity, rows)
    entries[:, _USED] = columns.used
    entries[:, _USES] = columns.uses
    return entries.tobytes()
