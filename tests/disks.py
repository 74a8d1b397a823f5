"""A disk for tests of all folders; those that fail are in storage/file_disks.py. No tests here."""

from kvarve.storage.file.disk import Directory, Disk


class WithoutSync(Disk):
    """A disk without syncs, whose fill level does not count: no power is cut here, and syncs are slow."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, folder: Directory) -> None:
        pass

    def space(self, folder: Directory) -> tuple[int, int]:
        return 1 << 50, 1 << 50
