"""Pages that are shared whatever chunk computed them: prompts resume at every page."""

from dataclasses import replace
from functools import cache as cached_model

import pytest

from engines import Make, a_model, a_prompt, a_request, by_hand, every_family
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, with_rounded_hits
from kvarve.reference.engine.requests import Request, Sampling
from kvarve.reference.engine.workspace import StateLayout
from tests.sim.models import FAMILIES

OTHERS = [family for family in FAMILIES if family != "qwen3_5"]


@cached_model
def in_long_chunks(family: str, pages: int = 4) -> LoadedModel:
    """A tiny model whose chunks are of many pages."""
    model = a_model(family)
    layout = StateLayout.of(model.model, model.layout.page_tokens, pages * model.layout.page_tokens)
    identity = replace(model.identity, chunk_tokens=layout.chunk_tokens)
    return replace(model, layout=layout, identity=identity)


def cached(engine: Engine, prompt: list[int]) -> int:
    ((_, _, last),) = by_hand(engine, Request(prompt, Sampling(1, ignore_eos=True)))
    assert last.usage is not None, last.error
    return last.usage.cached


@every_family
def test_prompts_resume_at_the_last_page_that_they_share(family: str, make: Make) -> None:
    model = with_rounded_hits(in_long_chunks(family))
    engine, page, prompt = make(model, start=False), model.layout.page_tokens, a_prompt(1000)
    first = 5 * page + page // 2
    assert cached(engine, prompt[:first]) == 0
    assert cached(engine, prompt[:first]) == 5 * page
    assert cached(engine, prompt[: first + page]) == 5 * page
    assert cached(engine, prompt[: first + 2 * page]) == 6 * page
    one, other = ([*prompt[: 3 * page + 5], *a_prompt(2 * page, seed)] for seed in (1, 2))
    cached(engine, one)
    assert cached(engine, other) == 3 * page, "a third prompt resumes where two others parted"


@pytest.mark.parametrize("family", ["qwen3_5", *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_an_answer_is_kept_over_the_end_of_a_chunk(family: str, every: int, make: Make) -> None:
    model = with_rounded_hits(in_long_chunks(family))
    page, chunk = model.layout.page_tokens, model.layout.chunk_tokens
    kept = "ends,branches,chunks" + (f",every:{every * page}" if every else "")
    engine, prompt = make(model, start=False, keep_states=kept), a_prompt(chunk - 2 * page - 3)
    ((_, said, last),) = by_hand(engine, Request(prompt, Sampling(2 * page + 9, ignore_eos=True)))
    assert not last.error
    assert not engine.broken
    assert cached(engine, [*prompt, *said]) == chunk


@every_family
def test_answers_are_those_of_an_exact_cache_as_far_as_rounding_lets_them(family: str, make: Make) -> None:
    exact = in_long_chunks(family)
    said = []
    for model in (exact, with_rounded_hits(exact)):
        engine = make(model)
        for tokens in (100, 140, 140):
            said.append(engine.submit(a_request(a_prompt(tokens))).result(60)[1])
    assert said[:3] == said[3:]


def test_rounded_pages_have_an_identity_of_their_own_whatever_the_chunks_are() -> None:
    long, short, shortest = (in_long_chunks("qwen3_5", pages) for pages in (4, 2, 1))
    exact = {each.identity.fingerprint() for each in (long, short, shortest)}
    rounded = {with_rounded_hits(each).identity.fingerprint() for each in (long, short, shortest)}
    assert len(exact) == 3
    assert len(rounded) == 1
    assert not exact & rounded
    assert with_rounded_hits(long).layout.shortest_hit == 17


@pytest.mark.parametrize(
    ("rounded", "computed", "until", "snapshots", "end"),
    [
        (False, 0, 1000, 1 << 16 | 1 << 48, 256),
        (False, 768, 1000, 1 << 48, 1000),
        (False, 256, 512, 1 << 16 | 1 << 32, 512),
        (True, 0, 1000, 0, 256),
        (True, 768, 1000, 0, 992),  # the last page below its end
        (True, 992, 1000, 1 << 62, 1000),
        (True, 768, 1024, 0, 1008),
        (True, 1008, 1024, 1 << 64, 1024),
        (True, 0, 1000, 1 << 3 | 1 << 62, 48),  # a state is kept there
        (True, 48, 1000, 1 << 3 | 1 << 62, 256),
        (True, 40, 1000, 1 << 2 | 1 << 3, 48),
    ],
)
def test_where_a_chunk_ends(rounded: bool, computed: int, until: int, snapshots: int, end: int) -> None:
    layout = StateLayout(16, 256, (), (), object, rounded)
    assert layout.chunk_end(computed, until, snapshots) == end
