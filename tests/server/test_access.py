"""Access control: by key, and never for a web page of another site."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import settings
from talk import CHAT, COMPLETIONS, Body, cached, complete, refused

from kvarve.errors import ConfigError
from kvarve.reference.server.serve import Server, check_settings

FLUSH, STORAGE = "/flush_cache", "/admin/storage"
API, ADMIN = "bräda", "gärdsgård"
ASK: Body = {"prompt": "hei", "max_tokens": 1}
# Requests that a browser may send to any site without a preflight.
SIMPLE = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
]
FROM_A_PAGE = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:3000"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[httpx.Client]:
    """A server with both keys."""
    with (
        Server(settings(checkpoint, api_key=API, admin_key=ADMIN)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def test_neither_key_is_the_other(guarded: httpx.Client) -> None:
    assert guarded.get(STORAGE, headers=bearer(ADMIN)).status_code == 200
    assert guarded.post(COMPLETIONS, json=ASK, headers=bearer(API)).status_code == 200
    assert "admin key" in refused(guarded.get(STORAGE, headers=bearer(API)), 401)
    assert "API key" in refused(guarded.post(COMPLETIONS, json=ASK, headers=bearer(ADMIN)), 401)


def test_a_flush_needs_the_admin_key_if_there_is_one(guarded: httpx.Client) -> None:
    complete_it = {"prompt": "x" * 100, "max_tokens": 1}
    guarded.post(COMPLETIONS, json=complete_it, headers=bearer(API))
    assert "wrong admin key" in refused(guarded.post(FLUSH, headers=bearer(API)), 401)
    assert "this needs the admin key" in refused(guarded.post(FLUSH), 401)
    again = guarded.post(COMPLETIONS, json=complete_it, headers=bearer(API)).json()
    assert cached(again) == {"device": 64}
    assert guarded.post(FLUSH, headers=bearer(ADMIN)).json()["flushed_pages"] > 0
    assert cached(guarded.post(COMPLETIONS, json=complete_it, headers=bearer(API)).json()) == {}


WRONG = [b"Bearer kex", ADMIN.encode(), b"Bearer", b"bearer " + ADMIN.encode(), b"Basic x", b"Bearer \xff"]


def test_each_wrong_key_is_refused_and_the_right_one_passes(guarded: httpx.Client) -> None:
    for wrong in WRONG:
        response = guarded.put(STORAGE, headers={b"Authorization": wrong})
        assert "wrong admin key" in refused(response, 401)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "API key" in refused(guarded.get("/v1/models", headers={b"Authorization": wrong}), 401)
    assert guarded.get(STORAGE, headers=bearer(ADMIN)).status_code == 200
    assert guarded.get("/v1/models", headers=bearer(API)).status_code == 200


@pytest.mark.parametrize("own_server", [{"api_key": "k\udcff"}], indirect=True)
def test_a_key_is_the_bytes_that_the_environment_held(own_client: httpx.Client) -> None:
    """Bytes in the environment that are no UTF-8 read as lone surrogates in Python."""
    assert own_client.get("/v1/models", headers={b"Authorization": b"Bearer k\xff"}).status_code == 200
    refused(own_client.get("/v1/models", headers={b"Authorization": b"Bearer k\xfe"}), 401)
    assert "API key" in refused(own_client.post(FLUSH), 401), "without an admin key"
    assert own_client.post(FLUSH, headers={b"Authorization": b"Bearer k\xff"}).status_code == 200


def test_no_page_in_a_browser_flushes_or_operates(client: httpx.Client, guarded: httpx.Client) -> None:
    for headers in FROM_A_PAGE:
        assert "no page" in refused(client.post(FLUSH, headers=headers), 403)
        assert "no page" in refused(client.post(FLUSH, json={"tiers": "host"}, headers=headers), 403)
        with_key = bearer(ADMIN) | {name.encode(): value.encode() for name, value in headers.items()}
        url = {"url": "memory://x?capacity=1GiB"}
        assert "no page" in refused(guarded.put(STORAGE, json=url, headers=with_key), 403)
        assert "no page" in refused(guarded.delete(STORAGE, headers=with_key), 403)


def test_a_flush_in_a_form_that_a_page_could_send_is_refused(client: httpx.Client) -> None:
    for kind in SIMPLE:
        response = client.post(FLUSH, content=b'{"tiers": "host"}', headers={"Content-Type": kind})
        assert "Content-Type: application/json" in refused(response, 415)
        assert refused(client.post(FLUSH, headers={"Content-Type": kind}), 415)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_page_makes_the_model_compute_by_a_form_without_preflight(client: httpx.Client, path: str) -> None:
    asked = b'{"prompt": "hei", "max_tokens": 1, "messages": [{"role": "user", "content": "hei"}]}'
    for kind in (*SIMPLE, None):  # a body without a type needs no preflight either
        for headers in FROM_A_PAGE:
            given = headers | ({"Content-Type": kind} if kind else {})
            assert "no page" in refused(client.post(path, content=asked, headers=given), 403)


def test_a_page_may_ask_what_costs_nothing_and_says_so(client: httpx.Client) -> None:
    """It can read the answer only if it comes from the same site, through a proxy in front of both."""
    for headers in FROM_A_PAGE:
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health", headers=headers).status_code == 200
        assert client.post(COMPLETIONS, json=ASK, headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Sec-Fetch-Site": "none"}], ids=str)
def test_a_client_that_is_no_page_may_flush(client: httpx.Client, headers: Body) -> None:
    for body in ({}, {"json": {"tiers": ["device"]}}, {"content": b""}, {"content": b'{"tiers": "host"}'}):
        assert client.post(FLUSH, headers=headers, **body).status_code == 200, body
    kind = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post(FLUSH, headers=headers | kind, content=b'{"tiers": "host"}').status_code == 200


def test_json_from_a_client_that_is_no_page_may_have_any_content_type(client: httpx.Client) -> None:
    for kind in SIMPLE:  # `curl -d` says that it sends a form
        asked = {"content": b'{"prompt": "hei", "max_tokens": 1}', "headers": {"Content-Type": kind}}
        assert client.post(COMPLETIONS, **asked).status_code == 200  # type: ignore[arg-type]


@pytest.mark.parametrize("own_server", [{"admin_key": ADMIN}], indirect=True)
def test_an_admin_key_alone_guards_the_flush_and_not_the_answers(own_client: httpx.Client) -> None:
    assert complete(own_client, "hei", max_tokens=1)
    refused(own_client.post(FLUSH), 401)
    assert own_client.post(FLUSH, headers=bearer(ADMIN)).status_code == 200


@pytest.mark.parametrize(("keys", "complaint"), [({"admin_key": " "}, "cannot be empty"), ({"admin_key": "b"}, "not")])
def test_an_admin_key_that_protects_nothing_is_refused(checkpoint: Path, keys: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_settings(settings(checkpoint, api_key="b", **keys))
