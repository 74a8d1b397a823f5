"""A password in a URL is printed nowhere: not in errors, logs, states of the server, or the repr of what holds it."""

import pytest

from kvarve.cache.config import CacheConfig
from kvarve.connectors.engine_settings import HiCacheSettings, TierSettings
from kvarve.errors import ConfigError
from kvarve.reference.server.serve_settings import Settings
from kvarve.storage import Backend, MemoryStorage, check_storage
from kvarve.storage.urls import parse_url, shown
from kvarve.testing.suite import LABEL
from plugged import plug_in

SECRET = "hunter2"


@pytest.fixture(autouse=True)
def vault(monkeypatch):
    plug_in(monkeypatch, "vault", lambda label, it: MemoryStorage(100, label, it))
    monkeypatch.setattr(Backend, "secrets", True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("vault://me:hunter2@host:1/0?capacity=1", "vault://***@host:1/0?capacity=1"),
        ("vault://me:hun@ter2@host", "vault://***@host"),
        ("vault://me:hunter2/3@host", "vault://***@host"),
        ("vault://me:hunter2?3@host", "vault://***@host"),
        ("me:hunter2@host", "***@host"),
        ("vault://host?password=hunter2&capacity=1", "vault://host?password=***&capacity=1"),
        ("file:///data/a@b?capacity=1GiB", "file:///data/a@b?capacity=1GiB"),
    ],
)
def test_what_is_shown_of_a_url_has_no_secret(text, told):
    assert shown(text) == told


@pytest.mark.parametrize(
    "text",
    [
        f"vault://me:{SECRET}@host?depth=1",
        f"vault://me:{SECRET}@[host",
        f"vault://me:?{SECRET}@host?capacity=1",
        f"vault://me:{SECRET}@\N{FULLWIDTH SOLIDUS}host",
        f"nowhere://me:{SECRET}@host",
        f"me:{SECRET}@host",
        f"vault://host?password={SECRET}",
    ],
)
def test_a_refusal_does_not_repeat_it(text):
    for call in (
        lambda: check_storage(text, label=LABEL, description="model A"),
        lambda: TierSettings.read({"storage": [text]}),
        lambda: TierSettings.read({"storage": {"url": text}}),
    ):
        with pytest.raises(ConfigError) as told:
            call()
        assert SECRET not in str(told.value)
        assert told.value.__cause__ is None or SECRET not in str(told.value.__cause__)


def test_two_tiers_of_one_place_are_named_without_it():
    with pytest.raises(ConfigError, match="same place") as told:
        check_storage([f"vault://a:{SECRET}@host", f"vault://b:{SECRET}@host"], label=LABEL, description="model A")
    assert SECRET not in str(told.value)


def test_a_kind_of_storage_without_passwords_refuses_one(monkeypatch):
    monkeypatch.setattr(Backend, "secrets", False)
    with pytest.raises(ConfigError, match="a memory URL cannot have a user or a password") as told:
        parse_url(f"memory://me:{SECRET}@name?capacity=1MiB")
    assert SECRET not in str(told.value)


def test_user_and_password_are_decoded_and_the_place_has_neither():
    url = parse_url("vault://a%40b:p%2Fw%3A@host:1/x")
    assert (url.user, url.password, url.place, url.path) == ("a@b", "p/w:", "host:1", "/x")
    assert (parse_url("vault://:pw@host").user, parse_url("vault://:pw@host").password) == (None, "pw")


def test_settings_that_hold_a_url_do_not_show_it():
    url = f"vault://me:{SECRET}@host"
    held = [
        CacheConfig(1 << 20, 1 << 20, url),
        Settings(storage=(url,)),
        Settings(storage=(url,)).cache,
        TierSettings((url,)),
        HiCacheSettings((url,)),
    ]
    assert SECRET not in repr(held)
