"""What an operator has written for kvarve in an engine's configuration, read key by key. Knows no engine.

Every reading returns the value as it is meant, or raises ConfigError, which names the place, the key and what to write.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from kvarve.errors import ConfigError
from kvarve.pages.sizes import format_size, parse_size
from kvarve.storage.urls import parse_urls, shown

READ_ALL = "read"  # as the value of `weights`: fingerprint all bytes of their files, instead of a sample


@dataclass(frozen=True)
class Given:
    """The settings that stand at `where`."""

    where: str
    values: Mapping[str, Any]

    def refuse(self, what: str) -> ConfigError:
        """An error that names the place."""
        return ConfigError(f"{self.where}: {what}")

    def check_keys(self, known: Collection[str]) -> None:
        for key in self.values:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
                raise self.refuse(f"unknown setting {key!r}; {hint}")

    def storage(self) -> tuple[str, ...]:
        """The URLs in `storage`, nearest first; none if the key is not there."""
        given = self.values.get("storage")
        if given is None:
            return ()
        urls = [given] if isinstance(given, str) else given
        if not isinstance(urls, list | tuple) or not urls or not all(isinstance(url, str) and url for url in urls):
            raise self.refuse(
                f"'storage' is {shown(repr(given))}; it has to be a URL, such as 'file:///var/kvarve?capacity=100GiB', "
                f"or a list of URLs, nearest first"
            )
        try:
            parse_urls(urls)
        except ConfigError as e:
            raise self.refuse(str(e)) from None
        return tuple(urls)

    def needed_storage(self) -> tuple[str, ...]:
        if found := self.storage():
            return found
        raise self.refuse("'storage' is missing: give a URL, such as 'file:///var/kvarve?capacity=100GiB'")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.refuse(f"{key!r} is {value!r}; it has to be a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(f"{key!r} is {value!r}; it has to be true or false")
        return value

    def seconds(self, key: str, default: float, below: float = inf) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
            most = f" and below {below:g}" if below < inf else ""
            raise self.refuse(f"{key!r} is {value!r}; it has to be a number of seconds above 0{most}, such as 5")
        return float(value)

    def size(self, key: str, default: int, least: int = 1) -> int:
        value = self.values.get(key, default)
        try:
            size = parse_size(value) if isinstance(value, str) else value
        except ConfigError as e:
            raise self.refuse(f"{key!r}: {e}") from None
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            what = f"a size of at least {format_size(least)}" if least > 1 else "a size"
            raise self.refuse(f"{key!r} is {value!r}; it has to be {what}, such as '4GiB'")
        return size
