"""Which page is evicted first: all behind one protocol."""

from collections.abc import Callable

from kvarve.core.slots.orders.order import Lfu, Lru, Order, OrderContext, Priority
from kvarve.core.slots.orders.s3fifo import S3Fifo

ORDERS: dict[str, Callable[[OrderContext], Order]] = {
    "lru": Lru,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "priority": Priority,
}
