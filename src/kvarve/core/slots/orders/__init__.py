"""Which page is evicted first: one small file for each order, all behind one protocol."""

from collections.abc import Callable

from kvarve.core.slots.orders.auto import Auto
from kvarve.core.slots.orders.flops import Flops
from kvarve.core.slots.orders.lfu import Lfu
from kvarve.core.slots.orders.lru import Lru
from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.slots.orders.priority import Priority
from kvarve.core.slots.orders.s3fifo import S3Fifo
from kvarve.errors import ConfigError

ORDERS: dict[str, Callable[[OrderContext], Order]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "priority": Priority,
    "flops": Flops,
    "auto": Auto,
}


def order_for(name: str, context: OrderContext) -> Order:
    """The eviction order of one slot pool; ConfigError if there is no such order."""
    if name not in ORDERS:
        raise ConfigError(f"unknown eviction order {name!r}; known: {', '.join(ORDERS)}")
    return ORDERS[name](context)
