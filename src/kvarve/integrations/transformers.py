"""A connector for Transformers: any causal language model's own `generate`, resumed from kvarve's cache.

    prefixes = PrefixCachedModel(model, CacheConfig(device_memory=1 << 30))
    with prefixes.resume(input_ids) as past:
        output = model.generate(input_ids, past_key_values=past, max_new_tokens=64)

What the prompt shares with earlier ones is brought back, the rest of its whole chunks is computed and kept, and
`generate` goes on from there with the tokens that are left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvarve.config import CacheConfig
from kvarve.engine.identity import Marks, identity_of
from kvarve.engine.model import forward, token_limit
from kvarve.engine.prefill import keep, resumed, wait_for_room
from kvarve.engine.state import StateLayout
from kvarve.engine.stepwise import teach
from kvarve.errors import ConfigError
from kvarve.runtime import PrefixCache


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
        """Pages are those of the model as it is now, whose weights are all read once. A model that is changed later
        (other weights, another adapter, another precision) is refused until it is changed back or gets another cache.

        Layers of the model that would forget what came before a chunk (Jamba's) are taught to go on from it.
        Raises ConfigError, ModelError or StorageError as `PrefixCache`, `StateLayout` and `identity_of` do.
        """
        teach(model)
        self.model = model
        self.layout = StateLayout.of(model, page_tokens, chunk_tokens)
        self.identity = identity_of(model, self.layout)
        self._marks = Marks.of(model)
        self.cache = PrefixCache(self.identity, config, device=str(model.device))
        self.cached_tokens = 0  # of the last prompt

    @contextmanager
    def resume(self, input_ids: Tensor, *, salt: str = "", max_new_tokens: int = 4096) -> Iterator[Cache]:
        """The past of a prompt [1, n] up to its last whole chunk, as `generate` takes it.

        Only prompts with the same salt share. The cache object is the caller's own and may be changed freely.
        ModelError if the model is no longer the one that it was: nothing has been read or kept then.
        """
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise ConfigError(f"one prompt of shape [1, n] at a time, not {[*input_ids.shape]}")
        if input_ids.shape[1] > (limit := token_limit(self.model.config)):
            raise ConfigError(f"a prompt of {input_ids.shape[1]} tokens is longer than the {limit} of this model")
        self._marks.require_same(self.model)
        prompt = input_ids[0].tolist()
        lease = self.cache.open(prompt, salt)
        try:
            while not self.cache.claim(lease):
                self.cache.wait(0.05)
                self.cache.step()
            room = len(prompt) + max_new_tokens
            workspace = resumed(self.cache, lease, self.layout, room, self.model.device)
            self.cached_tokens = workspace.tokens
            # The last token is left to `generate`, which wants one to begin with.
            while (stop := workspace.tokens + self.layout.chunk_tokens) < len(prompt):
                forward(self.model, workspace, input_ids[:, workspace.tokens : stop])
                self._marks.require_same(self.model)
                wait_for_room(self.cache, lease, workspace)
                keep(self.cache, lease, workspace)
            yield workspace.cache
        finally:
            self.cache.close(lease)
            self.cache.step()

    def close(self) -> None:
        """Finish the backups and leave the storage whole."""
        self.cache.shutdown()
