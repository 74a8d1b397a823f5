"""Which adapters the requests of a vLLM scheduler use, and of which weights the blocks are that vLLM has cached.

vLLM's hashes know an adapter's name and path alone, and of the model nothing: its own prefix cache may answer from
pages of weights before, until it is emptied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

Name = tuple[str, str]  # an adapter, as vLLM's hashes know it


class Use(NamedTuple):
    """A request is computed with an adapter, by its number, which has to have the weights of this digest: one for all
    ranks, or one of each, with blanks between."""

    request: str
    adapter: Name
    number: int
    digest: str


class Adapters:
    """`places`: how many adapters a worker has in memory. `look(lora, others)`: the digest of an adapter, which is
    loaded if need be, though none of these others may be pushed out for it; "": it cannot be told. `cached()`: vLLM's
    map of cached blocks, a new one whenever it has forgotten all."""

    def __init__(self, places: int, look: Callable[[Any, set[int]], str], cached: Callable[[], Any]) -> None:
        self._places, self._look, self._cached = places, look, cached
        self._requests: dict[str, Any] = {}  # that have been asked about and have not ended
        self._digests: dict[int, str] = {}  # by number, since the last step
        self._blocks: Any = None  # the map that the two below are about
        self._of: dict[Name, str] = {}  # the digest that an adapter had when a request asked last
        self._stale: set[Name | None] = set()  # adapters (None: the model) of which some blocks have other weights
        self._stepped: Any = None  # the map at the last step

    def enter(self, request: Any) -> bool:
        """Whether a request may have its adapter loaded now. vLLM pushes out the adapter that was used the longest time
        ago, that of a running request too: it counts on requests of so many adapters at once as it has places for."""
        if request.lora_request is None:
            return True
        used = self._used()
        if request.lora_request.lora_int_id not in used and len(used) >= self._places:
            return False
        self._requests[request.request_id] = request
        return True

    def leave(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def salt(self, lora: Any, prefix: bool) -> str | None:
        """What tells the pages of a request apart beside vLLM's hashes: its adapter's weights. None, so that its pages
        are neither read nor saved: these are not known, or vLLM's own `prefix` may be of weights before."""
        salt, stale, names = "", self._now(), list[Name | None]([None])
        if lora is not None:
            name, salt = (lora.lora_name, lora.lora_path), self._digest(lora)
            if not salt or self._of.get(name, salt) != salt:
                stale.add(name)
            self._of[name] = salt
            names.append(name)
        if (lora is not None and not salt) or (prefix and stale.intersection(names)):
            return None
        return salt

    def use(self, request_id: str, salt: str) -> Use:
        """What a request with a salt is computed with."""
        lora = self._requests[request_id].lora_request
        return Use(request_id, (lora.lora_name, lora.lora_path), lora.lora_int_id, salt)

    def mixed(self, name: Name | None) -> None:
        """Some blocks are of other weights of an adapter than those by which it is known."""
        self._now().add(name)

    def model_changed(self) -> None:
        if self._cached() is self._stepped:
            self.mixed(None)

    def step(self) -> None:
        """A step begins."""
        self._digests.clear()
        self._stepped = self._cached()

    def _digest(self, lora: Any) -> str:
        """Of an adapter's weights as its next step computes with them. One that is to be loaded in every step has none:
        the files may be others by then."""
        if lora.load_inplace:
            return ""
        if lora.lora_int_id not in self._digests:
            self._digests[lora.lora_int_id] = self._look(lora, self._used())
        return self._digests[lora.lora_int_id]

    def _used(self) -> set[int]:
        """A request that waits for a client's next words, perhaps for ever, gets its adapter again when it goes on."""
        return {
            each.lora_request.lora_int_id
            for each in self._requests.values()
            if each.status is not RequestStatus.WAITING_FOR_STREAMING_REQ
        }

    def _now(self) -> set[Name | None]:
        """What is stale of the blocks that vLLM has cached now."""
        if self._cached() is not self._blocks:
            self._blocks, self._of, self._stale = self._cached(), {}, set()
        return self._stale
