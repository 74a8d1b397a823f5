"""Runs uv with the package index that pip is configured with: uv reads no pip.conf and no PIP_* variable.

    .venv/bin/python tools/uv.py pip install ...

The index is asked of pip at run time and goes to uv in its environment, so it is neither printed nor written down (an
address may contain a password). A variable of uv that is set already is left as it is.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# pip's setting, uv's variable, and what stands between several values of it.
SAME = (
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", " "),
    ("proxy", "ALL_PROXY", " "),
)
SECTIONS = ("global", "install", ":env:")  # the later one wins


def uv_variables(config: str) -> dict[str, str]:
    """The variables that tell uv what the lines of `pip config list` (section.name='value') tell pip."""
    lines = [line.partition("=") for line in config.splitlines()]
    found = {name: ast.literal_eval(value) for name, _, value in lines if value.startswith(("'", '"'))}
    settings: dict[str, str] = {}
    for section in SECTIONS:
        settings |= {name.partition(".")[2]: value for name, value in found.items() if name.startswith(f"{section}.")}
    variables = {uv: between.join(settings[pip].split()) for pip, uv, between in SAME if settings.get(pip)}
    # pip takes the best version of all indexes; uv, unless told, that of the first index that has the package.
    return variables | {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def main() -> None:
    asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    config = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout
    uv = Path(sys.executable).with_name("uv")  # not resolved: a venv's python is a link
    os.execve(uv, [str(uv), *sys.argv[1:]], uv_variables(config) | os.environ)


if __name__ == "__main__":
    main()
