"""Which weights a vLLM worker computes with: files say what it began with, its memory what it computes with now.

`Around.ask` runs this in the worker. Nothing of it raises, since a call that fails leaves the answers of other workers
unread.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvarve.connectors.vllm.adapters import Use

log = logging.getLogger("vllm.kvarve")

LINE = 65521  # words that are summed apart: a prime number, so that no two rows of a matrix stand in the same places

_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by adapter as it was loaded: a new load is a new object


def weights_now(worker: Any) -> str:
    """A digest of the weights of the model and of a draft model; "" if they cannot be read.

    Of each piece of memory a sum of its words: it changes with any one of them, and costs one pass over the weights.
    """
    try:
        models = [worker.model_runner.get_model(), getattr(worker, "get_draft_model", lambda: None)()]
        pieces: dict[tuple[str, int], torch.UntypedStorage] = {}
        for model in filter(None, models):
            for parameter in model.parameters():
                for tensor in _plain(parameter):
                    storage = tensor.detach().untyped_storage()
                    pieces[str(storage.device), storage.data_ptr()] = storage
        return xxhash.xxh3_128_hexdigest(repr([*map(_sum, pieces.values())]).encode())
    except Exception:  # of a model, a quantisation or a device that is another than all known
        log.exception("kvarve cannot read the weights of the model")
        return ""


def adapter_now(worker: Any, request: Any, others: Iterable[int] = ()) -> str:
    """A digest of the weights of the adapter that this request is computed with; "" if they cannot be read. Equal
    weights have equal digests in all engines.

    If need be the adapter is loaded, as vLLM would do in the request's first step: then it would be too late. None of
    the `others` is pushed out for it, of which vLLM's own order of use knows nothing.
    """
    try:
        manager = worker.model_runner.lora_manager
        if request.lora_int_id not in (there := manager.list_adapters()):
            for number in {*others} & {*there}:
                manager._adapter_manager._registered_adapters.touch(number)
            manager.add_adapter(request)
        return adapter_loaded(worker, request.lora_int_id)
    except Exception as error:  # noqa: BLE001  as above; vLLM tells the client why its adapter cannot be loaded
        log.warning("kvarve keeps no pages of adapter %r: %r", request.lora_path, error)
        return ""


def load_anew(worker: Any, request: Any) -> bool:
    """Load an adapter again, if it has been loaded; False: it cannot be."""
    try:
        manager = worker.model_runner.lora_manager
        if request.lora_int_id in manager.list_adapters():
            manager.add_adapter(request)
        return True
    except Exception as error:  # noqa: BLE001  as above
        log.warning("kvarve keeps no pages of adapter %r: %r", request.lora_path, error)
        return False


def others_of(worker: Any, uses: Iterable[Use]) -> list[Use]:
    """Those of which other weights are loaded, or none."""
    found = []
    for use in uses:
        ranks = use.digest.split()  # one for all, or one of each rank
        if adapter_loaded(worker, use.number) != ranks[worker.rank % len(ranks)]:
            found.append(use)
    return found


def adapter_loaded(worker: Any, number: int) -> str:
    """The same of an adapter that has been loaded, by its number; "" if it is not there."""
    adapter = worker.model_runner.lora_manager._adapter_manager.get_adapter(number)
    if adapter is None:
        return ""
    if adapter not in _known:
        digest = xxhash.xxh3_128()
        for part in _content([adapter.loras, adapter.modules_to_save, adapter.is_3d_lora_weight]):
            digest.update(part)
        _known[adapter] = digest.hexdigest()
    return _known[adapter]


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold a parameter's bytes: of one that is packed, its parts."""
    if isinstance(partitions := getattr(tensor, "partitions", None), Mapping):
        for part in partitions.values():
            yield from _plain(part)
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def _sum(storage: torch.UntypedStorage) -> int:
    """The words of a piece of memory, each times a number that follows from its place."""
    kind = torch.uint8 if storage.nbytes() % 8 else torch.int64
    count = storage.nbytes() // kind.itemsize
    words = torch.empty(0, dtype=kind, device=storage.device).set_(storage, 0, (count,), (1,))
    line = min(LINE, max(1, count))
    whole = count // line * line
    sums = words[:whole].view(-1, line).sum(0, dtype=torch.int64)
    sums[: count - whole] += words[whole:]
    return int((sums * (2 * torch.arange(line, device=storage.device) + 1)).sum())


def _content(value: Any) -> Iterator[bytes | memoryview]:
    """All that makes up a value: numbers, texts, tensors, and what it is made of. The same for equal values."""
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype} ".encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        yield f"{len(value)} names ".encode()
        for name in sorted(value):
            yield f"{name} ".encode()
            yield from _content(value[name])
    elif isinstance(value, list | tuple):
        yield f"{len(value)} values ".encode()
        for each in value:
            yield from _content(each)
    elif hasattr(value, "__dict__"):
        yield from _content(vars(value))
    else:
        yield f"{value!r} ".encode()
