"""A prefill server hands a prompt over to a decode server, by a ticket and a storage that both share."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from filling import Request, a_config, a_region, an_identity, prompt, settle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.cache.scheduler import CacheScheduler
from kvarve.cache.worker import check
from kvarve.errors import ConfigError
from kvarve.pages.ticket import Ticket
from kvarve.storage import MemoryStorage
from kvarve.testing import FaultyStorage

PROMPT = prompt(9.5)
UNTIL_S = 1e9
TICKET = Ticket("ab" * 32, "cd" * 32, 8, UNTIL_S, "ef" * 32, "kvarve-page/2")


@pytest.fixture
def region() -> MemoryStorage:
    return a_region()


@pytest.fixture
def servers(region: MemoryStorage) -> Iterator[tuple[PrefixCache, PrefixCache]]:
    """A prefill server with a write policy that would not store a prompt at its first use, and a decode server."""
    stores = [FaultyStorage(region, stays=True) for _ in range(2)]
    prefill = PrefixCache(an_identity(), a_config(write_policy="through:2"), storage=stores[0])
    decode = PrefixCache(an_identity(), a_config(), storage=stores[1])
    yield prefill, decode
    prefill.shutdown(5)
    decode.shutdown(5)


def prefilled(cache: PrefixCache, salt: str = "") -> Ticket:
    """Prefill the prompt; its ticket, as it comes out of JSON on the other side."""
    request = Request(cache, PROMPT, salt).wait().compute()
    ticket = cache.scheduler.export(request.lease, UNTIL_S)
    assert ticket is not None
    request.close()
    return Ticket.of_json(json.loads(json.dumps(ticket.json())))


def test_a_decode_server_resumes_where_the_ticket_says_from_the_shared_storage(
    servers: tuple[PrefixCache, PrefixCache],
) -> None:
    prefill, decode = servers
    ticket = prefilled(prefill)
    assert ticket.boundary == 8 and ticket.until_s == UNTIL_S
    settle(prefill)
    request = Request(decode, PROMPT, ticket=ticket).wait()
    assert request.lease.boundary == ticket.boundary
    assert request.compute().close().from_tiers() == (0, 0, 8)


def test_pages_that_never_come_are_asked_for_and_then_computed(
    servers: tuple[PrefixCache, PrefixCache], region: MemoryStorage
) -> None:
    prefill, _ = servers
    ticket = prefilled(prefill)
    settle(prefill)
    lost = [*region._region.objects]  # type: ignore[union-attr]
    assert lost and all(region.delete(lost))
    shared, soon = FaultyStorage(region, stays=True), replace(ticket, until_s=0.2)
    decode = PrefixCache(an_identity(), a_config(), storage=shared)
    assert Request(decode, PROMPT, ticket=soon).wait().close().boundary == 0
    assert shared.counts["exists"] >= 2, "the storage was asked again"
    decode.shutdown(5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ranks": 2}, "another sharding .2 ranks; this server: 1 ranks."),
        ({"first_head": 4, "heads": 4}, "another sharding .1 ranks, 4 heads from 4 on;"),
        ({"layout": "kvarve-page/1"}, "layout 'kvarve-page/1', this server's 'kvarve-page/2'"),
        ({"model": "ab" * 32}, "another model"),
        ({"root": "ab" * 32}, "another salt"),
        ({"key": "ab" * 32}, "another beginning"),
        ({"boundary": 6}, "another beginning"),
        ({"boundary": 1 << 40}, "another beginning"),
    ],
)
def test_a_ticket_of_something_else_is_refused_and_nothing_has_changed(
    servers: tuple[PrefixCache, PrefixCache], changes: dict[str, Any], match: str
) -> None:
    prefill, decode = servers
    ticket = prefilled(prefill)
    before = decode.stats()
    with pytest.raises(ConfigError, match=match):
        decode.open(PROMPT, ticket=replace(ticket, **changes))
    assert decode.stats() == before


@pytest.mark.parametrize(("until_s", "waits_s"), [(900.0, 0.0), (1007.0, 7.0), (1e12, 30.0)])
def test_a_request_waits_for_its_ticket_until_its_time_and_no_longer_than_for_a_call_that_hangs(
    until_s: float, waits_s: float
) -> None:
    settings = an_identity(), a_config(storage_wait="none")
    scheduler = CacheScheduler(*settings, check(*settings), storage=True)
    known = scheduler.prompt(PROMPT)
    model = an_identity().fingerprint().hex()
    ticket = Ticket(known.root.hex(), "", 0, until_s, model, an_identity().layout)
    lease = scheduler.open(known, ticket=ticket, unix_s=1000.0)
    assert lease.patience.base_s == waits_s


# --- tickets that come from another server


@pytest.mark.parametrize(
    "changes",
    [
        {"boundary": True},
        {"boundary": 1 << 60},
        {"boundary": 0},
        {"key": ""},
        {"key": "CD" * 32},
        {"root": "ab" * 31},
        {"model": None},
        {"until_s": float("nan")},
        {"until_s": "soon"},
        {"layout": "x" * 1000},
        {"ranks": 0},
        {"format": "kvarve-ticket/2"},
    ],
    ids=str,
)
def test_a_ticket_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Ticket.of_json(TICKET.json() | changes)


@pytest.mark.parametrize("field", TICKET.json())
def test_a_ticket_that_lacks_a_field_is_refused(field: str) -> None:
    value = TICKET.json()
    del value[field]
    with pytest.raises(ConfigError, match="exactly these fields"):
        Ticket.of_json(value)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda each: st.lists(each, max_size=3)
)


@settings(max_examples=30)
@given(ANY | st.dictionaries(st.sampled_from([*TICKET.json()]), ANY), st.sampled_from([*TICKET.json()]), ANY)
def test_anything_is_a_ticket_or_a_config_error(whole: Any, field: str, value: Any) -> None:
    for given_ in (whole, TICKET.json() | {field: value}):
        with suppress(ConfigError):
            Ticket.of_json(given_)
