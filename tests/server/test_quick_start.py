"""The three requests of the quick start, to the server that it starts."""

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from servers import serving

from doc_blocks import ROOT, blocks, stored_in

PAGE = "docs/quick-start.md"


def only(answer: Any, shown: Any) -> Any:
    """What is shown of an answer: fields that the page leaves out are left out."""
    if isinstance(shown, dict):
        return {name: only(answer[name], part) for name, part in shown.items()}
    return [*map(only, answer, shown)] if isinstance(shown, list) else answer


@pytest.mark.long
def test_a_miss_a_hit_and_a_hit_after_a_restart_say_what_the_page_shows(tmp_path: Path) -> None:
    (start,) = re.findall(r"kvarve serve (.*)", "".join(blocks(PAGE, "")))
    words = [stored_in(word, tmp_path) for word in shlex.split(start)]
    (curl,) = [shlex.split(block) for block in blocks(PAGE, "") if block.startswith("curl")]
    body, path = (ROOT / curl[-1].removeprefix("@")).read_bytes(), curl[1].removeprefix("http://127.0.0.1:8000")
    miss, hit, after_a_restart = map(json.loads, blocks(PAGE, "json"))
    for expected in ([miss, hit], [after_a_restart]):
        with serving(tmp_path, *words, shape=()) as (process, client):
            for shown in expected:
                answer = client.post(path, content=body, headers={"Content-Type": "application/json"}).json()
                assert only(answer, shown) == shown
                assert answer["usage"]["kvarve"]["reasons"] == shown["usage"]["kvarve"]["reasons"]
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
