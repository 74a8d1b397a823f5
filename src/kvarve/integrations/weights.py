"""Which weights an engine serves, by the files of a checkpoint: a connector is not shown the weights in memory.

Of each tensor its name, type, shape and some of its bytes count; all bytes of a large checkpoint would take minutes to
read. Training changes a tensor nearly everywhere, so a sample tells one checkpoint from another.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from kvarve.errors import ConfigError

SAMPLE_BYTES = 4096
SAMPLES = 64  # of a file that does not say where its tensors are
HEADER_BYTES = 100 << 20  # of a safetensors file, by its specification
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def weights_of(path: Path) -> str:
    """A fingerprint of a checkpoint (a folder, or one file), 64 hex digits. ConfigError if there are no weights."""
    files = [path] if path.is_file() else []
    for pattern in _PATTERNS:
        files = files or sorted(path.glob(pattern))
    if not files:
        raise ConfigError(f"{path}: no weights to tell this model from others: name them in 'weights'")
    digest = hashlib.sha256()
    try:
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size};".encode())
            with file.open("rb") as stream:
                header, places = _tensors(stream.read(8), stream.read, size)
                digest.update(header)
                for start, length in places or _spread(size):
                    stream.seek(start)
                    digest.update(stream.read(length))
    except OSError as e:
        raise ConfigError(f"{path}: its weights cannot be read: {e}") from e
    return digest.hexdigest()


def _tensors(start: bytes, read: Callable[[int], bytes], size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of a safetensors file, and a place in the middle of each tensor; nothing for another file."""
    length = int.from_bytes(start, "little")
    if not 2 <= length <= min(HEADER_BYTES, size - 8):
        return b"", []
    header = read(length)
    try:
        entries = json.loads(header)
        spans = [entry["data_offsets"] for name, entry in sorted(entries.items()) if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return b"", []
    return header, [_middle(8 + length + begin, 8 + length + end) for begin, end in spans]


def _middle(begin: int, end: int) -> tuple[int, int]:
    length = min(SAMPLE_BYTES, end - begin)
    return begin + (end - begin - length) // 2, length


def _spread(size: int) -> list[tuple[int, int]]:
    return [_middle(size * at // SAMPLES, size * (at + 1) // SAMPLES) for at in range(SAMPLES)]
