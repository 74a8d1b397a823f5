"""What the documentation takes from the code is what the code says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pages_show_the_code_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
