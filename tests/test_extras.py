"""Whoever follows what we write installs what is ours: the package of our name on the index is another's."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_extras_are_installed_from_the_checkout_wherever_we_say_how() -> None:
    written = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    found = {path: text for path in written if "mooncake]" in (text := path.read_text())}
    assert ROOT / "README.md" in found and any(path.suffix == ".py" for path in found)
    assert not [path for path, text in found.items() if "kvarve[" in text]
