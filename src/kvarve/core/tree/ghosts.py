"""What has left memory: the tokens of the pages of each salt that were evicted last, and the tier that had them last.

Where a prompt leaves another one that has been evicted meanwhile, the next such prompt will branch off too, so a state
is worth keeping there; and a request can be told why its pages are gone. Pages that leave together are one piece, named
by a hash of all tokens up to the end of its first page, so an eviction costs one entry however many pages it has. A
page is in the tree or in one piece; so the piece of a page whose parent is elsewhere begins with it.
"""

from collections import OrderedDict
from typing import NamedTuple

from xxhash import xxh3_64

from kvarve.core.tree.tree import Run, same_pages
from kvarve.pages.pools import Tier

LEAST = 1024  # pages of a salt, at least


class Left(NamedTuple):
    """What is remembered of a prompt's pages behind those that the tree knows."""

    tiers: tuple[tuple[Tier, int], ...] = ()  # the tier that had them last, and how many in a row
    pages: int = 0  # all of them
    followed: bool = False  # whether another page has followed the last of them
    whole: bool = True  # whether no page of the salt has been forgotten: what is not remembered has never been there


NEVER, FORGOTTEN = Left(), Left(whole=False)  # where nothing is remembered


class _Piece:
    """Pages that left together."""

    __slots__ = ("followed", "tier", "tokens")

    def __init__(self, tokens: bytes, tier: Tier, followed: bool) -> None:
        self.tokens, self.tier, self.followed = tokens, tier, followed


class _Salt:
    __slots__ = ("pages", "pieces", "whole")

    def __init__(self, whole: bool) -> None:
        self.pieces: OrderedDict[int, _Piece] = OrderedDict()  # by name, the oldest first
        self.pages, self.whole = 0, whole


class Ghosts:
    def __init__(self, limit: int, width: int) -> None:
        """`limit`: pages that are remembered of all salts together; a salt that has more than its even share loses its
        own first. `width`: bytes of a page's tokens."""
        self._limit, self._width = limit, width
        self._pages = 0
        self._of: OrderedDict[bytes, _Salt] = OrderedDict()  # by root key
        self._whole = True  # no salt has been forgotten whole
        self._last: tuple[bytes, int, bytes, tuple[int, xxh3_64]] | None = None  # what `_first` was asked last

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_last": None}  # a hash that has begun cannot be copied

    def left(self, run: Run, start: int, stop: int, tier: Tier) -> None:
        """The pages of a run between two local positions leave the tree; the run has their tokens still."""
        above, path = run.parent, []
        while above is not None and above.parent is not None:
            path.append(above)
            above = above.parent
        assert above is not None
        trail, width = xxh3_64(above.named), self._width
        for each in reversed(path):
            trail.update(each.tokens)
        trail.update(run.tokens[: (start + 1) * width])
        salt = self._of.get(above.named)
        if salt is None:
            salt = self._of[above.named] = _Salt(self._whole)
        self._of.move_to_end(above.named)
        piece = _Piece(run.tokens[start * width : stop * width], tier, stop < run.pages or run.followed)
        self._put(salt, trail.intdigest(), piece)
        if self._pages > self._limit:
            self._forget(above.named)

    def came(self, root: bytes, tokens: bytes, known: int, end: int) -> bool:
        """Pages [known, end) of a prompt are in the tree again; whether another page has followed the last of them."""
        salt, at, width, followed = self._of.get(root), known * self._width, self._width, False
        if salt is None:
            return False
        name, first = self._first(root, tokens, at)
        if name not in salt.pieces:
            return False
        trail, stop = first.copy(), end * width
        while at < stop:
            piece = salt.pieces.get(name)
            same = min(self._same(piece, tokens, at), stop - at) if piece else 0
            if not piece or not same:
                break
            self._take(salt, name)
            trail.update(tokens[at + width : at + same])
            if rest := piece.tokens[same:]:
                after = trail.copy()
                after.update(rest[:width])
                self._put(salt, after.intdigest(), _Piece(rest, piece.tier, piece.followed))
            at += same
            followed = at == stop and (piece.followed or bool(rest))
            trail.update(tokens[at : at + width])
            name = trail.intdigest()
        self._drop_empty(root)
        return followed

    def of(self, root: bytes, tokens: bytes, known: int) -> Left:
        """What is remembered of a prompt (packed tokens, under a root key) behind its first `known` pages, which are in
        the tree."""
        salt, at, width = self._of.get(root), known * self._width, self._width
        if salt is None:
            return NEVER if self._whole else FORGOTTEN
        name, first = self._first(root, tokens, at)
        if name not in salt.pieces:
            return NEVER if salt.whole else FORGOTTEN
        tiers: list[tuple[Tier, int]] = []
        trail, followed = first.copy(), False
        while at + width <= len(tokens):
            piece = salt.pieces.get(name)
            same = self._same(piece, tokens, at) if piece else 0
            if not piece or not same:
                break
            trail.update(tokens[at + width : at + same])
            at += same
            tiers.append((piece.tier, same // width))
            followed = piece.followed or same < len(piece.tokens)
            trail.update(tokens[at : at + width])
            name = trail.intdigest()
        return Left(tuple(tiers), at // width - known, followed, salt.whole)

    def _first(self, root: bytes, tokens: bytes, at: int) -> tuple[int, xxh3_64]:
        """The name of the piece that begins with the page at a place, and the hash that it is taken from. A request
        asks for the same one twice."""
        last = self._last
        if last is not None and last[0] is tokens and last[1] == at and last[2] == root:
            return last[3]
        trail = xxh3_64(root)
        trail.update(memoryview(tokens)[: at + self._width])
        self._last = tokens, at, root, (trail.intdigest(), trail)
        return self._last[3]

    def _same(self, piece: _Piece, tokens: bytes, at: int) -> int:
        """How many bytes of a piece, in whole pages, are equal to those in `tokens`; 0 if only its name is."""
        if tokens.startswith(piece.tokens, at):
            return len(piece.tokens)
        return same_pages(piece.tokens, tokens, at, len(piece.tokens) // self._width, self._width) * self._width

    def _put(self, salt: _Salt, name: int, piece: _Piece) -> None:
        if name in salt.pieces:  # two names that are equal by chance
            self._take(salt, name)
            salt.whole = False
        salt.pieces[name] = piece
        pages = len(piece.tokens) // self._width
        salt.pages += pages
        self._pages += pages

    def _take(self, salt: _Salt, name: int) -> None:
        count = len(salt.pieces.pop(name).tokens) // self._width
        salt.pages -= count
        self._pages -= count

    def _forget(self, latest: bytes) -> None:
        while self._pages > self._limit:
            share = max(LEAST, self._limit // len(self._of))
            name = latest if latest in self._of and self._of[latest].pages > share else next(iter(self._of))
            salt = self._of[name]
            self._take(salt, next(iter(salt.pieces)))
            salt.whole = False
            self._drop_empty(name)

    def _drop_empty(self, root: bytes) -> None:
        """Salts out of use cost no memory."""
        if not self._of[root].pieces:
            self._whole = self._of.pop(root).whole and self._whole
