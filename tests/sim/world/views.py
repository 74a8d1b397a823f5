"""Views of a core for checks and tests: its runs, its whole state as plain values, and whether two cores are equal.

The invariants are in `core/audit.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from kvarve.core.copies.in_flight import Op
from kvarve.core.core import Core
from kvarve.core.lease import Lease
from kvarve.core.tree.tree import Run

_POINTERS = {"parent", "children", "pins", "prefix_pins"}
_known_of_run = attrgetter(*(name for name in Run.__slots__ if name not in _POINTERS))
_op_facts = attrgetter(*(each.name for each in fields(Op) if each.name not in ("lease", "joined", "run")))
_lease_facts = attrgetter(*(name for name in Lease.__slots__ if name != "run"))


def runs(core: Core) -> Iterator[Run]:
    stack: list[Run] = [*core.tree.roots.values()]
    while stack:
        run = stack.pop()
        yield run
        stack.extend(run.children.values())


def _pinned(run: Run) -> list[tuple[int, ...]]:
    return [pins._planes for pins in (*run.pins, *run.prefix_pins)]


def _run_facts(run: Run) -> tuple[Any, list[tuple[int, ...]]]:
    return _known_of_run(run), _pinned(run)


def differ(one: Core, two: Core) -> str:
    """The first difference between two cores; empty if equal. As strict as comparing dumps, and much faster."""
    twin: dict[int, Run | None] = {id(None): None}
    if [*one.tree.roots] != [*two.tree.roots]:
        return "roots"
    stack: list[tuple[Run, Run]] = [*zip(one.tree.roots.values(), two.tree.roots.values(), strict=True)]
    while stack:
        left, right = stack.pop()
        twin[id(left)] = right
        if _run_facts(left) != _run_facts(right) or [*left.children] != [*right.children]:
            return "runs"
        stack.extend(zip(left.children.values(), right.children.values(), strict=True))

    def same(left: Run | None, right: Run | None) -> bool:
        return twin[id(left)] is right if id(left) in twin else right is not None and not right.pages

    if one.slot_pools.free != two.slot_pools.free or one.tree.tick != two.tree.tick:
        return "slot_pools"
    for ours, theirs in zip(one.candidates.orders.values(), two.candidates.orders.values(), strict=True):
        standing = ours.runs(), theirs.runs()
        if len(standing[0]) != len(standing[1]) or not all(map(same, *standing)):
            return "eviction orders"
    if one.counters != two.counters or one.residency.evicted != two.residency.evicted:
        return "counters"
    if [*one.leases] != [*two.leases] or [*one.copies.ops] != [*two.copies.ops]:
        return "leases or copies"
    for lease, other in zip(one.leases.values(), two.leases.values(), strict=True):
        if _lease_facts(lease) != _lease_facts(other) or not same(lease.run, other.run):
            return f"lease {lease.number}"
    for op, its in zip(one.copies.ops.values(), two.copies.ops.values(), strict=True):
        if _op_facts(op) != _op_facts(its) or _whose(op) != _whose(its) or not same(op.run, its.run):
            return "a copy"
    lines = [
        (dirty.to_host, dirty.to_store, dirty.busy, dirty.quarantined)
        for dirty in (one.backups.dirty, two.backups.dirty)
    ]
    for our_line, their_line in zip(*lines, strict=True):
        if len(our_line) != len(their_line) or not all(map(same, our_line, their_line)):
            return "pending stores"
    if (
        _weather(one) != _weather(two)
        or vars(one.governor) != vars(two.governor)
        or [*one.prefetch.deferred] != [*two.prefetch.deferred]
        or [*one.prefetch.landing] != [*two.prefetch.landing]
        or _flying(one) != _flying(two)
    ):
        return "what waits"
    return ""


def _whose(op: Op) -> list[int]:
    return [lease.number for lease in (op.lease, *op.joined) if lease is not None]


def _flying(core: Core) -> list[tuple[bytes, int, list[int]]]:
    return [(head, of, [*ops]) for head, each in core.prefetch.flying.items() for of, ops in each.items()]


def _weather(core: Core) -> tuple[Any, ...]:
    storage, dirty = core.storage, core.backups.dirty
    return (
        storage.failures,
        storage.back_off_until,
        storage.down,
        *dirty.blocked,
        dirty.look_again,
        [*dirty.quarantined.values()],
    )


def dump(core: Core) -> Mapping[str, Any]:
    """The whole state of a core as plain values: equal dumps, equal cores."""
    names: dict[int, tuple[bytes, bytes]] = {}

    def describe(root: bytes, run: Run, above: bytes = b"") -> Any:
        names[id(run)] = (root, above + run.tokens[: run.width])
        return (
            [(each, _plain(getattr(run, each), {})) for each in Run.__slots__ if each not in _POINTERS | {"slots"}],
            [table and table.tolist() for table in run.slots],
            _pinned(run),
            [(first, describe(root, child, above + run.tokens)) for first, child in run.children.items()],
        )

    trees = [(root, describe(root, run)) for root, run in core.tree.roots.items()]
    gone = (b"", b"")
    return {
        "trees": trees,
        "free": [slots.tolist() for slots in core.slot_pools.free],
        "orders": [[names.get(id(run), gone) for run in order.runs()] for order in core.candidates.orders.values()],
        "evicted": [*core.residency.evicted],
        "tick": core.tree.tick,
        "pending_backup": [names.get(id(run), gone) for run in core.backups.dirty.to_host],
        "pending_store": [names.get(id(run), gone) for run in core.backups.dirty.to_store],
        "busy": [names.get(id(run), gone) for run in core.backups.dirty.busy],
        "parked": [names.get(id(run), gone) for run in core.backups.dirty.quarantined],
        "weather": _weather(core),
        "governor": {name: _plain(value, {}) for name, value in vars(core.governor).items()},
        "deferred": [*core.prefetch.deferred],
        "landing": [*core.prefetch.landing],
        "counts": (
            core.backups.in_flight,
            [*core.backups.storing],
            [*core.backups.staging],
            [*core.prefetch.held],
            core.residency.bad_pages,
        ),
        "storage": core.storage.attached,
        "number": core.copies.sent,
        "effects": [*core.copies.effects],
        "counters": vars(core.counters).copy(),
        "leases": [
            [(each, _plain(getattr(lease, each), names)) for each in Lease.__slots__] for lease in core.leases.values()
        ],
        "ops": [(number, *_op_facts(op), _whose(op), names.get(id(op.run))) for number, op in core.copies.ops.items()],
    }


def _plain(value: Any, names: dict[int, tuple[bytes, bytes]]) -> Any:
    if isinstance(value, Run):
        return names.get(id(value))
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, list):
        return [dict(each) if isinstance(each, dict) else each for each in value]
    if isinstance(value, dict):
        return dict(value)
    return value
