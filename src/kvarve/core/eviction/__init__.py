"""Which page is evicted first: one small file for each order, all behind one protocol."""

from collections.abc import Callable

from kvarve.core.eviction.lfu import Lfu
from kvarve.core.eviction.lru import Lru
from kvarve.core.eviction.order import Order, OrderContext
from kvarve.core.eviction.priority import Priority
from kvarve.core.eviction.s3fifo import S3Fifo

ORDERS: dict[str, Callable[[OrderContext], Order]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "priority": Priority,
}
