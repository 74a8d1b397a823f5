"""TLS, the names and pages that a server answers to, and the drain before it ends."""

import socket
import ssl
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import trustme
from servers import held, settings
from talk import COMPLETIONS, Body, complete, events, refused, stream, until

from kvarve.errors import ConfigError
from kvarve.reference.server.middleware import Drain, names_for
from kvarve.reference.server.serve import Server, check_settings

ASK: Body = {"prompt": "hei", "max_tokens": 1}
PAGE = "https://chat.example.com"


def test_a_request_that_is_sized_and_chunked_at_once_is_refused_and_its_connection_closed(server: Server) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    behind = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0)) as client:
        client.sendall(head + behind)
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # until the server has closed it
    assert answer.startswith(b"HTTP/1.1 400 ") and b"two_lengths" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


# --- TLS


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def written(issued: trustme.LeafCert, folder: Path) -> dict[str, Path]:
    chain, key = folder / "cert.pem", folder / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(chain))
    issued.private_key_pem.write_to_path(str(key))
    return {"tls_cert": chain, "tls_key": key}


def trusting(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


def shown_by(server: Server, context: ssl.SSLContext) -> object:
    """The serial number of the certificate that a new connection gets."""
    url = httpx.URL(server.url)
    with httpx.Client(verify=context) as client, client.stream("GET", url.join("/health")) as response:
        link = response.extensions["network_stream"].get_extra_info("ssl_object")
        return link.getpeercert()["serialNumber"]


def test_a_server_with_a_certificate_speaks_https_alone_and_shows_a_renewed_one(
    checkpoint: Path, tmp_path: Path, ca: trustme.CA, song: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, context = written(ca.issue_cert("127.0.0.1"), tmp_path), trusting(ca)
    with Server(settings(checkpoint, **files)) as server, httpx.Client(base_url=server.url, verify=context) as client:
        assert server.url.startswith("https://127.0.0.1:")
        said = "".join(
            each["choices"][0]["text"] for each in stream(client, COMPLETIONS, {"prompt": song, "max_tokens": 3})
        )
        assert said and said == complete(client, song, max_tokens=3)["choices"][0]["text"]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url + "/health")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(server.url.replace("https", "http") + "/health")
        first = shown_by(server, context)
        written(ca.issue_cert("127.0.0.1"), tmp_path)
        assert shown_by(server, context) == first
        server.edge.reload()  # as on SIGHUP
        second = shown_by(server, context)
        assert second != first
        files["tls_key"].write_bytes(b"half of a ke")
        server.edge.reload()
        assert "the certificate stays as it is" in caplog.text and shown_by(server, context) == second
        assert complete(client, song, max_tokens=1), "connections that were open go on"


@pytest.mark.long
def test_a_stranger_that_sends_without_end_over_tls_is_hung_up_on(
    checkpoint: Path, tmp_path: Path, ca: trustme.CA
) -> None:
    files, context = written(ca.issue_cert("127.0.0.1"), tmp_path), trusting(ca)
    with Server(settings(checkpoint, **files)) as server:
        url = httpx.URL(server.url)
        with (
            socket.create_connection((url.host, url.port or 0)) as link,
            context.wrap_socket(link, server_hostname=url.host) as stranger,
        ):
            stranger.sendall(b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
            assert stranger.recv(1 << 16).startswith(b"HTTP/1.1 404 ")
            with pytest.raises(OSError):  # it lingers a second, and reads little
                while True:
                    stranger.sendall(b"x" * 4096)


def test_connections_on_which_tls_never_begins_lock_out_nobody(
    checkpoint: Path, tmp_path: Path, ca: trustme.CA, song: str
) -> None:
    files, context = written(ca.issue_cert("127.0.0.1"), tmp_path), trusting(ca)
    with Server(settings(checkpoint, max_connections=16, **files)) as server, ExitStack() as opened:
        client = opened.enter_context(httpx.Client(base_url=server.url, verify=context))
        at = httpx.URL(server.url)
        silent = [opened.enter_context(socket.create_connection((at.host, at.port or 0))) for _ in range(30)]
        now = until(client, lambda now: now["kvarve_closed_connections_total.crowded"] >= len(silent) - 15)
        assert now["kvarve_connections"] == 16
        assert complete(client, song, max_tokens=1)
        silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not silent[-1].recv(100).startswith(b"HTTP")
        until(client, lambda now: now["kvarve_connections"] == 15)


def test_a_certificate_that_cannot_be_used_is_one_line(checkpoint: Path, tmp_path: Path, ca: trustme.CA) -> None:
    good = written(ca.issue_cert("localhost"), tmp_path)
    (other := tmp_path / "other").mkdir()
    foreign = written(ca.issue_cert("localhost"), other)["tls_key"]
    (tmp_path / "text").write_text("no certificate")
    locked = tmp_path / "locked.pem"
    locked.write_text(
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIBvTBXBgkqhkiG9w0BBQ0wSjApBgkqhkiG9w0BBQwwHAQI\n"
        "-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    for bad, says in (
        ({"tls_key": good["tls_key"]}, "--tls-key needs --tls-cert"),
        ({"tls_cert": tmp_path / "none"}, "none: No such file"),
        ({"tls_cert": good["tls_cert"], "tls_key": tmp_path / "none"}, "--tls-key: .*none: No such file"),
        ({"tls_cert": good["tls_cert"]}, "--tls-key not given: they must be a PEM certificate and its key"),
        ({"tls_cert": tmp_path / "text"}, "must be a PEM certificate"),
        ({"tls_cert": good["tls_cert"], "tls_key": foreign}, "they must belong together"),
        ({"tls_cert": good["tls_cert"], "tls_key": locked}, "must be a PEM certificate and its key"),
    ):
        with pytest.raises(ConfigError, match=says) as refusal:
            check_settings(settings(checkpoint, **bad))
        assert "\n" not in str(refusal.value)


# --- names


def test_a_server_of_this_machine_answers_to_no_name_of_a_web_site(client: httpx.Client) -> None:
    for host in ("127.0.0.1", "localhost", "localhost:8000", "LOCALHOST.", "[::1]:8000", "10.0.0.7:80", ""):
        assert client.post(COMPLETIONS, json=ASK, headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "[evil]", "*", "å"):
        for path in (COMPLETIONS, "/flush_cache", "/nowhere"):
            response = client.post(path, json=ASK, headers={"Host": host.encode()})
            assert "does not answer to the name" in refused(response, 421) and "x-request-id" in response.headers
    refused(client.get("/metrics", headers={"Host": "evil.example"}), 421)


@pytest.mark.parametrize("own_server", [{"allowed_host": ("Llm.example.com", "*.corp.example")}], indirect=True)
def test_names_that_the_operator_gives_are_answered(own_client: httpx.Client) -> None:
    for host in ("llm.example.com:443", "LLM.example.com", "a.corp.example", "a.b.corp.example", "127.0.0.1"):
        assert own_client.get("/v1/models", headers={"Host": host}).status_code == 200, host
    for host in ("example.com", "xllm.example.com", "corp.example", "evilcorp.example"):
        refused(own_client.get("/v1/models", headers={"Host": host}), 421)


def test_which_names_count_depends_on_where_the_server_listens() -> None:
    assert names_for((), "127.0.0.1", "127.0.0.1") == ("127.0.0.1",)
    assert names_for((), "Desk", "127.0.1.1") == ("desk",)
    assert names_for((), "0.0.0.0", "0.0.0.0") is None
    assert names_for(("a",), "::", "::") == ("a",)
    assert names_for(("*",), "127.0.0.1", "127.0.0.1") is None


# --- pages


def preflight(client: httpx.Client, origin: str, path: str = COMPLETIONS) -> httpx.Response:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return client.options(path, headers={"Origin": origin} | asks)


@pytest.mark.parametrize("own_server", [{"cors_origin": (PAGE, "http://localhost:3000")}], indirect=True)
def test_pages_of_a_named_origin_may_ask_and_no_others(own_client: httpx.Client) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        allowed = preflight(own_client, origin)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == origin
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        answer = own_client.post(COMPLETIONS, json=ASK, headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
        bad = own_client.post(COMPLETIONS, json={}, headers={"Origin": origin})
        assert bad.status_code == 400 and bad.headers["access-control-allow-origin"] == origin
    for origin in ("https://evil.example", "null", PAGE + ".evil.example", "http://chat.example.com"):
        assert preflight(own_client, origin).status_code == 400
        answer = own_client.post(COMPLETIONS, json=ASK, headers={"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers
    assert "no page" in refused(own_client.post("/flush_cache", headers={"Origin": PAGE}), 403)


def test_without_an_origin_no_page_gets_a_preflight(client: httpx.Client) -> None:
    response = preflight(client, PAGE)
    assert response.status_code == 405 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"cors_origin": ("*",)}, "must be one origin, not every page of the web"),
        ({"cors_origin": ("https://a.example/",)}, "must be an origin"),
        ({"allowed_host": ("http://a.example",)}, "must be a name"),
        ({"drain_s": -1.0}, "drain_s must be at least 0 and finite, got -1.0"),
        ({"drain_at_least_s": 61.0}, "drain_at_least_s must be from 0 to drain_s, which is 60, got 61.0"),
        ({"max_connections": 0}, "max_connections must be at least 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_start(checkpoint: Path, more: Body, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_settings(settings(checkpoint, **more))


# --- the drain


def test_a_drain_refuses_new_requests_says_so_and_lets_running_ones_end(own_server: Server, song: str) -> None:
    server, left = own_server, list[int]()
    long = {"prompt": song, "max_tokens": 8, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", COMPLETIONS, json=long) as response:
            pieces = events(response)
            next(pieces)
            with held(server.engine):
                assert server.edge.drain.drain(0) == 1, "without patience it says how many are left"
                drain = threading.Thread(target=lambda: left.append(server.edge.drain.drain(60)))
                drain.start()
                health = httpx.get(server.url + "/health")
                assert "draining" in refused(health, 503) and health.headers["connection"] == "close"
                late = httpx.post(server.url + COMPLETIONS, json=ASK)
                assert "draining" in refused(late, 503) and late.headers["retry-after"] == "1"
                assert httpx.get(server.url + "/metrics").status_code == 200
                assert httpx.get(server.url + "/livez").status_code == 200, "it is no reason to restart it"
                assert httpx.get(server.url + "/readyz").status_code == 503
                assert not left, "it waits for the stream"
            last = [each for each in pieces if each["choices"]][-1]
        drain.join()
    assert left == [0] and last["choices"][0]["finish_reason"] == "length"


def test_a_drain_refuses_for_as_long_as_others_may_not_know() -> None:
    """A balancer goes on sending until it has looked again: a closed port would be an error of its client's."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    drain = Drain(lambda: now, sleep)
    assert drain.drain(60, at_least_s=5) == 0 and 5 <= now < 6, "though nothing runs"
    drain.running = {"a request"}
    assert drain.drain(60, at_least_s=5) == 1 and 65 <= now < 67
