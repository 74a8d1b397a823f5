"""Errors of the cache are fatal to the engine or connector that calls it: none is one request's error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from kvarve.cache.prefix_cache import PrefixCache
from kvarve.errors import Broken


class _FatalErrors:
    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cache, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return found(*args, **kwargs)
            except Broken:
                raise
            except Exception as e:  # after any failed call the cache may be half changed
                raise Broken(f"{type(e).__name__}: {e}") from e

        return call


def fatal_errors(cache: PrefixCache) -> PrefixCache:
    """The same cache; any exception of a call to it is `Broken`."""
    return cast(PrefixCache, _FatalErrors(cache))


@contextmanager
def fatal_assertions() -> Iterator[None]:
    """An assertion that fails inside is about the cache, so it is `Broken` too."""
    try:
        yield
    except AssertionError as e:
        raise Broken(f"{type(e).__name__}: {e}") from e
