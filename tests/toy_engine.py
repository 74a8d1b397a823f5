"""A program over the public names of kvarve, as `help(kvarve)` tells them: an engine whose model keeps a running sum.

python toy_engine.py FOLDER
"""

import sys

from kvarve import BufferSpec, CacheConfig, ModelIdentity, PoolSpec, PrefixCache

PAGE = 64
tokens = [7 * number % 1000 for number in range(2 * PAGE + 2)]
pools = (PoolSpec("kv", (BufferSpec("sums", (PAGE,), "float32"),), lookback=None),)
identity = ModelIdentity("toy", "no weights", "float32", page_tokens=PAGE, chunk_tokens=PAGE, pools=pools)
config = CacheConfig("1MiB", "1MiB", storage=f"file://{sys.argv[1]}?capacity=64MiB")

with PrefixCache(identity, config) as cache:
    sums = cache.worker.arena("kv")["sums"]  # a tensor [slots, PAGE]
    lease = cache.open(tokens)
    while not cache.claim(lease):
        cache.wait(0.05)
        cache.step()
    pages = lease.boundary
    positions, slots = cache.pages(lease)["kv"]
    known = [float(value) for slot in slots for value in sums[slot]]
    print(f"{len(known) // PAGE} pages")
    while len(known) < len(tokens) // PAGE * PAGE:
        known.append((known[-1] if known else 0.0) + tokens[len(known)])
    for position, slot in cache.grow(lease, len(tokens) // PAGE)["kv"].items():
        sums[slot] = sums.new_tensor(known[position * PAGE : (position + 1) * PAGE])
    cache.publish(lease, len(tokens) // PAGE)
    cache.close(lease)

assert known == [float(sum(tokens[: count + 1])) for count in range(len(known))]
