"""How soon does a decode server answer a prompt that another server has prefilled?

    .venv/bin/python benchmarks/hand_over.py [--quick] [--json FILE] [--dir FOLDER]

Two `kvarve serve` share a storage: files, then Mooncake if it is installed (a real master and an owner of memory in a
network of their own, which takes root). The first prefills a prompt (`max_tokens` 1) and gives a ticket; the second
answers the prompt with the ticket. In turns with that, the second answers the same prompt cold, under another salt. All
answers have to be the same. Ratios: `hand_over_file` and `hand_over_mooncake`, TTFT of the second over cold, medians of
all rounds, when the pages are in storage. `..._at_once`: the ticket is used while they may still be on their way there.

TTFT is the client's, over HTTP. Memory of both servers is emptied between requests, so that nothing but the storage has
the prompt.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from common import arguments, machine, show, watched, write_json
from kvarve.bench import demo
from kvarve.settings.commands import Demo

sys.path.remove(str(Path(__file__).parent))  # or mooncake.py would be taken for the library of its name
sys.path.append(str(Path(__file__).parents[1] / "tests" / "storage"))
from mooncake_cluster import MASTER, METRICS, Cluster, own_network

WITHIN_S = 30.0
CHUNK_CHARS = 1000  # about a chunk of a prompt: 256 tokens


@dataclass(frozen=True)
class Size:
    tokens: int = 3000  # of each prompt, about
    rounds: int = 8
    answer_tokens: int = 16


QUICK = Size(tokens=1000, rounds=1, answer_tokens=4)


@dataclass
class Figures:
    """Milliseconds of each round."""

    prefill: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    from_storage: list[int] = field(default_factory=list)
    from_storage_at_once: list[int] = field(default_factory=list)


class Pair:
    """A prefill server and a decode server; `messages` are new in every round."""

    def __init__(self, prefill: demo.Client, decode: demo.Client, size: Size) -> None:
        self.prefill, self.decode, self.size = prefill, decode, size
        (self._opening,) = demo.conversations(demo.Size(conversations=1, tokens=size.tokens))

    def round(self, number: int, figures: Figures) -> None:
        settled, at_once = self._messages(2 * number), self._messages(2 * number + 1)
        transfer = self._prefilled(settled, figures)
        self.prefill.flush("device,host")  # which waits until all pages are stored
        ways = (lambda: self._cold(settled), lambda: self._second(settled, transfer))
        if number % 2:
            cold, second = ways[0](), ways[1]()
        else:
            second, cold = ways[1](), ways[0]()
        transfer = self._prefilled(at_once, figures)
        soon = self._second(at_once, transfer)
        again = self._cold(at_once)
        assert (second.text, soon.text) == (cold.text, again.text), "the second server's answer is another one"
        assert second.cached["storage"] > 0, "nothing came from storage"
        figures.cold += [1e3 * cold.ttft_s, 1e3 * again.ttft_s]
        figures.second.append(1e3 * second.ttft_s)
        figures.at_once.append(1e3 * soon.ttft_s)
        figures.prompt_tokens += [second.prompt, soon.prompt]
        figures.from_storage.append(second.cached["storage"])
        figures.from_storage_at_once.append(soon.cached["storage"])

    def _messages(self, number: int) -> list[dict[str, str]]:
        system, user = self._opening
        cut = number * 211 % CHUNK_CHARS  # so that ends of all lengths are left to be computed
        return [system | {"content": f"{number}: {system['content']}"}, user | {"content": user["content"][cut:]}]

    def _prefilled(self, messages: list[dict[str, str]], figures: Figures) -> object:
        answer = self.prefill.chat(messages, 1, False, kv_transfer_params={"hand_over_s": WITHIN_S})
        assert answer.transfer is not None
        figures.prefill.append(1e3 * answer.ttft_s)
        return answer.transfer

    def _cold(self, messages: list[dict[str, str]]) -> demo.Record:
        return self._asked(messages, False, cache_salt="cold")

    def _second(self, messages: list[dict[str, str]], transfer: object) -> demo.Record:
        return self._asked(messages, True, kv_transfer_params=transfer)

    def _asked(self, messages: list[dict[str, str]], read: bool, **more: object) -> demo.Record:
        answer = self.decode.chat(messages, self.size.answer_tokens, read, **more)
        self.decode.flush("device,host")
        return answer


def measure(storage: str, url: str, folder: Path, size: Size) -> Figures:
    """All rounds over one storage, of which the first only warms up."""
    figures = Figures()
    for name in ("prefill", "decode"):
        (folder / name).mkdir()
    options = Demo(storage=url)
    with (
        demo.server(options, folder / "prefill", folder / "prefill.log") as prefill,
        demo.server(options, folder / "decode", folder / "decode.log") as decode,
    ):
        pair = Pair(prefill, decode, size)
        pair.round(0, Figures())
        for number in watched(range(1, size.rounds + 1), storage, size.rounds):
            pair.round(number, figures)
    return figures


@contextmanager
def mooncake(folder: Path) -> Iterator[str]:
    """The URL of a master with an owner of memory; this thread is in their network meanwhile."""
    with own_network():
        cluster = Cluster(folder)
        try:
            cluster.owner(1 << 30)
            yield f"mooncake://{MASTER}?metrics={METRICS}"
        finally:
            cluster.close()


def main() -> int:
    parser = arguments("How soon does a decode server answer a prompt that another server has prefilled?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where the files are written; a temporary folder")
    args = parser.parse_args()
    size, about = QUICK if args.quick else Size(), machine()
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as name:
        files, memory = Path(name) / "file", Path(name) / "mooncake"
        for folder in (files, memory):
            folder.mkdir()
        found["file"] = measure("file", f"file://{files / 'pages'}?capacity=4GiB", files, size)
        if find_spec("mooncake") is None:
            print("Mooncake is not installed, so it is left out")
        else:
            with mooncake(memory) as url:
                found["mooncake"] = measure("mooncake", url, memory, size)
    rows = [
        {
            "storage": storage,
            "tokens": round(median(each.prompt_tokens)),
            "hit": round(median(each.from_storage)),
            "at_once_hit": round(median(each.from_storage_at_once)),
            "prefill_ms": median(each.prefill),
            "cold_ms": median(each.cold),
            "second_ms": median(each.second),
            "at_once_ms": median(each.at_once),
        }
        for storage, each in found.items()
    ]
    ratios = {f"hand_over_{storage}": median(each.second) / median(each.cold) for storage, each in found.items()}
    ratios |= {
        f"hand_over_{storage}_at_once": median(each.at_once) / median(each.cold) for storage, each in found.items()
    }
    show(
        f"TTFT in ms, medians of {size.rounds} rounds",
        rows,
        ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in ratios.items()),
    )
    every = {
        storage: {"cold": each.cold, "second": each.second, "at_once": each.at_once} for storage, each in found.items()
    }
    write_json(args.json, {"machine": about, "rows": rows, "ratios": ratios, "ms_of_every_round": every})
    return 0


if __name__ == "__main__":
    sys.exit(main())
