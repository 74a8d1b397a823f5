"""Writes a trace of the prompts that come in, for `kvarve plan` and `kvarve simulate`: when, how long, what they share.

A line is Mooncake's, with the size of its blocks. Its ids are hashes under a key that is drawn at the start and kept
nowhere: they tell which prompts of one run begin alike, and nothing of a text. Prompts under different salts share no
id.
"""

import json
import logging
import os
import secrets
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

from kvarve.errors import ConfigError

log = logging.getLogger(__name__)

_LINE_BYTES = 1 << 22


class TraceOut:
    def __init__(self, path: Path, block_tokens: int) -> None:
        """A trace of the same blocks is gone on with. ConfigError: nothing can be written there, or it is another file,
        which stays as it is."""
        cut = False
        try:
            if path.is_file():  # others, such as a pipe, are not read
                with path.open("rb") as before:
                    first = before.readline(_LINE_BYTES)
                    before.seek(-1 if first else 0, os.SEEK_END)
                    cut = before.read(1) not in (b"\n", b"")  # by a full disk or a killed server
                if first and b'"block_tokens": %d}' % block_tokens not in first:
                    raise ConfigError(
                        f"--trace-out: {path}: cannot be written, as it is no trace in blocks of {block_tokens} "
                        "tokens: name a new file"
                    )
            self._file = path.open("a", encoding="utf-8", buffering=1)
            self._file.write("\n" if cut else "")
        except OSError as e:
            raise ConfigError(f"--trace-out: {path}: cannot be written: {e.strerror}") from None
        self._path, self._block_tokens, self._key = path, block_tokens, secrets.token_bytes(32)
        self._start = time.time() - time.monotonic()
        self._lock = threading.Lock()  # lines are in the order of their times

    def add(self, prompts: Iterable[Sequence[int]], salt: str) -> None:
        """Prompts of one request, which begin to be served now. Any thread."""
        rows = [(len(prompt), self._ids(prompt, salt)) for prompt in prompts]
        with self._lock:
            at = round(1000 * (self._start + time.monotonic()), 3)
            try:
                for length, ids in rows:
                    row = {"timestamp": at, "input_length": length, "hash_ids": ids, "block_tokens": self._block_tokens}
                    self._file.write(json.dumps(row) + "\n")
            except (OSError, ValueError) as e:  # full, or closed
                if not self._file.closed:
                    log.warning("--trace-out: %s: ends here: %s", self._path, e)
                self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as e:
            log.warning("--trace-out: %s: %s", self._path, e)

    def _ids(self, prompt: Sequence[int], salt: str) -> list[int]:
        """An id for each whole block, of all tokens up to its end."""
        tokens, last, ids = array("I", prompt), salt.encode(errors="surrogatepass"), []
        for start in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            block = tokens[start : start + self._block_tokens].tobytes()
            last = blake2b(last + block, digest_size=8, key=self._key).digest()
            ids.append(int.from_bytes(last, "little"))
        return ids
