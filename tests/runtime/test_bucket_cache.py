"""Caches on a real server of S3: restarts, several at once, a near tier of files, and `kvarve storage` of a bucket."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filling import ALL, LONG, a_config, an_identity, nothing_is_left, prompt, run, settle
from object_servers import KEY, SECRET, Rclone

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cli.main import main
from kvarve.pages.pools import ModelIdentity

OURS, THEIRS = an_identity(), an_identity(weights="w2")


@pytest.fixture
def server(rclone: Rclone, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rclone:
    for name, value in {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    rclone.place = request.node.name
    return rclone


def a_cache(*urls: str, identity: ModelIdentity = OURS) -> PrefixCache:
    return PrefixCache(identity, a_config(storage=urls))


def served(*urls: str, tokens: list[int] = LONG, identity: ModelIdentity = OURS) -> tuple[int, int, int]:
    """A prompt through a cache of its own; its pages from device, host and storage, each compared. None may be bad."""
    cache = a_cache(*urls, identity=identity)
    found = run(cache, tokens)
    settle(cache)
    assert cache.stats()["bad_storage"] == 0
    assert nothing_is_left(cache)
    cache.shutdown()
    return found


def test_pages_in_a_bucket_serve_the_next_cache_and_damaged_ones_are_misses(server):
    assert served(server.url()) == (0, 0, 0)
    assert served(server.url()) == (0, 0, ALL)
    first = sorted(server.bucket.joinpath(server.place).rglob("*.attention.*"))[0]
    first.write_bytes(bytes(first.stat().st_size))
    cache = a_cache(server.url())
    assert run(cache, LONG)[2] < ALL
    settle(cache)
    assert cache.stats()["bad_storage"] == 1
    cache.shutdown()
    assert first.read_bytes().strip(b"\0"), "what was damaged was deleted, computed and stored anew"


def test_files_are_near_and_a_bucket_is_far(server, tmp_path):
    near, far = f"file://{tmp_path}/near?capacity=64MiB&durable=no", server.url()
    other = f"file://{tmp_path}/other?capacity=64MiB&durable=no"
    assert served(near, far) == (0, 0, 0)
    assert served(far) == (0, 0, ALL), "each page went on to the far one, behind the write to the near one"
    assert served(other, far) == (0, 0, ALL), "a server that is new has the pages of the far one"
    assert served(other) == (0, 0, ALL), "which were promoted to its own files"
    server.place += "-empty"
    assert served(other, server.url()) == (0, 0, ALL), "a bucket that lost its pages takes no hit of the near tier"


@pytest.mark.long
def test_two_caches_share_a_bucket_and_a_restarted_one_hits_nearly_all(server):
    """`run` compares every page that a request resumes from with what its tokens say."""
    seed = 7
    chance = random.Random(seed)
    shared = [prompt(8.5, number) for number in range(12)]
    caches = [a_cache(server.url()) for _ in range(2)]
    for number, tokens in enumerate(shared):
        run(caches[number % 2], tokens)
        settle(caches[number % 2])
    caches[0].shutdown()
    caches[0] = a_cache(server.url())
    pages = hits = 0
    for turn in range(36):
        cache = caches[turn % 2]
        if turn == 18:
            caches[1].shutdown()
            caches[1] = a_cache(server.url())
        hits += sum(run(cache if turn != 19 else caches[1], chance.choice(shared)))
        pages += ALL
    assert hits >= 0.9 * pages, f"{hits} of {pages}, seed {seed}"
    for cache in caches:
        settle(cache)
        assert cache.stats()["bad_storage"] == 0
        cache.shutdown()


Say = Callable[..., tuple[int, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run `kvarve storage` with these words: exit code, and standard output or the error. There is no terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def say(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["storage", *map(str, words)])
        out, error = capsys.readouterr()
        assert SECRET not in out + error
        return code, out + error

    return say


def told(said: tuple[int, str], code: int = 0) -> Any:
    assert said[0] == code, said[1]
    return json.loads(said[1])


@pytest.mark.long
def test_a_bucket_is_summarized_verified_and_cleaned_by_the_same_commands_as_a_folder(server, say):
    served(server.url())
    served(server.url(), identity=THEIRS)
    found = told(say("stat", server.url(more="&capacity=1GiB"), "--json", "-"))
    assert found["folder"] == f"s3://bucket/{server.place}"
    assert {model["description"] for model in found["models"]} == {str(OURS), str(THEIRS)}
    objects = {model["fingerprint"]: model["objects"] for model in found["models"]}
    assert objects[OURS.fingerprint().hex()] == objects[THEIRS.fingerprint().hex()] > ALL
    listed = told(say("ls", server.url(), "--json", "-", "--limit", "3"))
    assert len(listed["objects"]) == 3
    assert {each["pool"] for each in listed["objects"]} <= {"attention", "window", "state"}
    assert told(say("verify", server.url(), "--json", "-"))["ok"]
    page = sorted(server.bucket.joinpath(server.place).rglob("*.attention.*"))[0]
    page.write_bytes(bytes(page.stat().st_size))
    verified = told(say("verify", server.url(), "--json", "-"), 1)
    assert [each["name"] for model in verified["models"] for each in model["damaged"]] == [page.name]
    code, said = say("gc", server.url(more="&ttl=7d"))
    assert (code, said.count("nothing to free")) == (0, 2)
    assert "aws s3api put-bucket-lifecycle-configuration --bucket bucket" in said
    theirs = server.bucket / server.place / "theirs"
    theirs.write_bytes(b"theirs")
    freed = told(say("gc", server.url(more="&capacity=16KiB"), "--json", "-"))
    assert sum(model["expired"] for model in freed["models"]) > 0
    left = told(say("stat", server.url(), "--json", "-"))
    assert left["bytes"] <= 16 << 10
    code, said = say("drop", server.url(more="&read_only=yes"), "--all", "--yes")
    assert (code, "read_only=yes" in said) == (2, True)
    assert told(say("drop", server.url(), "--all", "--yes", "--json", "-"))["dropped"]
    assert told(say("stat", server.url(), "--json", "-"))["models"] == []
    assert theirs.read_bytes() == b"theirs"
    code, said = say("stat", f"s3://nobody-has-this/x?endpoint={server.endpoint}")
    assert (code, "there is no such bucket" in said) == (2, True)


@pytest.mark.long
def test_a_group_is_dropped_from_a_bucket_by_its_first_digits(server, say):
    cache = a_cache(server.url())
    run(cache, LONG)
    run(cache, LONG, salt="tenant")
    settle(cache)
    cache.shutdown()
    groups = {each["group"] for each in told(say("stat", server.url(), "--json", "-"))["models"][0]["groups"]}
    assert len(groups) == 2
    gone = told(say("drop", server.url(), "--group", min(groups)[:12], "--yes", "--json", "-"))
    assert gone["objects"] > ALL
    (model,) = told(say("stat", server.url(), "--json", "-"))["models"]
    assert {each["group"] for each in model["groups"]} == {max(groups)}


def test_a_server_cannot_be_reached_from_a_url_without_a_bucket(say, tmp_path: Path):
    code, said = say("stat", "s3://", "--json", "-")
    assert code == 2
    assert "it must name a bucket" in said
