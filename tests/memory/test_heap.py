import subprocess
import sys

PROGRAM = """
import sys, threading
from kvarve.system.heap import HEAPS, bound_heaps

assert bound_heaps() or sys.platform != "linux"
import ctypes
took = threading.Barrier(9)

def take():
    block = bytearray(4096)  # each thread has taken something from the C heap while all the others live
    ctypes.CDLL(None).malloc(1000)
    took.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
[thread.start() for thread in threads]
took.wait()
libc = ctypes.CDLL(None)
print(HEAPS, flush=True)
libc.malloc_stats()
"""


def test_many_threads_share_a_few_heaps() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    heaps = int(done.stdout)
    assert 1 <= done.stderr.count("Arena ") <= heaps


def test_what_is_spared_from_collection_stays_and_later_cycles_are_still_collected() -> None:
    program = """
import gc, weakref
from kvarve.system.heap import spare_from_collection

class Cycle:
    def __init__(self):
        self.it = self

before = Cycle()
gone = weakref.ref(Cycle())
spare_from_collection()
assert gone() is None, "garbage is not kept for ever"
assert gc.get_freeze_count() > 1000 and not any(each is before for each in gc.get_objects())
after = weakref.ref(Cycle())
gc.collect()
assert after() is None and before.it is before
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
