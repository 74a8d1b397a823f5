"""One engine prefills, another decodes: the prompt goes over by a ticket and a storage that both share."""

import json
from pathlib import Path

import pytest

from engines import DECODED, GRID_FLOOR, LONG_S, PROMPT, Make, a_prompt, a_request, alone, by_hand
from kvarve.errors import ConfigError
from kvarve.pages.ticket import Ticket


def test_a_decode_engine_answers_as_one_engine_would_and_computes_only_the_end_of_the_prompt(
    make: Make, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}?capacity=64MiB"
    prefill = make(start=False, storage=url, write_policy="through:2")
    decode = make(start=False, storage=url)
    ((_, first, last),) = by_hand(prefill, a_request(a_prompt(PROMPT, 3), 1, hand_over_s=LONG_S))
    assert last.ticket is not None and last.ticket.boundary * prefill.model.layout.page_tokens == GRID_FLOOR
    assert prefill.cache.settle(LONG_S)
    ticket = Ticket.of_json(json.loads(json.dumps(last.ticket.json())))
    ((_, tokens, last),) = by_hand(decode, a_request(a_prompt(PROMPT, 3), DECODED, ticket=ticket))
    assert tokens == alone("qwen3_5", PROMPT, 3, DECODED) and tokens[:1] == first
    assert last.usage is not None and last.usage.storage == GRID_FLOOR
    assert decode.counts.computed_tokens == PROMPT - GRID_FLOOR


def test_a_prompt_is_handed_over_through_a_storage_only(make: Make) -> None:
    engine = make(start=False)
    with pytest.raises(ConfigError, match="attach one"):
        engine.submit(a_request(a_prompt(PROMPT, 3), 1, hand_over_s=1.0))
    with pytest.raises(ConfigError, match="finite"):
        engine.submit(a_request(a_prompt(PROMPT, 3), 1, hand_over_s=float("inf")))
