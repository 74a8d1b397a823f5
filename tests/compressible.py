"""Records like those of a model: their exponents are alike, their mantissas are noise. No tests here."""

import numpy as np

from kvarve.records.record import HEADER_BYTES, Stamp, record_bytes
from kvarve.records.seals import CHECKSUM, Seal

MODEL = b"m" * 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def numbers(kind: str, nbytes: int, seed: int = 0) -> bytes:
    """So many bytes of "bfloat16", "float32", "noise" or "zeros"."""
    dice = np.random.default_rng(seed)
    if kind == "zeros":
        return bytes(nbytes)
    if kind == "noise":
        return dice.bytes(nbytes)
    normal = np.frombuffer(dice.standard_normal(nbytes // 2 + 2).astype("<f4").tobytes(), np.uint8)
    width = normal.reshape(-1, 4)[:, 2:] if kind == "bfloat16" else normal
    return width.tobytes()[:nbytes]


def a_record(
    kind: str, payload_bytes: int = 40_000, number: int = 0, pool: str = "attention", seal: Seal = CHECKSUM
) -> tuple[Stamp, memoryview]:
    """A sealed record in memory of its own, and its stamp; its key is `key(number)`."""
    record = memoryview(bytearray(record_bytes(payload_bytes)))
    record[HEADER_BYTES : HEADER_BYTES + payload_bytes] = numbers(kind, payload_bytes, number)
    stamp = Stamp(MODEL, pool, payload_bytes, seal=seal)
    stamp.seal(record, key(number))
    return stamp, record
