"""Real servers of S3, processes of their own on loopback: moto and rclone. A proxy in front of one makes faults."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import until

from kvarve.storage.objects._bucket import key_of

SCRIPTS = Path(sys.executable).parent
KEY, SECRET = "ACCESSKEY", "SECRETKEY-THAT-NOBODY-PRINTS"
RCLONE = shutil.which("rclone", path=f"{SCRIPTS}:{os.environ.get('PATH', '')}")


class Server:
    """One server, with an empty bucket named `bucket`."""

    def __init__(self, folder: Path, words: list[str], port: int) -> None:
        self.place = "kvarve"  # the prefix of a test
        self.port, self.endpoint = port, f"http://127.0.0.1:{port}"
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        until(lambda: answers(port) or self.process.poll() is not None, "a server that answers")
        assert self.process.poll() is None, (folder / "log").read_text()[-2000:]

    def url(self, rest: str = "", more: str = "") -> str:
        return f"s3://bucket/{rest or self.place}?endpoint={self.endpoint}{more}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def require(what: object, name: str) -> None:
    """Skip where a server is not installed; where it has to be (KVARVE_TEST_S3=1), that is a failure."""
    if not what or not find_spec("obstore"):
        (pytest.fail if os.environ.get("KVARVE_TEST_S3") == "1" else pytest.skip)(f"there is no {name}, or no obstore")


def moto(folder: Path) -> Server:
    require(find_spec("moto") and find_spec("flask"), "moto")
    server = Server(folder, [sys.executable, "-m", "moto.server", "-p", str(port := free_port())], port)
    urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/bucket", method="PUT")).close()
    return server


class Rclone(Server):
    """Its bucket is a folder, and its objects are files there. It replaces objects, whatever a client asks for."""

    def __init__(self, folder: Path) -> None:
        require(RCLONE, "rclone")
        assert RCLONE is not None
        self.bucket = folder / "objects" / "bucket"
        self.bucket.mkdir(parents=True)
        words = [RCLONE, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--config", "/dev/null"]
        port = free_port()
        super().__init__(folder, [*words, "--addr", f"127.0.0.1:{port}", str(self.bucket.parent)], port)

    def file(self, storage: object, name: str) -> Path:
        """Of an object of a storage."""
        return self.bucket / key_of(name, storage._root)  # type: ignore[attr-defined]


Fault = Callable[[BaseHTTPRequestHandler, str], bool]


class Proxy:
    """Passes requests on to a server. `fault(handler, method)` may answer one itself, and says whether it has.

    `counts`: of requests by method.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.fault: Fault = lambda handler, method: False
        self.counts: Counter[str] = Counter()
        self.held = threading.Event()  # what a request that hangs waits for
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one(self) -> None:
                proxy.counts[self.command] += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if proxy.fault(self, self.command):
                    return
                status, headers, data = proxy.asked(server, self, body)
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                if not any(name.lower() == "content-length" for name, _ in headers):
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  a client that has left
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @staticmethod
    def asked(server: Server, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        link = HTTPConnection("127.0.0.1", server.port, timeout=60.0)
        try:
            link.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                link.putheader(name, value)
            link.endheaders(body or None)
            answer = link.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            link.close()

    def url(self, rest: str = "", more: str = "") -> str:
        return f"s3://bucket/{rest or self.server.place}?endpoint={self.endpoint}{more}"

    def close(self) -> None:
        self.held.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def refused(status: int, code: str) -> Fault:
    """Answers every request with an error as S3 words it."""

    def fault(handler: BaseHTTPRequestHandler, method: str) -> bool:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>words</Message></Error>".encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(b"" if method == "HEAD" else body)
        return True

    return fault


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    server = Rclone(tmp_path_factory.mktemp("objects"))
    yield server
    server.close()
