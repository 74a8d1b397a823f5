"""What may change the weights of a running vLLM engine is noticed, by its own calls or by the weights themselves."""

import queue
import threading
import warnings
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.request import RequestStatus

    from kvarve.connectors.vllm import engine_calls
    from kvarve.connectors.vllm.adapters import Adapters
    from kvarve.connectors.vllm.engine_calls import Around
    from kvarve.connectors.vllm.weights import adapter_now, weights_now

LONG_S = 20.0


class Executor:
    """One worker, which carries out what it can, and nothing of vLLM's own."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.LayerNorm(7))
        self.worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: self.model))
        self.sleeping_tags: set[str] = set()

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        return [method(self.worker, *args)] if callable(method) else [None]


class Engine(EngineCore):
    """vLLM's, in which something is made that looks around."""

    def __init__(self) -> None:
        self.told, self.model_executor = Counter[str](), Executor()
        self.scheduler = SimpleNamespace(reset_prefix_cache=self.emptied, set_pause_state=lambda _: None)
        self.around = self.make()

    def make(self) -> Around:
        return Around(lambda: self.told.update(["changed"]), lambda running: self.told.update(["settled"]))

    def emptied(self, *_: Any) -> bool:
        self.told["emptied"] += 1
        assert self.told["settled"] == self.told["emptied"], "copies have ended before"
        return True

    @property
    def changed(self) -> int:
        """Whether it was told of other weights since this was last asked."""
        return self.told.pop("changed", 0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize(
    "method",
    ["reload_weights", "update_weights", "a_method_of_a_worker_extension", lambda worker: None, lambda worker: 1 / 0],
    ids=["reload", "update", "extension", "function", "failure"],
)
def test_a_remote_call_may_have_changed_the_weights_whatever_it_says(engine: Engine, method: Any) -> None:
    """A sum of them would not tell: some are packed for the processor."""
    with suppress(ZeroDivisionError):
        engine.collective_rpc(method)
    assert engine.changed == 1
    engine.resume_scheduler()
    assert engine.changed == 1, "by hand, for all that is known"
    engine.reset_prefix_cache()
    assert not engine.changed, "they are known again"


def test_a_remote_call_that_reads_costs_no_page(engine: Engine) -> None:
    for method in engine_calls.READS:
        engine.collective_rpc(method)
    assert not engine.changed
    assert Around(lambda: pytest.fail("nothing is watched")).ask(weights_now) is None, "without an engine"


@pytest.mark.parametrize("call", ["reset_prefix_cache", "resume_scheduler"])
def test_weights_that_were_changed_by_hand_are_noticed_when_caches_are_emptied_or_the_engine_goes_on(
    engine: Engine, call: str
) -> None:
    getattr(engine, call)()
    assert not engine.changed
    with torch.no_grad():
        next(engine.model_executor.model.parameters())[3, 4] += 1e-3
    getattr(engine, call)()
    assert engine.changed == 1
    getattr(engine, call)()
    assert not engine.changed


def test_weights_that_were_changed_after_a_reset_are_noticed_before_the_first_request(engine: Engine) -> None:
    engine.reset_prefix_cache()
    with torch.no_grad():
        next(engine.model_executor.model.parameters())[3, 4] += 1e-3
    assert not engine.changed
    engine.around.look_again()
    assert engine.changed == 1
    engine.model_executor.worker.model_runner.get_model = lambda: pytest.fail("it is looked at once")
    engine.around.look_again()


def test_weights_whose_memory_is_given_away_are_looked_at_when_they_are_back(engine: Engine) -> None:
    """On a GPU a look at them would end the engine."""
    executor, read = engine.model_executor, list[str]()
    executor.worker.model_runner.get_model = lambda: read.append("read") or executor.model
    executor.sleeping_tags = {"weights", "kv_cache"}
    engine.collective_rpc("anything")
    engine.reset_prefix_cache()
    executor.sleeping_tags = set()
    engine.collective_rpc("sleep")
    engine.resume_scheduler()
    assert not read and engine.changed == 2
    engine.collective_rpc("wake_up")
    engine.resume_scheduler()
    assert read and engine.changed == 2


def test_weights_that_cannot_be_read_count_as_others(engine: Engine) -> None:
    def unknown() -> Any:
        raise AttributeError("a model of another kind")

    engine.model_executor.worker.model_runner.get_model = unknown
    for _ in range(2):
        engine.reset_prefix_cache()
        assert engine.changed


class Process(EngineCoreProc, Engine):  # type: ignore[misc]
    def __init__(self) -> None:
        self.input_queue = queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        Engine.__init__(self)


def test_an_idle_engine_is_rung_for_each_time_that_it_is_asked_to_and_calls_in_its_own_thread() -> None:
    engine, threads = Process(), list[int]()
    engine.around.when_idle(lambda: threads.append(threading.get_ident()))
    for calls in (1, 2):
        engine.around.again()
        engine.around.again()
        engine.input_queue.get(timeout=LONG_S)
        engine._notify_idle_state_callbacks()
        assert threads == [threading.get_ident()] * calls
    assert engine.input_queue.empty() and not engine._idle_state_callbacks


# --- what is read of weights


def worker(**tensors: torch.Tensor) -> Any:
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1024, 1100), (3, 5)])
def test_a_digest_of_weights_changes_with_any_of_their_bytes_and_with_nothing_else(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    raw = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    found = set()
    for at in (None, None, 0, len(raw) // 2, len(raw) - 1):
        now = raw.clone()
        if at is not None:
            now[at] += 1
        found.add(weights_now(worker(a=now.view(dtype).reshape(shape))))
    assert len(found) == 4 and "" not in found


def test_the_place_of_a_row_counts_and_weights_that_share_their_memory_are_summed_once() -> None:
    rows = torch.randn(300, 1024)
    assert weights_now(worker(a=rows)) != weights_now(worker(a=rows.flip(0))), "two rows that change places"
    whole = torch.randn(8, 6)
    assert weights_now(worker(a=whole, b=whole.T, c=whole[:3])) == weights_now(worker(a=whole))


class Loaded(SimpleNamespace):
    __hash__ = object.__hash__


def adapters(**loaded: Any) -> Any:
    """A worker that has these adapters, by the tensors of their one layer."""
    kept = {
        int(name[1:]): Loaded(
            loras={"layer": SimpleNamespace(rank=8, lora_a=a, lora_b=[b, None], scaling=scaling)},
            modules_to_save={},
            is_3d_lora_weight=False,
        )
        for name, (a, b, scaling) in loaded.items()
    }

    class Manager:
        _adapter_manager = SimpleNamespace(get_adapter=kept.get)

        def list_adapters(self) -> set[int]:
            return set(kept)

        def add_adapter(self, request: Any) -> None:
            raise FileNotFoundError(request.lora_path)

    return SimpleNamespace(model_runner=SimpleNamespace(lora_manager=Manager()))


def test_equal_adapters_have_one_digest_in_all_engines_and_others_another() -> None:
    def named(number: int) -> Any:
        return SimpleNamespace(lora_int_id=number, lora_path="p", load_inplace=False)

    a, b = torch.randn(8, 6), torch.randn(6, 8)
    other = a.clone()
    other[7, 5] += 1e-3
    one, two = adapters(_1=(a, b, 2.0)), adapters(_5=(a.clone(), b.clone(), 2.0))
    changed = [adapters(_1=(other, b, 2.0)), adapters(_1=(a, b, 1.0)), adapters(_1=(a.bfloat16(), b, 2.0))]
    digest = adapter_now(one, named(1))
    assert digest == adapter_now(two, named(5)) == adapter_now(one, named(1))
    assert len({digest, *(adapter_now(each, named(1)) for each in changed)}) == 4
    assert adapter_now(one, named(2)) == "", "it cannot be loaded, as vLLM will say"
    assert adapter_now(SimpleNamespace(), named(1)) == ""


# --- which adapters requests use


class Waiting(SimpleNamespace):
    """A request with an adapter."""

    def __init__(self, name: str, number: int, inplace: bool = False, status: Any = RequestStatus.WAITING) -> None:
        lora = SimpleNamespace(lora_name=f"n{number}", lora_path="p", lora_int_id=number, load_inplace=inplace)
        super().__init__(request_id=name, lora_request=lora, status=status)


class Known:
    """What is asked for adapters, and answered."""

    def __init__(self, places: int) -> None:
        self.digests, self.cached = {1: "one", 2: "two", 3: "three"}, object()
        self.looked: list[tuple[int, set[int]]] = []
        self.adapters = Adapters(places, self.look, lambda: self.cached)

    def look(self, lora: Any, others: set[int]) -> str:
        self.looked.append((lora.lora_int_id, others))
        return self.digests[lora.lora_int_id]

    def salt(self, request: Waiting, prefix: bool = True) -> str | None:
        self.adapters.step()
        return self.adapters.salt(request.lora_request, prefix)


def test_a_request_waits_until_there_is_room_for_its_adapter_and_then_has_its_turn() -> None:
    known, first = Known(2), Waiting("first", 1)
    adapters = known.adapters
    assert adapters.enter(first) and adapters.enter(Waiting("second", 2))
    assert adapters.enter(Waiting("third", 1)), "it is in use"
    late = Waiting("late", 3)
    assert not adapters.enter(late) and not adapters.enter(Waiting("later", 4))
    adapters.leave("first")
    assert not adapters.enter(late)
    adapters.leave("third")
    assert adapters.enter(late) and not adapters.enter(first)
    assert known.salt(late) == "three" and known.looked == [(3, {2, 3})]


def test_a_session_that_waits_for_its_client_takes_no_adapter_s_place() -> None:
    adapters, session = Known(1).adapters, Waiting("session", 1)
    assert adapters.enter(session) and not adapters.enter(Waiting("next", 2))
    session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    assert adapters.enter(Waiting("next", 2))


@pytest.mark.parametrize("what", ["other weights", "a mixture", "unknown weights", "loaded in each step"])
def test_what_vllm_has_cached_of_an_adapter_s_other_weights_is_in_the_way_until_it_is_forgotten(what: str) -> None:
    known, request = Known(1), Waiting("a", 1)
    assert known.salt(request) == "one"
    if what == "other weights":
        known.digests[1] = "new"
    elif what == "a mixture":
        known.adapters.mixed(("n1", "p"))
    elif what == "unknown weights":
        known.digests[1] = ""
        assert known.salt(request) is None
        known.digests[1] = "one"
    else:
        assert known.salt(Waiting("b", 1, inplace=True), prefix=False) is None
    assert known.salt(request) is None and known.salt(request, prefix=False) == known.digests[1]
    assert known.salt(Waiting("c", 2)) == "two", "another's are as they were"
    known.cached = object()
    assert known.salt(request) == known.digests[1]
