"""Packages with backends, as pip installs them. No tests here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvarve.storage import urls


@contextmanager
def installed(folder: Path, name: str, points: str, source: str) -> Iterator[None]:
    """A package of one module, with its entry points, where this process and its children find it."""
    about = folder / f"{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[kvarve.storage]\n{points}\n")
    (folder / f"{name}.py").write_text(source)
    known = urls._entry_points
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}:{':'.join(path for path in sys.path if path.endswith('src'))}")
        known.cache_clear()
        yield
    known.cache_clear()
    sys.modules.pop(name, None)
