"""What kvarve does where torch is not installed; prints what it finds, for tests that run it by itself.

python without_torch.py EMPTY_FOLDER TRACE
"""

import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO

import kvarve
from kvarve import BufferSpec, CacheConfig, CacheScheduler, ModelIdentity, PoolSpec, Tier
from kvarve.cli.main import main
from kvarve.storage import open_storage

FOLDER, TRACE = sys.argv[1:]
IDENTITY = ModelIdentity(
    "test", "weights", "float32", 64, 64, (PoolSpec("kv", (BufferSpec("k", (64, 8), "float32"),), None),)
)


def command(*words: str) -> tuple[int, str]:
    """The exit code, and what it has written to standard output, or the error."""
    out, error = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        code = main(words)
    return code, out.getvalue() + error.getvalue()


assert find_spec("torch") is None

# A scheduler in a process without a worker, which would write the pages.
scheduler = CacheScheduler(IDENTITY, CacheConfig("1MiB"), {Tier.DEVICE: (8,)})
lease = scheduler.open(range(130))
assert scheduler.claim(lease)
assert [*scheduler.grow(lease, 2)["kv"]] == [0, 1]
scheduler.publish(lease, 2)
scheduler.close(lease)
print("hit:", scheduler.lookup(range(130)).device)

# A storage, and the tools that look at its folder.
url = f"file://{FOLDER}?capacity=64MiB"
with open_storage(url, label=IDENTITY.fingerprint(), description=str(IDENTITY)) as storage:
    assert storage.put(["some-page"], [memoryview(b"bytes" * 100)]) == [True]
for name in ("stat", "verify", "gc"):
    assert command("storage", name, FOLDER)[0] == 0, name
print("stored:", "1 object" in command("storage", "ls", FOLDER)[1])

# The planner.
words = "--device-memory", "1GB", "--host-memory", "2GB", "--kv-bytes-per-token", "24KiB"
print("saved:", "of the computation saved" in command("simulate", TRACE, *words)[1])

# What computes says what it needs.
for name in ("models", "verify", "serve", "demo"):
    print(*command(name), sep=" ", end="")
try:
    kvarve.PrefixCache  # noqa: B018
except ImportError as e:
    print(e)
