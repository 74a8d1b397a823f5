"""A hierarchical prefix cache for hybrid language models: device, host memory and storage, found as one set.

Public and stable are the names below, `kvarve.errors`, `kvarve.storage` (storages and their URLs), `kvarve.testing`
(suites for writers of storages), `kvarve.transformers` (Transformers' own `generate`), the command line, the HTTP API,
and what is stored. Every other module may change. A name is imported when it is first used; `PrefixCache` and
`CacheWorker` need torch, which the extra `worker` brings.

    PrefixCache      scheduler and worker in one process: open, claim, pages, grow, publish, close
    CacheScheduler   decides from which pages a request resumes, and which copies come next; knows no tensor
    CacheWorker      moves the bytes: device and host memory, lanes between tiers, the storage
    CacheConfig      memory of each tier, the storage's URLs, and the policies
    Policies         when pages are backed up, evicted and waited for
    ModelIdentity    what decides what the numbers in a page mean; models share pages if all of it is equal
    PoolSpec         one kind of per-page state: attention KV, a window, a recurrent state
    BufferSpec       one tensor of a page: name, shape, dtype
    window_lookback  the pages that a sliding window still reads
    Tier             DEVICE, HOST or STORAGE
    Prompt           tokens that were prepared for `open`, perhaps on another thread
    Hit              what `lookup` answers: from how many pages a prompt could resume now
    Lease            a request's pins on its pages, from `open` to `close`
    Ticket           a prompt whose pages one server hands to another through a storage
    KvarveError      base of all errors: ConfigError, TooLong, StorageError, ModelError, Busy, Broken

The life of a request, with a model that keeps eight float32 numbers per token, in pages of 64 tokens:

    pools = (PoolSpec("kv", (BufferSpec("k", (64, 8), "float32"),), lookback=None),)
    identity = ModelIdentity("mine", "name of the weights", "float32", page_tokens=64, chunk_tokens=64, pools=pools)
    config = CacheConfig("64MiB", "256MiB", storage="file:///var/kvarve?capacity=10GiB")
    with PrefixCache(identity, config) as cache:
        lease = cache.open(tokens)
        while not cache.claim(lease):  # until its pages have come from storage
            cache.wait(0.05)
            cache.step()
        for pool, (positions, slots) in cache.pages(lease).items():
            ...  # read cache.worker.arena(pool)[buffer][slot] for each position
        for pool, slots in cache.grow(lease, upto).items():  # pages computed from lease.boundary to upto
            ...  # write cache.worker.arena(pool)[buffer][slot] for each position: slot
        cache.publish(lease, upto)
        cache.close(lease)
"""

from typing import TYPE_CHECKING

from kvarve.errors import Broken, Busy, ConfigError, KvarveError, ModelError, StorageError, TooLong

if TYPE_CHECKING:
    from kvarve.cache.config import CacheConfig
    from kvarve.cache.prefix_cache import PrefixCache
    from kvarve.cache.scheduler import CacheScheduler, Prompt
    from kvarve.cache.worker import CacheWorker
    from kvarve.core.core import Hit
    from kvarve.core.lease import Lease
    from kvarve.core.policies import Policies
    from kvarve.pages.pools import BufferSpec, ModelIdentity, PoolSpec, Tier, window_lookback
    from kvarve.pages.ticket import Ticket

__version__ = "0.1.0"

__all__ = [
    "Broken",
    "BufferSpec",
    "Busy",
    "CacheConfig",
    "CacheScheduler",
    "CacheWorker",
    "ConfigError",
    "Hit",
    "KvarveError",
    "Lease",
    "ModelError",
    "ModelIdentity",
    "Policies",
    "PoolSpec",
    "PrefixCache",
    "Prompt",
    "StorageError",
    "Ticket",
    "Tier",
    "TooLong",
    "window_lookback",
]

# The modules above by their names: a program that asks for the version alone loads none of them.
_MODULES = {
    "BufferSpec": "kvarve.pages.pools",
    "CacheConfig": "kvarve.cache.config",
    "CacheScheduler": "kvarve.cache.scheduler",
    "CacheWorker": "kvarve.cache.worker",
    "Hit": "kvarve.core.core",
    "Lease": "kvarve.core.lease",
    "ModelIdentity": "kvarve.pages.pools",
    "Policies": "kvarve.core.policies",
    "PoolSpec": "kvarve.pages.pools",
    "PrefixCache": "kvarve.cache.prefix_cache",
    "Prompt": "kvarve.cache.scheduler",
    "Ticket": "kvarve.pages.ticket",
    "Tier": "kvarve.pages.pools",
    "window_lookback": "kvarve.pages.pools",
}
_NEED_TORCH = ("CacheWorker", "PrefixCache")


if not TYPE_CHECKING:  # which then sees the imports above alone

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            found = globals()[name] = getattr(import_module(_MODULES[name]), name)
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            text = (
                f"{name} needs torch, which is not installed: install kvarve with the extra 'worker' (see the README)"
            )
            raise ImportError(text, name="torch") from None
        return found

    def __dir__():
        """What can be had here, without an error for lack of torch."""
        from importlib.util import find_spec

        return sorted({*globals(), *__all__}.difference(() if find_spec("torch") else _NEED_TORCH))
