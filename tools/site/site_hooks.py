"""What the site differs in from the pages on disk: a page of the API, and no links to files that it has not."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parents[2] / "docs"
MODULES = ("kvarve", "kvarve.transformers", "kvarve.storage", "kvarve.errors")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    text = "# API reference\n\n" + "".join(f"::: {module}\n\n" for module in MODULES)
    files.append(File.generated(config, "api.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/, or to a folder, become their text; `tests/test_docs.py` checks that they lead
    somewhere."""
    here = (DOCS / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        return link[0] if target.is_relative_to(DOCS) and not target.is_dir() else link[1]

    return LINK.sub(kept, markdown)
