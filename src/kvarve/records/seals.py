"""How a record shows that its bytes are those that were sealed: a checksum against accidents, or a tag against people.

A checksum notices what a disk or a network has changed, and anyone can compute one. A tag can only be made with the
storage key, so that records of others are known as such (docs/threat-model.md). It is the AES-256-GCM tag of the header
as plaintext and the payload as associated data, under a random nonce and a key derived for each model. Why this one:
docs/decisions/0017-storage-key.md.
"""

import hashlib
import hmac
import os
import stat
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import xxhash

from kvarve.errors import ConfigError

CHECK_BYTES = 32
KEY_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
_MODEL = slice(32, 64)  # of a header: the fingerprint of its model
Piece = memoryview | bytes


class Seal(Protocol):
    """Makes and verifies the check of a record, in `CHECK_BYTES`; used by several threads. `kind` is in its header."""

    kind: int

    def check(self, header: bytes, *payload: Piece) -> bytes: ...

    def holds(self, found: bytes, header: bytes, *payload: Piece) -> bool:
        """Whether a check belongs to this header and payload."""
        ...


class Checksum:
    """XXH3 of header and payload: the first 8 bytes, little-endian; zeros behind."""

    kind = 1

    def check(self, header: bytes, *payload: Piece) -> bytes:
        digest = xxhash.xxh3_64(header)
        for piece in payload:
            digest.update(piece)
        return digest.intdigest().to_bytes(CHECK_BYTES, "little")

    def holds(self, found: bytes, header: bytes, *payload: Piece) -> bool:
        return found == self.check(header, *payload)


class Tag:
    """A tag under a storage key: 16 bytes of it, the 12 of its nonce, 4 zeros. ConfigError: its library is missing."""

    kind = 2

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        try:
            self._aead = import_module("cryptography.hazmat.primitives.ciphers.aead").AESGCM
            ciphers = import_module("cryptography.hazmat.primitives.ciphers")
        except ImportError as error:
            raise ConfigError(f"a storage key needs cryptography ({error}): install the extra 'storage-key'") from error
        self._cipher, self._aes, self._gcm = ciphers.Cipher, ciphers.algorithms.AES, ciphers.modes.GCM
        # A random nonce is good for 2**32 records of one key, so each model has its own.
        self._of_model = lru_cache(64)(lambda model: hashlib.blake2b(model, key=key, digest_size=KEY_BYTES).digest())

    def check(self, header: bytes, *payload: Piece) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return self._tag(nonce, header, payload) + nonce + bytes(CHECK_BYTES - _TAG_BYTES - _NONCE_BYTES)

    def holds(self, found: bytes, header: bytes, *payload: Piece) -> bool:
        nonce, rest = found[_TAG_BYTES : _TAG_BYTES + _NONCE_BYTES], found[_TAG_BYTES + _NONCE_BYTES :]
        return hmac.compare_digest(found[:_TAG_BYTES], self._tag(nonce, header, payload)) and not any(rest)

    def _tag(self, nonce: bytes, header: bytes, payload: tuple[Piece, ...]) -> bytes:
        key = self._of_model(header[_MODEL])
        if len(payload) == 1:  # in one call, which is faster for small records
            encrypted: bytes = self._aead(key).encrypt(nonce, header, payload[0])
            return encrypted[-_TAG_BYTES:]
        encryptor: Any = self._cipher(self._aes(key), self._gcm(nonce)).encryptor()
        for piece in payload:
            encryptor.authenticate_additional_data(piece)
        encryptor.update(header)
        encryptor.finalize()
        tag: bytes = encryptor.tag
        return tag


CHECKSUM = Checksum()


def seal_of(key_file: Path | str | None) -> Seal:
    """The seal of a storage key, or checksums without one. ConfigError: the file cannot be one; its bytes are not told.

    The file has exactly 32 bytes and belongs to this user or to root, and nobody else may read it.
    """
    if not key_file:
        return CHECKSUM
    where = f"the storage key {str(key_file)!r}"
    try:
        file = os.open(key_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about, key = os.fstat(file), os.read(file, KEY_BYTES + 1)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(about.st_mode) or len(key) != KEY_BYTES:
        how = f"head -c {KEY_BYTES} /dev/urandom"
        raise ConfigError(f"{where} must be a file of {KEY_BYTES} random bytes, such as {how} makes")
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o077:
        raise ConfigError(f"{where} can be read or replaced by other users, and must be for this user alone: chmod 600")
    return Tag(key)
