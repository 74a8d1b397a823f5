"""Which page is evicted first: one small file for each order, all behind one protocol."""

from collections.abc import Callable

from kvarve.core.slots.orders.lfu import Lfu
from kvarve.core.slots.orders.lru import Lru
from kvarve.core.slots.orders.order import Order, OrderContext
from kvarve.core.slots.orders.priority import Priority
from kvarve.core.slots.orders.s3fifo import S3Fifo

ORDERS: dict[str, Callable[[OrderContext], Order]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "priority": Priority,
}
