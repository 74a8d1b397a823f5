"""A bucket whose server delays, cuts, refuses and throttles: no wrong byte, and no call beyond its deadline."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from object_servers import KEY, SECRET, Proxy, Rclone, refused

from kvarve.errors import StorageError
from kvarve.storage import Breaker, Storage, deadline, open_storage
from kvarve.storage.base import ANY_NAME
from kvarve.storage.objects import _bucket as bucket
from kvarve.testing.suite import LABEL, get, put

Opened = Callable[..., Storage]


@pytest.fixture
def proxy(rclone: Rclone, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    rclone.place = f"test-{abs(hash(request.node.name))}"
    proxy = Proxy(rclone)
    yield proxy
    proxy.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens storages whose library tries again once at most, so that a test need not wait for its pauses."""
    for name, value in {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket, "RETRIES", 0)
    everything = []

    def make(url: str, *, answers: bool = True) -> Storage:
        everything.append(open_storage(url, label=LABEL, description="model A", answers=answers))
        return everything[-1]

    yield make
    for storage in everything:
        storage.close()


def calls(storage: Storage) -> list[Callable[[], object]]:
    """Calls that need a request."""
    return [
        lambda: storage.exists(["never-seen"]),
        lambda: get(storage, "page"),
        lambda: put(storage, other=b"1"),
        lambda: storage.delete(["page"]),
        storage.drop,
    ]


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "NoSuchBucket", "there is no such bucket"),
        (301, "PermanentRedirect", "the bucket is in another region: give region="),
        (400, "AuthorizationHeaderMalformed", "the bucket is in another region: give region="),
        (403, "AccessDenied", "no permission: it needs s3:ListBucket"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong"),
        (403, "InvalidAccessKeyId", "the credentials are wrong or have expired"),
        (403, "SignatureDoesNotMatch", "the credentials are wrong or have expired"),
        (503, "SlowDown", "it is throttled"),
        (500, "InternalError", "InternalError"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_one_line_when_it_is_opened(proxy, opened, status, code, said, caplog):
    caplog.set_level(logging.DEBUG)
    proxy.fault = refused(status, code)
    with pytest.raises(StorageError) as refusal:
        opened(proxy.url())
    told = str(refusal.value)
    assert told.startswith("s3://bucket/test-")
    assert said in told
    assert code in told or status == 301, "of a redirection the library reads no words"
    assert "\n" not in told and len(told) < 300
    assert SECRET not in told + caplog.text
    assert KEY not in told + caplog.text


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_server_that_refuses_everything_is_trouble_and_one_that_answers_again_is_used_at_once(proxy, opened, status):
    storage = opened(proxy.url())
    put(storage, page=b"1")
    proxy.fault = refused(status, "Whatever")
    for call in calls(storage):
        with pytest.raises(StorageError, match="s3://bucket/test-"):
            call()
    proxy.fault = lambda handler, method: False
    assert (get(storage, "page"), put(storage, other=b"2")) == (b"1", [True])


def test_a_request_that_is_throttled_is_asked_again_after_a_pause(proxy, opened, monkeypatch):
    storage = opened(proxy.url())
    put(storage, page=b"1")
    monkeypatch.setattr(bucket, "RETRIES", 3)
    patient, times = opened(proxy.url()), list[float]()

    def twice(handler, method):
        if method != "GET" or not handler.path.endswith("/page"):
            return False
        times.append(time.monotonic())
        return len(times) <= 2 and refused(503, "SlowDown")(handler, method)

    proxy.fault = twice
    assert get(patient, "page") == b"1"
    assert len(times) == 3
    assert times[1] > times[0]


def test_a_server_that_stands_still_costs_its_callers_their_deadline_and_no_byte_of_their_memory_afterwards(
    proxy, opened
):
    storage = opened(proxy.url(more="&threads=2"))
    data = bytes([7]) * 300_000
    put(storage, page=data)
    arrived, passed = threading.Semaphore(0), threading.Semaphore(0)

    def hangs(handler, method):
        arrived.release()
        proxy.held.wait(60.0)
        passed.release()
        return False

    proxy.fault = hangs
    buffer = memoryview(bytearray(b"." * 300_000))
    tries = [lambda: storage.get(["page"], [buffer]), lambda: put(storage, x=b"1"), lambda: storage.exists(["x", "y"])]
    for call in tries:
        with deadline(0.05), pytest.raises(StorageError, match="answers within"):
            call()
    assert arrived.acquire(timeout=60.0)
    proxy.fault = lambda handler, method: False
    proxy.held.set()
    assert passed.acquire(timeout=60.0)
    again = memoryview(bytearray(300_000))
    assert storage.get(["page"], [again]) == [300_000]
    assert again == data
    assert bytes(buffer) == b"." * 300_000, "the answer came when its caller had left"


def test_a_storage_is_closed_while_its_server_stands_still(proxy, opened):
    storage, said, asked = opened(proxy.url()), list[str](), threading.Event()
    put(storage, page=b"1")
    proxy.fault = lambda handler, method: asked.set() or not proxy.held.wait(60.0)

    def use():
        try:
            get(storage, "page")
        except StorageError as error:
            said.append(str(error))

    user = threading.Thread(target=use)
    user.start()
    assert asked.wait(60.0)
    storage.close()
    user.join(60.0)
    assert "closed" in said[0]


def test_half_an_answer_is_a_miss_and_the_object_stays(proxy, opened):
    storage = opened(proxy.url())
    names, data = [f"page-{i}" for i in range(4)], [memoryview(bytes([i]) * 200_000) for i in range(4)]
    assert storage.put(names, data) == [True] * 4

    def halves(handler, method):
        if method != "GET" or not handler.path.endswith("/page-2"):
            return False
        handler.send_response(200)
        for header in (
            ("Content-Length", "200000"),
            ("ETag", '"x"'),
            ("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT"),
        ):
            handler.send_header(*header)
        handler.end_headers()
        handler.wfile.write(bytes([2]) * 100_000)
        handler.close_connection = True
        return True

    proxy.fault = halves
    buffers = [memoryview(bytearray(200_000)) for _ in names]
    assert storage.get(names, buffers) == [200_000, 200_000, None, 200_000]
    assert [buffers[i] == data[i] for i in (0, 1, 3)] == [True] * 3
    assert storage.counts["failed"] == 1
    with pytest.raises(StorageError):
        storage.get(names[2:3], buffers[:1])
    proxy.fault = lambda handler, method: False
    assert get(storage, "page-2") == bytes(data[2])


def test_an_object_of_which_its_server_has_less_than_it_says_is_too_short(proxy, rclone, opened, monkeypatch):
    monkeypatch.setattr(bucket, "RETRIES", 3)
    storage = opened(proxy.url())
    put(storage, page=bytes([7]) * 20_000)
    rclone.file(storage, "page").write_bytes(b"x" * 5000)
    buffer = memoryview(bytearray(20_000))
    assert storage.get(["page"], [buffer]) != [20_000]
    assert storage.delete(["page"]) == [True]
    assert put(storage, page=bytes([7]) * 20_000) == [True]
    assert get(storage, "page") == bytes([7]) * 20_000


def test_a_breaker_opens_on_a_server_that_is_down_and_closes_when_it_answers(proxy, opened):
    storage = opened(proxy.url())
    put(storage, page=b"1")
    ups = threading.Semaphore(0)
    breaker = Breaker(storage, deadline_s=30.0, changed=ups.release, probe_first_s=0.01)
    assert get(breaker, "page") == b"1"
    proxy.fault = refused(500, "InternalError")
    for _ in range(3):
        with pytest.raises(StorageError):
            get(breaker, "page")
    assert not breaker.up
    assert breaker.get(["page"], [memoryview(bytearray(1))]) == [None], "a miss at no cost"
    proxy.fault = lambda handler, method: False
    while not breaker.up:
        assert ups.acquire(timeout=60.0)
    assert get(breaker, "page") == b"1"
    breaker.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_whatever_the_server_does_no_byte_is_wrong_and_no_call_is_late(proxy, opened, seed, monkeypatch):
    chance = random.Random(seed)
    storage = opened(proxy.url(more="&threads=4"))
    whole = {f"page-{i}": bytes([i + 1]) * 50_000 for i in range(6)}
    views = {name: memoryview(data) for name, data in whole.items()}

    def cut(handler, method):
        handler.close_connection = True
        with suppress(OSError):
            handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 50000\r\nETag: "x"\r\n'[: chance.randrange(60)])
        return True

    def delayed(handler, method):
        proxy.held.wait(chance.random() * 0.02)
        return False

    faults = [refused(500, "InternalError"), refused(503, "SlowDown"), refused(403, "AccessDenied"), cut, delayed]
    proxy.fault = lambda handler, method: chance.random() < 0.4 and chance.choice(faults)(handler, method)
    wrong = late = 0
    for _ in range(30):
        names = chance.sample(sorted(whole), 4)
        start = time.monotonic()
        with suppress(StorageError), deadline(0.5):
            match chance.randrange(4):
                case 0:
                    storage.put(names, [views[name] for name in names])
                case 1:
                    storage.exists(names)
                case 2:
                    storage.delete(names[:1])
                case _:
                    buffers = [memoryview(bytearray(50_000)) for _ in names]
                    sizes = storage.get(names, buffers)
                    for name, size, view in zip(names, sizes, buffers, strict=True):
                        wrong += size is not None and (size != 50_000 or view != views[name])
        late += time.monotonic() - start > 30.0  # the deadline, on a machine that may stand still
    assert (wrong, late) == (0, 0), f"seed {seed}"
    proxy.fault = lambda handler, method: False
    assert storage.put([*whole], [*views.values()]) == [True] * 6
    assert [get(storage, name) for name in whole] == [*whole.values()]


def test_a_server_that_knows_no_create_only_put_stores_all_the_same(proxy, opened):
    conditional = []

    def fault(handler, method):
        if handler.headers.get("If-None-Match") is None:
            return False
        conditional.append(handler.path)
        return refused(501, "NotImplemented")(handler, method)

    storage = opened(proxy.url(more="&threads=1"))
    proxy.fault = fault
    assert put(storage, a=b"1", b=b"2") == [True, True]
    assert (get(storage, "a"), get(storage, "b")) == (b"1", b"2")
    assert len(conditional) <= 2, "it is asked once, and not again"


def test_what_a_server_says_moves_no_terminal_and_a_name_that_looks_like_an_error_is_none(proxy, opened):
    storage = opened(proxy.url("x/NoSuchBucket"))
    assert storage.exists(["NoSuchBucket", "InvalidRange"]) == [False, False]
    assert get(storage, "NoSuchBucket") is None

    def escapes(handler, method):
        handler.send_response(418)
        handler.send_header("Content-Length", "12")
        handler.end_headers()
        handler.wfile.write(b"" if method == "HEAD" else b"\x1b[2J\x1b]0;hi\x07")
        return True

    proxy.fault = escapes
    with pytest.raises(StorageError) as refusal:
        opened(proxy.url())
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "about", [b"[" * 4000, b"\xff", b"[]", b"{}", b'{"description": "\\u001b[2J"}', b"x" * 100_000]
)
def test_what_is_said_of_a_model_may_be_forged(proxy, opened, about):
    storage = opened(proxy.url())
    put(storage, page=b"1")
    key = f"{storage._root}/about.json"
    storage._obstore.put(storage._store, key, about)
    (said,) = storage._bucket.models().values()
    assert said.isprintable()
    assert len(said) <= 400


def test_without_credentials_it_says_so(proxy, opened, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{proxy.endpoint}/169.254.169.254")
    proxy.fault = refused(404, "NotFound")
    with pytest.raises(StorageError, match="there are no credentials: set the variables") as refusal:
        opened(proxy.url())
    assert SECRET not in str(refusal.value)


def test_a_profile_is_read_from_the_file_that_other_tools_read(proxy, opened, monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    file.write_text(f"[work]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n[half]\n{SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONGKEY1")
    with pytest.raises(StorageError, match="it has no keys of the profile 'work'") as refusal:
        opened(proxy.url(more="&profile=work"))
    assert SECRET not in str(refusal.value), "a line that is no setting may be a secret"
    file.write_text(file.read_text().replace(f"[half]\n{SECRET}\n", ""))
    assert put(opened(proxy.url(more="&profile=work")), page=b"1") == [True]
    with pytest.raises(StorageError, match="wrong or have expired"):
        opened(proxy.url())


def test_a_storage_that_need_not_answer_is_opened_and_used_once_it_does(proxy, opened):
    proxy.fault = refused(500, "InternalError")
    storage = opened(proxy.url(), answers=False)
    with pytest.raises(StorageError):
        storage.exists([ANY_NAME])
    proxy.fault = lambda handler, method: False
    assert storage.exists([ANY_NAME]) == [False]
    assert put(storage, page=b"1") == [True]
