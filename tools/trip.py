"""The way of one prompt's pages through the code: how many files it enters, and how many calls cross from file to file.

    .venv/bin/python tools/trip.py [--most N]

A prompt of 1,030 tokens is computed, its pages go to the host and to a folder, and each thread's calls are counted in
the meantime. A call crosses when it comes from another file of kvarve than the one that it enters.
"""

import argparse
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import kvarve
from kvarve.cache.config import CacheConfig
from kvarve.cache.prefix_cache import PrefixCache
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import load_model, quiet_libraries
from kvarve.reference.engine.requests import Request, Sampling

SOURCE = Path(kvarve.__file__).parent
TOKENS = 1030
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10, help="how many of the most frequent crossings to show")
    args = parser.parse_args()
    quiet_libraries()
    files: Counter[str] = Counter()
    crossings: Counter[tuple[str, str]] = Counter()

    def place(frame: FrameType | None) -> str | None:
        """The file of kvarve nearest to a frame; others, such as torch, are passed through."""
        while frame is not None:
            if (path := Path(frame.f_code.co_filename)).is_relative_to(SOURCE):
                return path.relative_to(SOURCE).as_posix()
            frame = frame.f_back
        return None

    def called(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(SOURCE)):
            return
        entered, caller = place(frame), place(frame.f_back)
        assert entered is not None
        files[entered] += 1
        if caller not in (None, entered):
            crossings[str(caller), entered] += 1

    model = load_model("builtin:tiny-hybrid")
    with tempfile.TemporaryDirectory(prefix="kvarve-trip-") as folder:
        settings = CacheConfig(64 * MIB, 64 * MIB, storage=f"file://{folder}/store?capacity=64MiB")
        cache = PrefixCache(model.identity, settings)
        threading.setprofile_all_threads(called) if sys.version_info >= (3, 12) else threading.setprofile(called)
        engine = Engine(model, cache).start()
        engine.submit(Request([1 + at % 500 for at in range(TOKENS)], Sampling(1, ignore_eos=True))).result(60.0)
        engine.settle()
        threading.setprofile(None)
        engine.shutdown()
    print(f"{TOKENS} tokens: {len(files)} files entered, {sum(crossings.values())} calls from file to file")
    for (caller, entered), count in crossings.most_common(args.most):
        print(f"{count:7}  {caller} -> {entered}")


if __name__ == "__main__":
    main()
