"""A connector for Transformers: any causal language model's own `generate`, resumed from kvarve's cache.

    prefixes = PrefixCachedModel(model, CacheConfig(device_memory=1 << 30))
    with prefixes.resume(input_ids) as past:
        output = model.generate(input_ids, cache=past, max_new_tokens=64)  # before transformers 5.24: past_key_values

Cached pages of the prompt are loaded, the rest of its whole chunks is computed and cached, and `generate` goes on from
there with the tokens that are left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache, bugs_as_broken
from kvarve.core.requests.lease import Lease
from kvarve.errors import Broken, ConfigError
from kvarve.reference.engine.identity import Marks, identity_of
from kvarve.reference.engine.model import forward, token_limit
from kvarve.reference.engine.paging import keep, resumed, wait_for_room
from kvarve.reference.engine.stepwise import make_resumable
from kvarve.reference.engine.workspace import StateLayout, Workspace
from kvarve.reference.engine.wrappers import require_causal


class PrefixCachedModel:
    """One model with a prefix cache beside it; used by one thread at a time."""

    def __init__(
        self,
        model: Any,
        config: CacheConfig,
        *,
        page_tokens: int = 64,
        chunk_tokens: int = 256,
    ) -> None:
        """Pages belong to the model as it is now, whose weights are all read once. A model that is changed later (other
        weights, another adapter, another precision) is refused until it is changed back or gets another cache.

        Layers of the model that would lose their state at a chunk (Jamba's) are changed to resume from it.
        Raises ConfigError, ModelError or StorageError as `PrefixCache`, `StateLayout` and `identity_of` do.
        """
        require_causal(model)
        make_resumable(model)
        self.model = model
        self.layout = StateLayout.of(model, page_tokens, chunk_tokens)
        self.identity = identity_of(model, self.layout)
        self._marks = Marks.of(model)
        self.cache = PrefixCache(self.identity, config, device=str(model.device))
        self.cached_tokens = 0  # of the last prompt
        self.broken = ""  # why it cannot be used any more: no page can be trusted

    @contextmanager
    def resume(self, input_ids: Tensor, *, salt: str = "", max_new_tokens: int = 4096) -> Iterator[Cache]:
        """The past of a prompt [1, n] up to its last whole chunk, as `generate` takes it.

        Only prompts with the same salt share. The cache object is the caller's own and may be changed freely.
        ModelError if the model has changed: no page has been read or kept then. Broken if the cache has failed, now or
        before: it can no longer be used.
        """
        if self.broken:
            raise Broken(self.broken)
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise ConfigError(f"one prompt of shape [1, n] at a time, not {[*input_ids.shape]}")
        if input_ids.shape[1] > (limit := token_limit(self.model.config)):
            raise ConfigError(f"a prompt of {input_ids.shape[1]} tokens is longer than the {limit} of this model")
        self._marks.require_same(self.model)
        prompt = input_ids[0].tolist()
        with self._told():
            lease = self.cache.open(prompt, salt)
        try:
            with self._told():
                workspace = self._computed(lease, input_ids, len(prompt) + max_new_tokens)
            yield workspace.cache
        finally:
            if not self.broken:
                with self._told():
                    self.cache.close(lease)
                    self.cache.step()

    def _computed(self, lease: Lease, input_ids: Tensor, max_tokens: int) -> Workspace:
        """A workspace with all of a prompt's whole chunks; those that were computed are kept."""
        while not self.cache.claim(lease):
            self.cache.wait(0.05)
            self.cache.step()
        workspace = resumed(self.cache, lease, self.layout, max_tokens, self.model.device)
        self.cached_tokens = workspace.tokens
        # The last token is left to `generate`, which needs one to start from.
        while (stop := workspace.tokens + self.layout.chunk_tokens) < input_ids.shape[1]:
            forward(self.model, workspace, input_ids[:, workspace.tokens : stop])
            self._marks.require_same(self.model)
            wait_for_room(self.cache, lease, workspace)
            keep(self.cache, lease, workspace)
        return workspace

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            with bugs_as_broken():
                yield
        except Broken as e:
            self.broken = f"the cache has failed: {e}"
            raise

    def close(self) -> None:
        """Finish the backups and close the storage; nothing more is stored if the cache has failed."""
        self.cache.shutdown(store=not self.broken)
