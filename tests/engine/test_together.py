"""Which work shares a forward: answers by their lengths, tails of prompts, and the state after them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import CHUNK, Make, a_model, a_prompt, a_request, alone, by_hand, every_family, turns
from kvarve.reference.engine.batch import Batch, Together, by_length, spare_tokens, together
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.paging import PagedTape
from kvarve.reference.engine.requests import Finish

# By how their layers treat padding: see the docstring of reference/engine/batch.py.
ALL_ROWS = {
    *("qwen3", "llama", "gpt_oss", "gpt_oss_wide", "gemma3", "gemma4", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
    *("longcat_flash", "llama4", "mistral3", "internvl", "qwen2_5_vl", "qwen3_vl", "glm4v", "kimi_k25"),
}
ONE_BY_ONE = {"deepseek_v4", "qwen4_exp", "minimax_m3", "glm5_next"}
STATES_ONE_BY_ONE = {"mamba", "falcon_mamba"}  # so that an engine computes no tails together either

# --- answers by their lengths


def cost(groups: list[list[int]], lengths: list[int], spare: int) -> int:
    return sum(spare + sum(lengths[group[-1]] - lengths[row] for row in group) for group in groups)


@given(st.lists(st.integers(1, 50), max_size=9).map(sorted), st.integers(1, 60))
def test_no_other_way_to_cut_the_rows_costs_less(lengths: list[int], spare: int) -> None:
    groups = by_length(lengths, spare)
    assert [row for group in groups for row in group] == [*range(len(lengths))]
    for cuts in range(1 << max(0, len(lengths) - 1)):
        other: list[list[int]] = [[]] if lengths else []
        for row in range(len(lengths)):
            other[-1].append(row)
            if row < len(lengths) - 1 and cuts >> row & 1:
                other.append([])
        assert cost(groups, lengths, spare) <= cost(other, lengths, spare)


def test_rows_are_not_apart_where_no_column_of_padding_is_read() -> None:
    """Windows and states do not grow with a row, so groups of them save nothing."""
    model = a_model("mamba2")
    assert together(model.model, model.layout).apart
    assert len(by_length([*range(64)], spare_tokens(model.model, model.layout, apart=True))) == 1


@pytest.mark.parametrize(
    ("family", "rows", "groups"),
    [("qwen3_5", 4, [[0, 1, 2], [3]]), pytest.param("gpt_oss", 3, [], marks=pytest.mark.long)],
    ids=["in a group of its own", "in a forward of its own"],
)
def test_a_long_answer_beside_short_ones_pads_none_of_them_and_all_advance_in_every_turn(
    family: str, rows: int, groups: list[list[int]], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = make(a_model(family), start=False, turn_tokens=16 * CHUNK), list[tuple[int, list[list[int]]]]()
    monkeypatch.setattr(engine, "_spare", 100)
    real = Batch.forward

    def forward(self: Batch, model: Any, ids: list[list[int]]) -> Any:
        logits = real(self, model, ids)
        seen.append((len(ids), self._groups))
        return logits

    monkeypatch.setattr(Batch, "forward", forward)
    asked = [(20, 1), (33, 2), (61, 3), (150, 4)]
    requests = [engine.submit(a_request(a_prompt(tokens, seed), 11)) for tokens, seed in asked]
    turns(engine, lambda: sum(not job.prefilling for job in engine.scheduler.running) == 4)
    seen.clear()
    before = [len(job.output_ids) for job in engine._jobs.values()]
    for _ in range(4):
        engine._turn()
    assert [len(job.output_ids) for job in engine._jobs.values()] == [said + 4 for said in before]
    assert seen == [(rows, groups)] * 4
    turns(engine, lambda: not engine._accepted)
    for request, (tokens, seed) in zip(requests, asked, strict=True):
        assert request.result(0.1)[1] == alone(family, tokens, seed, 11)


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("bamba", marks=pytest.mark.long)])
def test_the_last_row_of_a_batch_keeps_its_own_state_and_no_other(family: str, make: Make) -> None:
    engine = make(a_model(family), start=False)
    requests = [engine.submit(a_request(a_prompt(30 + seed, seed), 12)) for seed in range(4)]
    turns(engine, lambda: len(engine._batches) == 1 and len(next(iter(engine._batches))) == 4)
    for request in requests[1:]:
        engine.abort(request)
    turns(engine, lambda: len(engine._accepted) == 1)
    engine._turn()
    (job,) = engine.scheduler.running
    own = [tape._data for tape in job.state._tapes.values() if not isinstance(tape, PagedTape)]
    own += job.state._states.values()
    assert own
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own)
    assert not engine._batches
    turns(engine, lambda: not engine._accepted)
    assert requests[0].result(0.1)[1] == alone(family, 30, 0, 12)


# --- tails of prompts


@every_family
def test_what_a_models_code_makes_of_padding_is_found_by_trying(family: str) -> None:
    model = a_model(family)
    found = together(model.model, model.layout)
    assert found.any is (family in ALL_ROWS)
    assert found.fresh is (family not in ONE_BY_ONE | STATES_ONE_BY_ONE)
    assert found.equal is (family not in ONE_BY_ONE | STATES_ONE_BY_ONE | {"jamba"})


def test_rows_are_grouped_as_the_code_allows() -> None:
    shapes = [(0, 40), (0, 35), (64, 40), (128, 40), (64, 9), (0, 10)]
    assert Together().groups(shapes) == []
    assert Together(any=True).groups(shapes) == [[0, 2, 3, 1], [5, 4]]
    assert Together(fresh=True, equal=True).groups(shapes) == [[0, 1], [2, 3]]
    assert Together(equal=True).groups(shapes) == [[0, 2, 3]]
    assert Together(fresh=True).groups(shapes) == [[0, 1]]


LENGTHS = [(20, 0), (17, 1), (CHUNK + 20, 3), (2 * CHUNK + 20, 4), (9, 6)]


@every_family
def test_tails_of_prompts_computed_together_answer_as_each_alone(
    family: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes of some are cached, lengths differ, and what follows continues from the states that are left."""
    model = a_model(family)
    engine, rows = make(model, start=False, max_running=16, turn_tokens=64 * CHUNK), [0]
    real = Batch.forward

    def forward(self: Batch, model: Any, ids: list[list[int]]) -> Any:
        if max(map(len, ids)) > 1:
            rows[0] = max(rows[0], len(ids))
        return real(self, model, ids)

    monkeypatch.setattr(Batch, "forward", forward)
    by_hand(engine, *(a_request(a_prompt(tokens, seed), 1) for tokens, seed in LENGTHS if tokens > CHUNK))
    answers = by_hand(engine, *(a_request(a_prompt(tokens, seed), 2) for tokens, seed in LENGTHS))
    for (_, answer, last), (tokens, seed) in zip(answers, LENGTHS, strict=True):
        assert last.finish is Finish.LENGTH
        assert answer == alone(family, tokens, seed, 2), (tokens, seed)
    assert (rows[0] > 1) is (family not in ONE_BY_ONE | STATES_ONE_BY_ONE)


# --- the engine's thread does not sleep while there is something to compute


def test_a_prompt_that_waits_for_slots_lets_others_go_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = make(start=False, turn_tokens=4 * CHUNK, write_policy="back")
    slow = engine.submit(a_request(a_prompt(2 * CHUNK, 1), 2))
    quick = engine.submit(a_request(a_prompt(3 * CHUNK, 2), 2))
    turns(engine, lambda: len(engine.scheduler.running) == 2)
    short = engine._jobs[slow.number].lease
    monkeypatch.setattr(
        engine.cache.scheduler.core.growth,
        "short",
        lambda lease, upto: lease is short and quick.number in engine._accepted,
    )
    monkeypatch.setattr("kvarve.reference.engine.turns.GROW_WAIT_S", 1e9)
    monkeypatch.setattr(engine.cache, "wait", lambda timeout_s: pytest.fail("the engine sleeps"))
    at = engine._jobs[slow.number].computed
    while quick.number in engine._accepted:
        assert engine._turn()
        assert quick.number not in engine._accepted or engine._jobs[slow.number].computed == at
    while slow.number in engine._accepted:
        assert engine._turn()
    assert slow.result(0.1)[1] == alone("qwen3_5", 2 * CHUNK, 1, 2)
