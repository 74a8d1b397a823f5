"""Fingerprints of saved pages, in a file that the engines of a test share."""

from collections.abc import Iterable
from pathlib import Path

Page = tuple[int, str]  # its group, and its key in hex


class Prints:
    """`restored`: pages that were compared. `wrong`: those of them whose bytes were never saved under their key.

    (The same page computed in another batch may differ in its last bits, so a key may have several fingerprints.)
    """

    def __init__(self, file: Path, others: bool = False) -> None:
        """`others`: pages of all files beside this one count as saved, such as those of other ranks."""
        self._file, self._read = file, f"{file.stem}.*" if others else file.name
        self.restored, self.wrong = 0, list[str]()

    def note(self, pages: Iterable[tuple[int, bytes, str]]) -> None:
        """Group, key and fingerprint of pages that are being saved."""
        with self._file.open("a") as out:
            for group, key, digest in pages:
                out.write(f"{group} {key.hex()} {digest}\n")

    def check(self, pages: Iterable[tuple[int, bytes, str]]) -> None:
        """The same of pages that were restored."""
        saved: dict[Page, set[str]] | None = None
        for group, key, digest in pages:
            saved = self._saved() if saved is None else saved
            self.restored += 1
            if digest not in saved.get((group, key.hex()), ()):
                self.wrong.append(f"{group} {key.hex()}")

    def pages(self) -> list[Page]:
        """All that were ever saved."""
        return sorted(self._saved())

    def _saved(self) -> dict[Page, set[str]]:
        saved: dict[Page, set[str]] = {}
        for file in self._file.parent.glob(self._read):
            for line in file.read_text().splitlines():
                group, key, digest = line.split()
                saved.setdefault((int(group), key), set()).add(digest)
        return saved
