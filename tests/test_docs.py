"""The documentation's tables agree with the code, and its commands do no harm."""

import importlib
import re
import sys
from pathlib import Path

import pytest

import forks

FOLDERS = ("src", "tests", "benchmarks", "tools")
ROOT = Path(__file__).parents[1]
BANNED = ("unless given", "may be told", "is told", "says nothing", "of any make", "of ours", "gets the")
WORDS = 35  # of a sentence; in README 25


@pytest.mark.parametrize("quick", [["--quick"], pytest.param([], marks=pytest.mark.long)])
def test_the_pages_show_the_code_as_it_is(quick: list[str]) -> None:
    done = forks.run(
        [sys.executable, ROOT / "tools" / "docs.py", "--check", *quick],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_table_of_residency_sees_what_one_life_of_the_core_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    residency = importlib.import_module("residency")
    watch = residency.Watch()
    with watch.on():
        watch.live(19)
    assert {event for events in watch.seen.values() for event in events} == {*residency.EVENTS}


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")):
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        lost = [link for link in links if "://" not in link and not (page.parent / link).exists()]
        assert not lost, page


def test_every_file_that_is_named_is_there() -> None:
    """In the documents and in docstrings, by its name or the end of its path; not those of other projects."""
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(ROOT / file[1:] for file in files)]
    for page in pages:
        named = re.findall(r"`(?:python |\.venv/bin/python )?((?!vllm/|sglang/)[\w/]+\.py)\b", page.read_text())
        lost = {name for name in named if not any(file.endswith(f"/{name}") for file in files)}
        assert not lost, page


def test_the_docs_install_from_a_checkout_what_is_needed() -> None:
    """The package index may have another project under our name; the extra `mooncake` is the client library alone."""
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")):
        text = page.read_text()
        assert not re.findall(r"pip install[^`\n]*kvarve\[", text), page
        assert page.name == "CHANGELOG.md" or ".[mooncake]" not in text, page


def test_no_example_names_a_folder_that_all_users_may_write_to() -> None:
    paths = [ROOT / "README.md", ROOT / "Makefile"]
    for folder, kind in (("docs", "*.md"), ("src", "*.py"), ("benchmarks", "*.py")):
        paths += (ROOT / folder).rglob(kind)
    assert len(paths) > 100
    for path in paths:
        for place in ("/var/tmp", "/tmp/", "/dev/shm"):
            assert place not in path.read_text(), path


def prose(page: Path) -> list[str]:
    """The paragraphs and list items of a page in Markdown, without code, tables, headings and the targets of links."""
    text = re.sub(r"(?ms)^```.*?^```$|<!-- from the code.*?<!-- end -->", "", page.read_text())
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(?: {4}|[|#<]).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", text))
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.!?])[\])*_\"']*\s+(?=[\[(*_\"A-Z0-9]|kvarve|vLLM|transformers)", paragraph)


def test_a_sentence_has_one_idea_and_no_phrase_that_says_nobody_does_it() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/concepts/*.md")):
        longest = 25 if page.parent == ROOT else WORDS
        for sentence in (each for part in prose(page) for each in sentences(part)):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            assert len(words) <= longest, f"{page}: {len(words)} words: {sentence}"
            found = [phrase for phrase in BANNED if re.search(rf"\b{phrase}\b", sentence)]
            assert not found, f"{page}: {found}: {sentence}"
