"""Which page is evicted first: one small file for each order, all behind one protocol."""

from collections.abc import Callable

from kvarve.core.eviction.auto import Auto
from kvarve.core.eviction.flops import Flops
from kvarve.core.eviction.lfu import Lfu
from kvarve.core.eviction.lru import Lru
from kvarve.core.eviction.order import Order, OrderContext
from kvarve.core.eviction.priority import Priority
from kvarve.core.eviction.s3fifo import S3Fifo
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
