"""The examples of README and of the documentation, as a reader would paste them. No test stands here."""

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page in this language, in their order."""
    fences = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", (ROOT / page).read_text())
    return [code for name, code in fences if name == language]


def command(page: str, begins: str) -> list[str]:
    """The words of the one command of a page that begins so."""
    (found,) = [block[block.index(begins) :] for block in blocks(page, "") if begins in block]
    lexer = shlex.shlex(found.replace("\\\n", " "), posix=True, punctuation_chars="\n")
    lexer.whitespace_split, lexer.whitespace = True, " "
    words = [*lexer]
    return words[: words.index("\n")]


def stored_in(text: str, folder: Path) -> str:
    """The same with its file storages in this folder."""
    return re.sub(r"file://[^?]*\?", f"file://{folder}/pages?", text)


def run(code: str, names: dict[str, Any]) -> None:
    """Run a block after those that have left these names."""
    exec(compile(code, "<docs>", "exec"), names)
