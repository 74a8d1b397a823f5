"""A server with a file of keys: who is admitted, whose pages are whose, and what is told of them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import settings
from talk import COMPLETIONS, Body, cached, refused

from kvarve.errors import ConfigError
from kvarve.reference.server.keyfile import new_key
from kvarve.reference.server.serve import Server, check_settings

NAMES: dict[str, Body] = {
    "open": {},
    "twin": {},
    "private": {"salt": "mine"},
    "chief": {"admin": True},
}
SECRETS = {name: new_key(name, **about) for name, about in NAMES.items()}
ASK: Body = {"prompt": "hei", "max_tokens": 1}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name][0]}"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("".join(key.line + "\n" for _, key in SECRETS.values()))
    return file


@pytest.fixture(scope="module")
def keyed(checkpoint: Path, file: Path) -> Iterator[Server]:
    logging.getLogger("kvarve").setLevel(logging.INFO)
    with Server(settings(checkpoint, api_keys=file, api_key="flag")) as server:
        yield server


@pytest.fixture(scope="module")
def asker(keyed: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=keyed.url, timeout=60) as client:
        yield client


def test_every_key_of_the_file_and_of_the_flag_is_admitted_and_only_an_admin_key_operates(asker: httpx.Client) -> None:
    for headers in (bearer("open"), bearer("chief"), {"Authorization": "Bearer flag"}):
        assert asker.post(COMPLETIONS, json=ASK, headers=headers).status_code == 200
    for headers in ({}, {"Authorization": "Bearer kvarve-x"}, {"Authorization": f"Bearer {SECRETS['open'][1].sha256}"}):
        refused(asker.post(COMPLETIONS, json=ASK, headers=headers), 401)
    assert asker.get("/admin/storage", headers=bearer("chief")).status_code == 200
    for path in ("/admin/storage", "/flush_cache"):
        assert "admin key" in refused(asker.get(path, headers=bearer("open")), 401)


def test_keys_share_pages_unless_one_has_a_salt(asker: httpx.Client) -> None:
    long = {"prompt": "a story " * 20, "max_tokens": 1}

    def hit(name: str, **more: str) -> bool:
        return bool(cached(asker.post(COMPLETIONS, json=long | more, headers=bearer(name)).json()))

    assert (hit("open"), hit("twin"), hit("private"), hit("private")) == (False, True, False, True)
    forged = '{"key": "mine", "salt": ""}'  # a salt that looks like what the private key's requests get
    assert not hit("open", cache_salt=forged)
    assert not hit("private", cache_salt="own") and hit("private", cache_salt="own")
    assert not hit("open", cache_salt="own")


def test_lines_have_the_name_of_a_key_and_never_the_key(asker: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvarve"):
        asker.post(COMPLETIONS, json=ASK, headers=bearer("open") | {"x-request-id": "one"})
        asker.post("/flush_cache", headers=bearer("chief") | {"x-request-id": "two"})
        asker.post("/flush_cache", headers=bearer("open") | {"x-request-id": "three"})
        asker.get("/health")  # by now the lines before are written
    said = [record.getMessage() for record in caplog.records]
    (one,) = [line for line in said if line.startswith("one: ")]
    assert "one: POST /v1/completions: 200 in " in one and " s, key open, 1 length" in one
    assert any(line.startswith("two: POST /flush_cache by 127.0.0.1 with chief: ") for line in said)
    assert "three: POST /flush_cache by 127.0.0.1: asked: 401" in said
    assert not any(secret in caplog.text or key.sha256 in caplog.text for secret, key in SECRETS.values())


def test_a_server_does_not_start_with_a_file_that_it_cannot_use(checkpoint: Path, tmp_path: Path) -> None:
    bad = tmp_path / "keys.toml"
    with pytest.raises(ConfigError, match=str(bad)):
        check_settings(settings(checkpoint, api_keys=bad))
