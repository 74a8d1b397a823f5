"""The example of docs/write-a-backend.md, installed as a package as it stands on the page, passes the suite."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from light import light
from packages import installed

from kvarve.errors import ConfigError, StorageError
from kvarve.storage import check_storage, open_storage
from kvarve.testing.suite import LABEL, get, put

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-backend.md").read_text()
BACKEND, TESTS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(POINT,) = re.findall(r'^\[project.entry-points."kvarve.storage"\]\n(\w+ = ".*")$', PAGE, re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("package"), "kvarve_sqlite", POINT.replace('"', ""), BACKEND):
        yield


# The page's backend is above the page's tests, as in one file.
exec(compile(BACKEND, "docs/write-a-backend.md", "exec"))
exec(compile(TESTS, "docs/write-a-backend.md", "exec"))
light(globals()["TestSqliteStorage"])


def test_its_url_opens_it(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite://{tmp_path}/a.db", label=LABEL, description="model A")
    assert put(storage, a=b"1") == [True]
    assert get(storage, "a") == b"1"
    storage.close()
    with pytest.raises(ConfigError, match="name a file"):
        check_storage("sqlite://host", label=LABEL, description="model A")
    with pytest.raises(StorageError, match="unable to open"):
        open_storage(f"sqlite://{tmp_path}/none/a.db", label=LABEL, description="model A")
