"""The dashboard, the alerts and the runbook speak of metrics that a server has, in queries that can be read."""

import json
import re
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from talk import complete

DOCS = Path(__file__).parents[2] / "docs"
WORDS = re.compile(r"\bkvarve_\w+")


def alerts() -> list[dict[str, str]]:
    groups = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return shown + [rule["expr"] for rule in alerts()]


def series(client: httpx.Client) -> set[str]:
    text = client.get("/metrics").text
    found = set()
    for family in text_string_to_metric_families(text):
        found |= {sample.name for sample in family.samples}
        if not family.samples:  # nothing of the kind has happened yet
            found.add(family.name + "_total" * (family.type == "counter"))
    return found


def test_every_query_is_about_a_metric_that_a_server_has(client: httpx.Client, song: str, salt: str) -> None:
    complete(client, song * 3, cache_salt=salt, max_tokens=4)
    assert client.get("/nowhere").status_code == 404
    known, asked = series(client), [name for query in queries() for name in WORDS.findall(query)]
    assert len(asked) > 40
    assert not {*asked} - known
    runbook = WORDS.findall((DOCS / "runbook.md").read_text())
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known}
    assert len(runbook) > 20
    assert not {re.sub("_total$", "", name) for name in runbook} - families


def test_every_alert_has_its_section_in_the_runbook() -> None:
    sections = re.findall(r"^## (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in alerts()] == sections
    for rule in alerts():
        annotations = dict(rule["annotations"])  # type: ignore[arg-type]
        assert annotations["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert annotations["summary"]
