"""Compressed records: every bit comes back, and what only claims to be one writes nothing outside of its place."""

import random
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressible import a_record, key, numbers
from kvarve.errors import ConfigError
from kvarve.records.encodings import Broken, codec, decode, encode, expanded, plain_bytes
from kvarve.records.record import BLOCK_BYTES, HEADER_BYTES, record_bytes, whole

pytest.importorskip("zstandard")
pytest.importorskip("lz4")
NAMES = ("zstd", "lz4")
PADDING = 64  # bytes around a target, which have to stay as they are


def encoded(record: memoryview, name: str = "zstd") -> bytearray | None:
    into = memoryview(bytearray(record.nbytes + BLOCK_BYTES))
    size, _ = encode([record], codec(name), into)
    return None if size is None else bytearray(into[:size])


def sure(record: memoryview, name: str = "zstd") -> bytearray:
    found = encoded(record, name)
    assert found is not None
    return found


def decoded(data: bytes | bytearray) -> memoryview | None:
    """The plain record, which is checked to be all that was written; None: it is no encoded one, or a broken one."""
    size = plain_bytes(memoryview(data), len(data))
    if size is None:
        return None
    assert len(data) < size <= 32 * len(data), "no more than this is ever allocated for a record"
    memory = memoryview(bytearray(b"#" * (size + 2 * PADDING)))
    try:
        decode(data, memory[PADDING:-PADDING])
    except Broken:
        return None
    finally:
        assert memory[:PADDING] == memory[-PADDING:] == b"#" * PADDING
    return memory[PADDING:-PADDING]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "zeros"])
@pytest.mark.parametrize("payload_bytes", [7000, 40_000, 1_000_003])
def test_every_bit_of_a_record_comes_back(name: str, kind: str, payload_bytes: int) -> None:
    stamp, record = a_record(kind, payload_bytes)
    data = encoded(record, name)
    if data is None:
        assert (name, kind) != ("zstd", "bfloat16") or payload_bytes < 40_000
        return
    assert len(data) % BLOCK_BYTES == 0 and record.nbytes / 32 <= len(data) < record.nbytes
    found = decoded(data)
    assert found == record and stamp.intact(found, key(0))
    assert not whole(memoryview(data)) and not stamp.intact(memoryview(data), key(0))
    assert expanded(memoryview(data)) == record and expanded(record) is record


def test_bfloat16_takes_less_than_three_quarters_and_noise_is_left_alone() -> None:
    assert len(sure(a_record("bfloat16", 1 << 20)[1])) <= 0.72 * record_bytes(1 << 20)
    assert encoded(a_record("noise")[1]) is None
    assert encoded(a_record("bfloat16", 1000)[1]) is None, "a record of one block has no step to save"


def test_an_encoded_record_has_each_field_where_the_documentation_says() -> None:
    _, record = a_record("bfloat16")
    data = sure(record)
    assert data[130:132] == (1).to_bytes(2, "little") and sure(a_record("zeros")[1], "lz4")[130] == 2
    lengths = struct.unpack_from("<4I", data, 256)
    assert int.from_bytes(data[144:152], "little") == 16 + sum(lengths)
    plain = bytearray(data[:256])
    plain[130:132], plain[144:152] = bytes(2), plain[136:144]
    assert plain == record[:256], "the header is the plain record's otherwise, its check included"
    size = (record.nbytes - 256) // 4
    assert lengths[0] == lengths[2] == size > lengths[1]
    assert data[272 : 272 + size] == bytes(record[256::4]), "a plane of mantissas is not compressed"
    end = 272 + sum(lengths)
    assert not any(data[end:])


@pytest.mark.parametrize("cut", [256, 4096, 12_288])
def test_a_record_in_pieces_is_encoded_as_one_that_is_whole(cut: int) -> None:
    _, record = a_record("bfloat16")
    into = memoryview(bytearray(record.nbytes + BLOCK_BYTES))
    size, _ = encode([record[:cut], record[cut:]], codec("zstd"), into)
    assert into[:size] == sure(record)


# --- what is worth the time


class Counting:
    """Zstandard, which notes how many bytes each call compresses."""

    number = 1

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def compress(self, data: memoryview) -> bytes:
        self.sizes.append(len(data))
        return codec("zstd").compress(data)

    def expand(self, data: memoryview, size: int) -> bytes:
        return codec("zstd").expand(data, size)


def a_record_of(payload: bytes) -> memoryview:
    record = memoryview(bytearray(record_bytes(len(payload))))
    record[256 : 256 + len(payload)] = payload
    return record


def tried(payload: bytes) -> tuple[int | None, list[bool], Counting]:
    """What a record of this payload takes encoded, which of its planes were found to shrink, and what that took."""
    using, record = Counting(), a_record_of(payload)
    size, worth = encode([record], using, memoryview(bytearray(record.nbytes + BLOCK_BYTES)))
    return size, [*worth], using


@pytest.mark.parametrize(("payload_bytes", "sample_bytes"), [(1 << 20, 1 << 14), (40_000, 4096)])
def test_of_noise_a_sample_is_compressed_and_no_more(payload_bytes: int, sample_bytes: int) -> None:
    size, worth, using = tried(numbers("noise", payload_bytes))
    assert size is None and worth == [False] * 4
    assert len(using.sizes) == 4 and all(sample_bytes <= each < 1.01 * sample_bytes for each in using.sizes)


def test_a_plane_of_less_than_two_samples_is_compressed_as_a_whole() -> None:
    _, worth, using = tried(numbers("noise", 20_000))
    assert worth == [True] * 4 and len({*using.sizes}) == 1 and sum(using.sizes) == record_bytes(20_000) - HEADER_BYTES


def test_the_middle_of_a_plane_tells_whether_it_is_compressed() -> None:
    noise, zeros = numbers("noise", 100_000), bytes(100_000)
    size, worth, _ = tried(zeros + noise + zeros)
    assert size is None and worth == [False] * 4
    size, worth, _ = tried(noise + zeros + noise)
    assert size is not None and size < 250_000 and worth == [True] * 4


def test_a_plane_that_shrinks_by_less_than_a_20th_stays_as_it_is() -> None:
    noise = np.frombuffer(numbers("noise", 1 << 20), np.uint8)
    seven_bits, most = tried((noise & 127).tobytes()), tried((noise % 220).tobytes())
    assert seven_bits[0] is not None and seven_bits[1] == [True] * 4
    assert most[:2] == (None, [False] * 4)


# --- hostile bytes


def changed(data: bytearray, at: int, value: bytes) -> bytearray:
    return data[:at] + value + data[at + len(value) :]


def as_record(planes: list[bytes], payload_bytes: int, number: int) -> bytearray:
    """Forged: an encoded record of these planes, as large as one has to be."""
    _, record = a_record("zeros", payload_bytes)
    data = bytearray(record[:256]) + struct.pack("<4I", *map(len, planes)) + b"".join(planes)
    data[130:132], data[144:152] = number.to_bytes(2, "little"), (len(data) - 256).to_bytes(8, "little")
    step = -(-record.nbytes // (32 * 4096)) * 4096
    return data + bytes(-len(data) % step)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_with_any_bit_changed_is_broken_or_fails_its_check(name: str) -> None:
    dice = random.Random(seed := 5)
    stamp, record = a_record("float32", 9000)
    kind = "float32"
    if encoded(record, name) is None:
        stamp, record = a_record("zeros", 9000)
        kind = "zeros"
    data = sure(record, name)
    used = 256 + int.from_bytes(data[144:152], "little")
    for bit in [*range(272 * 8), *(dice.randrange(272 * 8, len(data) * 8) for _ in range(1000))]:
        flipped = changed(data, bit // 8, bytes([data[bit // 8] ^ 1 << bit % 8]))
        found = decoded(flipped)
        if found is None or found.nbytes != record.nbytes:
            continue
        same = found == record
        assert same or not stamp.intact(found, key(0)), f"seed {seed}, {kind}: bit {bit}"
        assert not same or bit // 8 < used, f"a bit of the padding, {bit}, went unnoticed"


def test_what_was_cut_or_grew_is_no_encoded_record() -> None:
    data = sure(a_record("bfloat16")[1])
    for wrong in (data[:-1], data[:-BLOCK_BYTES], data + bytes(BLOCK_BYTES), data[:272], data[:255], bytearray()):
        assert plain_bytes(memoryview(wrong), len(wrong)) is None


def test_lengths_that_lie_are_broken() -> None:
    _, record = a_record("bfloat16")
    data = sure(record)
    size, most = (record.nbytes - 256) // 4, 2**32 - 1
    a, b, c, d = struct.unpack_from("<4I", data, 256)
    for lengths in ((most, b, c, d), (a - 1, b + 1, c, d), (0, 0, 0, 0), (a + 1, b, c, d - 1), (a, b + c, 0, d)):
        assert decoded(changed(data, 256, struct.pack("<4I", *lengths))) is None, f"{lengths} of {size}"
    for at in (136, 144):  # the plain and the stored length
        for value in (0, 1, 8, 2**63, 2**64 - 1):
            assert decoded(changed(data, at, value.to_bytes(8, "little"))) is None
    for at, value in ((130, 3), (130, 255), (132, 1), (8, 3), (12, 255), (0, 0)):
        assert plain_bytes(memoryview(changed(data, at, bytes([value]))), len(data)) is None


def test_a_frame_of_zstd_that_hides_its_length_or_another_one_is_broken() -> None:
    import zstandard

    size = (record_bytes(40_000) - HEADER_BYTES) // 4
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size * 1000))
    right = codec("zstd").compress(bytes(size))
    for bad in (hidden, right + right, right + b"x", right[:-1], b"", b"x" * 40):
        assert decoded(as_record([right, bad, right, right], 40_000, 1)) is None


BOMB = """
import resource, struct, sys
import zstandard
from kvarve.records.encodings import Broken, codec
using = codec("zstd")
payload = zstandard.ZstdCompressor(level=19).compress(bytes(10_000))
magic, blocks = payload[:4], payload[7:]
assert using.expand(magic + bytes([0xE0]) + struct.pack("<Q", 10_000) + blocks, 10_000) == bytes(10_000)
claims = [magic + bytes([0xE0]) + struct.pack("<Q", 1 << 40) + blocks]  # a terabyte, it says
claims.append(magic + bytes([0xC0, 0xA8]) + struct.pack("<Q", 10_000) + blocks)  # its window is 2 GiB
limit = 3 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for claim in claims:
    try:
        using.expand(claim, 10_000)
    except Broken:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_bomb_takes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", BOMB], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 10, "KiB"


@given(st.data())
@settings(max_examples=40)
def test_a_mangled_record_is_a_miss(data: st.DataObject) -> None:
    stamp, record = a_record("zeros" if data.draw(st.booleans()) else "bfloat16", 20_000)
    name = data.draw(st.sampled_from(NAMES))
    found = encoded(record, name)
    mangled = found if found is not None else sure(record)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mangled) - 1) | st.integers(128, 400))
        mangled = changed(mangled, at, data.draw(st.binary(min_size=1, max_size=8)))[: len(mangled)]
    result = decoded(mangled)
    assert result is None or result == record or not stamp.intact(result, key(0))


# --- threads and libraries


@pytest.mark.parametrize(("name", "library"), [("zstd", "zstandard"), ("lz4", "lz4.block")])
def test_a_library_that_is_missing_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    _, record = a_record("zeros")
    data = sure(record, name)
    codec.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"{name} compression needs a library .*: install the extra 'compress'"):
        codec(name)
    with pytest.raises(ConfigError, match="install the extra 'compress'"):
        decoded(data)
