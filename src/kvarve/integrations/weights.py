"""Which weights does an engine serve? An answer in seconds from the files that it loads, as its own are out of reach.

Every tensor of a safetensors file is sampled, so that a fine-tuned or quantised model gets another fingerprint, and a
copy of the same files the same one, on any machine. A tensor that is changed only between the samples goes unnoticed.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kvarve.errors import ConfigError

_SAMPLE_BYTES = 256
_TENSORS = 16_384  # of a file that has more, every second, third ... is sampled
_BLOCKS = 512  # sampled of a file of another kind
_HEADER_MOST = 256 << 20
_KINDS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def weights_of(model: str, revision: str | None = None) -> str:
    """The fingerprint (64 hex digits) of the config and weights in a folder, or in the local cache of Hugging Face.

    ConfigError: they are not found on this machine.
    """
    folder = Path(model)
    if not folder.is_dir():
        folder = _cached(model, revision)
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in _KINDS)
        if not files:
            raise _unknown(model, f"there are no weights in {folder}")
        found = hashlib.sha256(b"kvarve-weights/1")
        config = folder / "config.json"
        found.update(config.read_bytes() if config.is_file() else b"")
        for path in files:
            found.update(f"{path.name} {path.stat().st_size}".encode())
            for sample in _samples(path):
                found.update(sample)
    except OSError as e:
        raise _unknown(model, str(e)) from e
    return found.hexdigest()


def _unknown(model: str, why: str) -> ConfigError:
    return ConfigError(
        f'the weights of {model!r} cannot be identified ({why}): set "weights" to a name that changes whenever they do'
    )


def _cached(model: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise _unknown(model, "it is no folder") from None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise _unknown(model, "it is neither a folder nor in the local cache of Hugging Face")
    return Path(found).parent


def _samples(path: Path) -> Iterator[bytes]:
    file = os.open(path, os.O_RDONLY)
    try:
        starts, header = _tensors(file, path)
        yield header
        for start in starts:
            yield os.pread(file, _SAMPLE_BYTES, start)
    finally:
        os.close(file)


def _tensors(file: int, path: Path) -> tuple[list[int], bytes]:
    """Where to sample a file, and its table of contents if it has one: the middle of each tensor."""
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if path.suffix == ".safetensors" and length <= min(_HEADER_MOST, size):
        header = os.pread(file, length, 8)
        try:
            spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
            middles = [8 + length + (int(start) + int(end)) // 2 for start, end in spans]
        except (ValueError, TypeError, KeyError, AttributeError):
            middles = []  # not what its name says
        if middles:
            return middles[:: -(-len(middles) // _TENSORS)], header
    return list(range(0, size, max(1, size // _BLOCKS))), b""
