"""Tags under a storage key: made and known with the key alone; and what may be a key's file."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarve.errors import ConfigError
from kvarve.records.record import HEADER_BYTES, Stamp, is_keyed, record_bytes, whole
from kvarve.records.seals import CHECK_BYTES, CHECKSUM, Tag, seal_of

pytest.importorskip("cryptography")

MODEL, OTHER_MODEL, PAGE = b"m" * 32, b"o" * 32, b"k" * 32
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
SIZE = 5000


def a_record(seal, model=MODEL, fill=7):
    record = memoryview(bytearray(record_bytes(SIZE)))
    record[HEADER_BYTES : HEADER_BYTES + SIZE] = bytes([fill]) * SIZE
    stamp = Stamp(model, "attention", SIZE, seal=seal)
    stamp.seal(record, PAGE)
    return stamp, record


def test_a_record_that_was_sealed_with_the_key_is_whole_and_no_other_is():
    seals = {"key": Tag(KEY), "other key": Tag(OTHER_KEY), "no key": CHECKSUM}
    for by, seal in seals.items():
        _, record = a_record(seal)
        for reader, theirs in seals.items():
            stamp = Stamp(MODEL, "attention", SIZE, seal=theirs)
            assert stamp.intact(record, PAGE) == whole(record, theirs) == (by == reader), f"{by}, read with {reader}"
        assert is_keyed(record) == (by != "no key")
    assert whole(a_record(Tag(KEY))[1], Tag(bytes(KEY)))


def test_every_byte_is_under_the_tag():
    stamp, record = a_record(Tag(KEY))
    for at in [*range(HEADER_BYTES), HEADER_BYTES, HEADER_BYTES + SIZE - 1, len(record) - 1]:
        record[at] ^= 1
        assert not stamp.intact(record, PAGE), f"byte {at} was changed"
        assert not whole(record, Tag(KEY)), f"byte {at} was changed"
        record[at] ^= 1
    assert stamp.intact(record, PAGE)


def test_a_tag_is_of_its_model_and_two_of_the_same_bytes_differ():
    _, record = a_record(Tag(KEY))
    _, other = a_record(Tag(KEY), OTHER_MODEL)
    check = slice(HEADER_BYTES - CHECK_BYTES, HEADER_BYTES)
    assert bytes(record[check]) != bytes(a_record(Tag(KEY))[1][check]), "a nonce is used once"
    record[32:64], record[check] = other[32:64], record[check]
    assert not whole(record, Tag(KEY))
    assert len({Tag(KEY)._of_model(model) for model in (MODEL, OTHER_MODEL)}) == 2


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_a_payload_has_one_tag_in_however_many_pieces_it_lies(pieces):
    seal, header = Tag(KEY), bytes(range(224))
    check = seal.check(header, *pieces)
    assert len(check) == CHECK_BYTES
    assert seal.holds(check, header, b"".join(pieces))
    assert seal.holds(seal.check(header, b"".join(pieces)), header, *pieces)
    assert not seal.holds(check[:-1] + b"\1", header, *pieces)


# --- the file of a key


def a_file(folder: Path, content: bytes = KEY, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_of_32_bytes_that_is_ours_alone_is_a_key(tmp_path):
    seal = seal_of(a_file(tmp_path))
    assert whole(a_record(Tag(KEY))[1], seal)
    (tmp_path / "link").symlink_to(tmp_path / "key")
    assert whole(a_record(Tag(KEY))[1], seal_of(str(tmp_path / "link")))
    assert seal_of(a_file(tmp_path, mode=0o400)).kind == 2
    assert seal_of(None) is seal_of("") is CHECKSUM


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "must be a file of 32 random bytes, such as head -c 32 /dev/urandom makes"),
        (KEY[:-1], 0o600, "must be a file of 32 random bytes"),
        (KEY + b"\n", 0o600, "must be a file of 32 random bytes"),
        (KEY.hex().encode(), 0o600, "must be a file of 32 random bytes"),
        (KEY, 0o640, "can be read or replaced by other users, .* chmod 600"),
        (KEY, 0o602, "can be read or replaced by other users"),
    ],
)
def test_any_other_file_is_refused_in_one_line_without_its_bytes(tmp_path, content, mode, said):
    with pytest.raises(ConfigError, match=said) as told:
        seal_of(a_file(tmp_path, content, mode))
    assert "\n" not in str(told.value)
    assert str(tmp_path / "key") in str(told.value)
    assert repr(KEY)[2:20] not in str(told.value)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    folder, file = "Is a directory", "must be a file of 32"
    for path, said in (("none", "No such file"), ("pipe", file), (".", folder), ("a\0b", "null byte")):
        with pytest.raises(ConfigError, match=said):
            seal_of(f"{tmp_path}/{path}")
