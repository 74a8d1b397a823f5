"""What stands in examples/ runs, as far as it goes without engines and images."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import forks
from doc_blocks import ROOT, command
from kvarve.cli.main import main
from kvarve.reference.engine.model import BUILTIN
from kvarve.reference.server.serve_settings import Settings

EXAMPLES = ROOT / "examples"
COMPOSE = EXAMPLES / "compose"


def loaded(file: str) -> Any:
    return yaml.safe_load((COMPOSE / file).read_text())


@pytest.mark.parametrize(("script", "begins"), [("vllm.sh", "vllm serve"), ("sglang.sh", "python -m sglang.launch")])
def test_the_scripts_of_engines_have_the_command_of_readme(script: str, begins: str, tmp_path: Path) -> None:
    """Which `make test-engines` runs. A program in the engine's place says what it has been given."""
    engine = tmp_path / begins.split(maxsplit=1)[0]
    engine.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'import sys; print(sys.argv[1:])' \"$@\"\n")
    engine.chmod(0o755)
    run = ["sh", str(EXAMPLES / script), "MODEL", "--port", "7"]
    said = subprocess.run(run, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    _, *words = command("README.md", begins)
    words = ["MODEL" if "/" in word and "{" not in word else word for word in words]
    assert said.stdout.strip() == str([*words, "--port", "7"])


@pytest.mark.long
def test_the_second_question_about_a_document_finds_it_cached(tmp_path: Path) -> None:
    run = [sys.executable, EXAMPLES / "generate.py", BUILTIN / "tiny-hybrid", f"file://{tmp_path}/pages?capacity=1GiB"]
    for first in (False, True):
        said = forks.run(run, capture_output=True, text=True, check=True).stdout
        found = [int(count) > 0 for count in re.findall(r"^(\d+) of \d+ tokens cached", said, re.MULTILINE)]
        assert found == [first, True, True]


def test_the_services_find_each_other_and_each_file_that_they_mount() -> None:
    services = loaded("compose.yaml")["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in loaded("compose.yaml")["volumes"] or (COMPOSE / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to this machine alone"
    listens = {f"{name}:{service['ports'][0].rpartition(':')[2]}" for name, service in services.items()}
    (job,) = loaded("prometheus.yml")["scrape_configs"]
    (source,) = loaded("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (provider,) = loaded("grafana/provisioning/dashboards/kvarve.yaml")["providers"]
    assert {*job["static_configs"][0]["targets"], source["url"].removeprefix("http://")} < listens
    mounted = {volume.split(":")[1] for service in services.values() for volume in service["volumes"]}
    (rules,) = loaded("prometheus.yml")["rule_files"]
    assert {f"/etc/prometheus/{rules}", f"{provider['options']['path']}/kvarve.json"} < mounted


def test_the_server_of_the_compose_file_takes_its_options() -> None:
    server = loaded("compose.yaml")["services"]["kvarve"]
    assert (COMPOSE / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    assert server["command"][0] == "serve" and main(["config", "show", *server["command"][1:]]) == 0
    assert int(server["stop_grace_period"].removesuffix("s")) > Settings().drain_s
