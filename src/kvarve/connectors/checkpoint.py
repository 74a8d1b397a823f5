"""Which weights does an engine serve? A fingerprint of the files that it has loaded, as the process that decides has no
weights in memory.

By default a sample is read. Of each safetensors file it has the header, with every tensor's name, type, shape and
place, and up to a block from the middle of every tensor; of any other file its size and a block of every `_STEP_BYTES`.
Another training, another quantisation and another tensor differ in it; an edit of a few rows of one tensor may not.
`whole` reads every byte.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from kvarve.errors import ConfigError

log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOCK_BYTES = 4096
_STEP_BYTES = 1 << 20
_PIECE_BYTES = 1 << 24
_HEADER_MOST = 100_000_000  # bytes of a safetensors header, by its format


Find = Callable[..., str]  # as `huggingface_hub.snapshot_download`


def in_hub_cache(name: str, **more: object) -> str:
    """The folder of a model of the Hugging Face hub in the local cache. OSError or ValueError: it is not there."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise OSError("huggingface_hub is not installed") from error
    return str(snapshot_download(name, **more))


def local_files(
    model: str, revision: str | None = None, cache_dir: str | None = None, find: Find = in_hub_cache
) -> Path:
    """Where a model's files lie: `model` itself if it is a path, else its snapshot in the local cache of the hub.

    ConfigError: they are not on this machine.
    """
    try:
        if (place := Path(model)).exists():
            return place
        return Path(find(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache, or no name of a model
        raise ConfigError(
            f"the weights of {model!r} cannot be found, in a folder or in the local cache of Hugging Face "
            f'({type(error).__name__}): set "weights" to a text that changes whenever they do'
        ) from None


def weights_fingerprint(folder: Path, *, whole: bool = False) -> str:
    """A fingerprint of all files with weights in `folder`, or of `folder` itself if it is one such file.

    ConfigError: there are none, or one cannot be read.
    """
    digest = hashlib.sha256(b"whole" if whole else b"sample")
    try:
        files = _files(folder)
        if not files:
            raise FileNotFoundError("no weights are there")
        for path in files:
            digest.update(b"%b %d " % (os.fsencode(path.name), path.stat().st_size))  # a name is any bytes
            digest.update(_whole(path) if whole else _sample(path))
    except OSError as error:
        raise ConfigError(f'the weights in {folder} cannot be read: {error}; name them in "weights"') from None
    return digest.hexdigest()


def began_ticks(process: int | str) -> int:
    """When a process began, in the system's ticks since it was started. OSError: that is not known here."""
    return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])


def began_s() -> float:
    """When this process began, as files have their times; infinity if that is not known."""
    try:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks("self") / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return math.inf
    return time.time() - age_s


def replaced_since(folder: Path, when_s: float) -> bool:
    """Whether files with weights have been written or put there after this time, so that a process which began then may
    have loaded others. Also says so in the log. False if they cannot be looked at."""
    place = folder.absolute()
    try:
        files = _files(place)
        links = [each for each in (place, *place.parents) if each.is_symlink()]
        times = [each.lstat().st_ctime for each in (*links, *files)] + [each.stat().st_ctime for each in files]
    except OSError:
        return False
    if max(times, default=when_s) <= when_s:
        return False
    log.warning(
        "files in %s are newer than this process, which may have loaded others: pages are found until it ends, and not "
        'afterwards. Set "weights" to a text that changes whenever the weights do, to have them found',
        folder,
    )
    return True


def _files(folder: Path) -> list[Path]:
    """Files only: opening a pipe would wait for its writer."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def _whole(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.digest()


def _sample(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at, size_bytes in _pieces(file, os.fstat(file).st_size):
            digest.update(os.pread(file, size_bytes, at))
    finally:
        os.close(file)
    return digest.digest()


def _pieces(file: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    """Where to read, and how much."""
    header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
    begin = 8 + header_bytes
    try:
        if header_bytes > min(_HEADER_MOST, file_bytes):
            raise ValueError
        tensors = json.loads(os.pread(file, header_bytes, 8))
        places = sorted(_span(each, file_bytes - begin) for name, each in tensors.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no safetensors
        yield from ((at, _BLOCK_BYTES) for at in range(0, file_bytes, _STEP_BYTES))
        yield max(0, file_bytes - _BLOCK_BYTES), _BLOCK_BYTES
        return
    yield 0, begin
    for first, last in places:
        at = first + max(0, last - first - _BLOCK_BYTES) // 2
        yield begin + at, min(_BLOCK_BYTES, last - at)


def _span(tensor: Any, most: int) -> tuple[int, int]:
    """Where a tensor begins and ends. ValueError: not within the file."""
    first, last = tensor["data_offsets"]
    if not isinstance(first, int) or not isinstance(last, int) or not 0 <= first <= last <= most:
        raise ValueError
    return first, last
