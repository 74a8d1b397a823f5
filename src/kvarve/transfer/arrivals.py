"""A load that a request resumes from while it is still being copied: which of its layers have come."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvarve.errors import Broken


class Arrival:
    """The layers of one load. The lane's thread says which have come; the engine's waits, just before it reads them."""

    def __init__(self, layers: Iterable[int], order: Callable[[Any], None], patience_s: float) -> None:
        """`order` has the calling thread's compute stream wait for a layer's event. `patience_s`: for each layer."""
        self._layers = [*layers]
        self._missing, self._order, self._patience_s = set(self._layers), order, patience_s
        self._events: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._latest = time.monotonic()  # when a layer has come
        self._trouble: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether no call of `wait` would wait (a compute stream may)."""
        return not self._missing or self._trouble is not None or self._left_s() <= 0

    def came(self, layer: int, event: Any) -> None:
        """A layer has been copied, or will have been when its event has happened."""
        with self._changed:
            self._events[layer] = event
            self._missing.discard(layer)
            self._latest = time.monotonic()
            self._changed.notify_all()

    def fail(self, why: BaseException) -> None:
        """The copy has failed, and the rest will not come."""
        with self._changed:
            self._trouble = why
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return when what the calling thread computes from now on finds a layer's pages in place. Broken if the copy
        has failed, or if no layer has come for `patience_s`."""
        with self._changed:
            while layer in self._missing:
                if self._trouble is not None:
                    raise Broken(f"the copy of layer {layer} to the device has failed: {self._trouble}")
                if self._left_s() <= 0:
                    raise Broken(f"no layer has been copied to the device for {self._patience_s:g} s; its copy hangs")
                self._changed.wait(self._left_s())
            event = self._events.get(layer)
        if event is not None:
            self._order(event)

    def _left_s(self) -> float:
        return self._latest + self._patience_s - time.monotonic()

    def wait_all(self) -> None:
        """The same for all layers."""
        for layer in self._layers:
            self.wait(layer)
