"""What kvarve counts beside SGLang's own metrics: where the tokens of prompts came from."""

import pytest
from linker_bed import MakeEngine, prompt

from kvarve.core.observe.reasons import Reason


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_are_counted_by_where_their_tokens_came_from(page: int, make_engine: MakeEngine) -> None:
    engine = make_engine("FULL", page, storage=f"memory://counted-{page}?capacity=8MiB")
    asked = prompt(4, page)
    engine.serve(asked)
    engine.forget()
    engine.flush()
    assert engine.serve(asked) == (0, 4, 0)
    engine.settle()
    assert engine.linker.planner.reasons[Reason.HIT_HOST] == 4 * page
    engine.serve(asked)
    assert engine.linker.planner.reasons[Reason.HIT_DEVICE] == 4 * page
    assert engine.linker.planner.reasons.total() == 12 * page
    engine.drain()
    engine.forget()
    engine.drop_host()
    restored = engine.run(*engine.wait(asked, 4), asked)
    engine.settle()
    assert restored == (0, 4, 0)
    assert engine.linker.planner.reasons[Reason.HIT_STORAGE] == 4 * page
