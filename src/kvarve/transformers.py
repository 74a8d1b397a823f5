"""Any causal language model of Transformers, whose own `generate` is resumed from kvarve's cache.

    with PrefixCachedModel(model, CacheConfig("1GiB")) as prefixes:
        output = prefixes.generate(input_ids, max_new_tokens=64)
        print(prefixes.usage)

Cached pages of the prompt are loaded, the rest of its whole chunks is computed and cached, and `generate` goes on from
there with the tokens that are left.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import Cache

from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache, bugs_as_broken
from kvarve.core.lease import Lease
from kvarve.errors import Broken, ConfigError
from kvarve.reference.engine.identity import Marks, identity_of
from kvarve.reference.engine.layers import cache_argument
from kvarve.reference.engine.model import forward, token_limit
from kvarve.reference.engine.paging import keep, resumed, wait_for_room
from kvarve.reference.engine.stepwise import make_resumable
from kvarve.reference.engine.workspace import StateLayout, Workspace
from kvarve.reference.engine.wrappers import require_causal

MOST_TOKENS = 1 << 30  # of a workspace, whose memory grows with the tokens in it


@dataclass(frozen=True)
class Usage:
    """Of a prompt's tokens, those that were not computed, by the tier that they came from, as the HTTP API has it."""

    prompt_tokens: int
    device: int
    host: int
    storage: int

    @property
    def cached_tokens(self) -> int:
        return self.device + self.host + self.storage


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
        self.usage = Usage(0, 0, 0, 0)  # of the last prompt
        self.broken = ""  # why it cannot be used any more: no page can be trusted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, input_ids: Tensor, *, salt: str = "", **settings: Any) -> Any:
        """What the model's own `generate` answers for a prompt [1, n] with these settings; `usage` has what was cached.

        ConfigError for a batch, padding, beams or several answers at once. Otherwise as `resume`.
        """
        mask, defaults = settings.get("attention_mask"), settings.get("generation_config", self.model.generation_config)
        if mask is not None and not mask.all():
            raise ConfigError("attention_mask must be all ones, got zeros: give each prompt alone and without padding")
        for name in ("num_beams", "num_return_sequences"):
            if (many := settings.get(name, getattr(defaults, name, None)) or 1) != 1:
                raise ConfigError(f"{name} must be 1, got {many}: a cache has one sequence")
        with self.resume(input_ids, salt=salt) as past:
            return self.model.generate(input_ids, **{cache_argument(self.model): past}, **settings)

    @contextmanager
    def resume(self, input_ids: Tensor, *, salt: str = "") -> Iterator[Cache]:
        """The past of a prompt [1, n] up to its last whole chunk, for a caller with a loop of its own.

        Only prompts with the same salt share. The cache object is the caller's own and may be changed freely.
        ModelError if the model has changed: no page has been read or kept then. Broken if the cache has failed, now or
        before: it can no longer be used.
        """
        if self.broken:
            raise Broken(self.broken)
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            got = f"got {[*input_ids.shape]}: give each prompt of a batch alone and without padding"
            raise ConfigError(f"input_ids must be one prompt of shape [1, n], {got}")
        if input_ids.shape[1] > (limit := token_limit(self.model.config)):
            raise ConfigError(f"a prompt must have at most {limit} tokens for this model, got {input_ids.shape[1]}")
        self._marks.require_same(self.model)
        prompt = input_ids[0].tolist()
        with self._told():
            lease = self.cache.open(prompt, salt)
        try:
            with self._told():
                workspace = self._computed(lease, input_ids)
            yield workspace.cache
        finally:
            if not self.broken:
                with self._told():
                    self.cache.close(lease)
                    self.cache.step()

    def _computed(self, lease: Lease, input_ids: Tensor) -> Workspace:
        """A workspace with all of a prompt's whole chunks; those that were computed are kept."""
        while not self.cache.claim(lease):
            self.cache.wait(0.05)
            self.cache.step()
        with bugs_as_broken(assertions=True):
            workspace = resumed(self.cache, lease, self.layout, MOST_TOKENS, self.model.device)
        tiers = (pages * self.layout.page_tokens for pages in lease.from_tiers())
        self.usage = Usage(input_ids.shape[1], *tiers)
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
