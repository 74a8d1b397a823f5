"""The systemd unit, the Dockerfile and the compose file say what the code does."""

import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme
import yaml

import forks
from kvarve.cli.main import main
from kvarve.reference.server.serve_settings import Settings

ROOT = Path(__file__).parents[1]
UNIT = (ROOT / "contrib" / "kvarve.service").read_text()
DOCKER = (ROOT / "contrib" / "Dockerfile").read_text()


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_the_unit_starts_a_server_whose_drain_ends_before_systemd_loses_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, command, *words = setting("ExecStart").split()
    assert (program, command) == ("/opt/kvarve/bin/kvarve", "serve")
    config = tmp_path / "serve.toml"
    config.write_text("port = 8001\n")
    assert main(["config", "show", *(str(config) if word.endswith(".toml") else word for word in words)]) == 0
    assert str(config) in "".join(capsys.readouterr().out.split())
    (minutes,) = re.fullmatch(r"(\d+)min", setting("TimeoutStopSec")).groups()  # type: ignore[union-attr]
    assert 60 * int(minutes) > Settings().drain_s + 60
    assert (setting("Type"), setting("KillMode")) == ("notify", "mixed")
    assert setting("ExecReload") == "/bin/kill -HUP $MAINPID"


def test_systemd_understands_the_unit_where_there_is_one(tmp_path: Path) -> None:
    """Without systemd, each line is at least a section, a comment or a setting."""
    assert all(re.fullmatch(r"\[\w+\]|#.*|\w+=.*|", line) for line in UNIT.splitlines())
    if analyze := shutil.which("systemd-analyze"):
        unit = tmp_path / "kvarve.service"
        unit.write_text(UNIT.replace("/opt/kvarve/bin/kvarve", "/bin/true"))
        done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def instructions() -> list[tuple[str, str]]:
    joined = DOCKER.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines]


def test_the_image_has_what_the_build_needs_and_nothing_that_is_not_there() -> None:
    copies = [words for name, words in instructions() if name == "COPY" and "--from" not in words]
    copied = {word for words in copies for word in words.split()[:-1]}
    assert copied == {"requirements.lock", "pyproject.toml", "README.md", "LICENSE", "src"}
    assert all((ROOT / name).exists() for name in copied)
    kept = (ROOT / "contrib" / "Dockerfile.dockerignore").read_text().split()
    assert copied == {line[1:] for line in kept if line.startswith("!")}
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"ARG TORCH={torch}\n" in DOCKER, "the same torch as in the Makefile"
    extras = re.search(r"ARG EXTRAS=(\S+)", DOCKER)
    assert extras and all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras[1].split(","))


def test_the_versions_of_the_lock_become_constraints(tmp_path: Path) -> None:
    (sed,) = [words for name, words in instructions() if name == "RUN" and words.startswith("sed ")]
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    subprocess.run(["sh", "-c", sed], cwd=tmp_path, check=True)
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    assert len(lines) > 50 and all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ;]+( ; .*)?", line) for line in lines)


@pytest.mark.parametrize(("status", "tls"), [(200, False), (503, False), (200, True)])
def test_the_health_check_follows_the_servers_health(tmp_path: Path, status: int, tls: bool) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    (check,) = [words for name, words in instructions() if name == "HEALTHCHECK"]
    python, *argv = json.loads(check[check.index("[") :])
    assert python == "python"
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        environment = {"KVARVE_SERVE_PORT": str(server.server_port)}
        if tls:
            chain, context = tmp_path / "chain.pem", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            trustme.CA().issue_cert("kvarve.example.com").private_key_and_cert_chain_pem.write_to_path(str(chain))
            context.load_cert_chain(chain)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            environment["KVARVE_SERVE_TLS_CERT"] = str(chain)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = forks.run([sys.executable, *argv], env=environment, stderr=subprocess.DEVNULL, check=False)
        server.shutdown()
    assert (done.returncode == 0) == (status == 200)


def test_the_image_listens_where_its_variables_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (variables,) = [words for name, words in instructions() if name == "ENV"]
    for word in variables.split():
        name, _, value = word.partition("=")
        if name.startswith("KVARVE_"):
            monkeypatch.setenv(name, value)
    assert main(["config", "show", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["host"]["value"], shown["port"]["value"]) == ("0.0.0.0", 8000)
    assert "EXPOSE 8000" in DOCKER and 'CMD ["serve"]' in DOCKER


def test_the_compose_file_has_servers_of_one_folder_behind_the_router_of_the_docs() -> None:
    composed = yaml.safe_load((ROOT / "contrib" / "compose.yaml").read_text())
    router, servers = composed["services"].pop("router"), composed["services"]
    first, second = servers.values()
    assert first == second and (ROOT / "contrib" / first["build"]["context"] / first["build"]["dockerfile"]).exists()
    assert first["command"][0] == "serve" and main(["config", "show", *first["command"][1:]]) == 0
    assert int(first["stop_grace_period"].removesuffix("s")) > Settings().drain_s
    assert all(
        name in composed["volumes"] for name in re.findall(r"^(\w+):", "\n".join(first["volumes"]), re.MULTILINE)
    )
    page = (ROOT / "docs" / "several-servers.md").read_text()
    words = router["command"].split()
    urls = words[words.index("--worker-urls") + 1 :][: len(servers)]
    assert urls == [f"http://{name}:8000" for name in servers]
    own = {"--host", "--port", "0.0.0.0", "8000", *urls}
    (documented,) = re.findall(r"^ +(python -m sglang_router(?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert {*words} - own <= {*documented.split()}
    (installed,) = re.findall(r"pip install .*?(sglang-router==\S+)", router["build"]["dockerfile_inline"])
    assert f"pip install {installed}\n" in page and f"\n{installed} " in (ROOT / "requirements.lock").read_text()
