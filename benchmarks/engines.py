"""What does kvarve cost behind another engine, and what does it bring?

    .venv/bin/python benchmarks/engines.py [--quick] [--json FILE] [--dir FOLDER] [--vllm-python PYTHON]

**The tier below vLLM's host memory**, without vLLM: jobs of chunks as vLLM sends them, from and into rows of shared
memory, through the index, the lanes, the breaker, the file store and the checks. The limit of this run, in turns with
it, is the better of one thread and eight that move the same bytes between the same rows and one file that has been
written before, past the page cache (direct I/O), without checks and syncs. `file_put_over_raw`: until every job has
ended, so until all is durable; `file_get_over_raw`: until every row has its bytes, after their check. Each is the
median of the ratios of the rounds, for the disk of a virtual machine is at times three times as fast as at others.

**Copies of the connector** between an engine's blocks and host memory, without vLLM (`behind/copies.py`):
`store_over_memcpy`, `load_over_memcpy`.

**The connector in vLLM** on a CPU (`behind/vllm.py`), by the Python of `--vllm-python`, of KVARVE_VLLM_PYTHON, or of
.venv-vllm, which `make test-engines` sets up; left out where there is none. A hybrid of 0.1 billion random parameters
in bfloat16, prompts of 2,000 tokens, one at a time: `external_hit_ttft`, until the first token when the device has
forgotten the prompt and host memory has it, over that of the same prompt cold; `cold_on_over_off`, until the last of
32 tokens of prompts that are never hit, with host memory and a file storage behind the engine over without, the median
of pairs in turns. `hit_tokens_over_tiering`: 200 conversations with tiny models, prompt tokens that were not computed,
over those with vLLM's own tiering with the same memory; the lowest of the models and sizes of memory.
"""

import mmap
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from behind import copies, vllm
from common import arguments, machine, show, watched, write_json
from kvarve.connectors.vllm.chunks import ChunkStore, namespace_of
from kvarve.storage import Breaker, FileStorage
from storage import GIB, MIB, THREADS, Raw, Taken, forget, timed

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Size:
    moved_bytes: int = GIB  # by each way, in each round
    row_bytes: int = MIB
    job_chunks: int = 32  # what a prompt of 512 tokens in blocks of 16 sends at once
    rounds: int = 10

    @property
    def chunks(self) -> int:
        return self.moved_bytes // self.row_bytes


QUICK = Size(moved_bytes=32 * MIB, rounds=2)


class Rows:
    """Rows of shared memory as vLLM's host tier has them, of which a quarter is moved; as `Raw` wants them."""

    def __init__(self, size: Size) -> None:
        self.page_bytes, self.count = size.row_bytes, size.chunks
        memory = np.frombuffer(mmap.mmap(-1, 4 * size.moved_bytes), np.uint8)
        self.rows = memory.reshape(4 * self.count, self.page_bytes)
        self.noise = np.random.default_rng(7).integers(0, 256, self.page_bytes, np.uint8)
        self.views = [memoryview(row) for row in self.rows[: self.count]]
        self.fill()

    def fill(self) -> None:
        """Each row differs from the others and from itself a round ago."""
        for number, row in enumerate(self.rows[: self.count]):
            row[:] = self.noise
            row[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)

    def blank(self) -> None:
        for row in self.rows[: self.count]:
            row[:4096] = 0

    def check(self) -> None:
        for number, row in enumerate(self.rows[: self.count]):
            assert bytes(row[:8]) == number.to_bytes(8, "little") and bytes(row[-64:]) == bytes(self.noise[-64:])


class Tier:
    """A store of chunks over files, as vLLM's tier uses it."""

    def __init__(self, folder: Path, rows: Rows, size: Size) -> None:
        self._rows, self._size, self._folder, self._jobs = rows, size, folder, 0
        files = FileStorage(folder, 4 * size.moved_bytes, b"bench", "benchmarks/engines.py")
        self._storage = Breaker(files, deadline_s=PATIENCE_S)
        self.chunks = ChunkStore(self._storage, rows.rows, namespace_of({}), deadline_s=PATIENCE_S)

    def keys(self, of_round: int) -> list[bytes]:
        return [
            of_round.to_bytes(4, "big") + number.to_bytes(28, "big") + bytes(4) for number in range(self._rows.count)
        ]

    def put(self, of_round: int) -> Taken:
        return timed(lambda: self._all(self.chunks.store, self.keys(of_round)))

    def get(self, of_round: int) -> Taken:
        """All of it from the disk."""
        forget(*self._folder.rglob("slab-??????"))  # not the tables, which opening reads
        self._rows.blank()
        taken = timed(lambda: self._all(self.chunks.load, self.keys(of_round)))
        self._rows.check()
        return taken

    def delete(self, of_round: int) -> None:
        self._storage.delete([self.chunks.name(key) for key in self.keys(of_round)])

    def _all(self, send: Callable[[int, Sequence[bytes], Sequence[int]], None], keys: Sequence[bytes]) -> None:
        left = 0
        for at in range(0, len(keys), self._size.job_chunks):
            part = keys[at : at + self._size.job_chunks]
            self._jobs, left = self._jobs + 1, left + 1
            send(self._jobs, part, range(at, at + len(part)))
        while left:
            assert self.chunks.wait(PATIENCE_S)
            for ended in self.chunks.ended():
                assert not ended.bad, self.chunks.counts
                left -= 1


def tier_rounds(folder: Path, size: Size) -> Iterator[dict[str, Taken]]:
    """What each way took in each round, the tier and the limit in turns; a first round only warms up."""
    rows = Rows(size)
    tier = Tier(folder / "store", rows, size)
    limits = [Raw(folder / "raw", rows, True, threads) for threads in THREADS]
    limits[0].allocate()
    limits[0].write()
    for number in watched(range(size.rounds + 1), "round", size.rounds + 1):
        taken: dict[str, Taken] = {}

        def ours(number: int = number, taken: dict[str, Taken] = taken) -> None:
            taken["tier put"], taken["tier get"] = tier.put(number), tier.get(number)
            tier.delete(number)

        def raw(taken: dict[str, Taken] = taken) -> None:
            for threads, limit in zip(THREADS, limits, strict=True):
                taken[f"raw write, {threads}"] = timed(limit.write)
                taken[f"raw read, {threads}"] = timed(limit.read)

        for each in (ours, raw) if number % 2 else (raw, ours):
            each()
        if number:
            yield taken
    tier.chunks.close()


def tier_ratios(rounds: Sequence[dict[str, Taken]]) -> dict[str, float]:
    def over(ours: str, raw: str) -> float:
        return median(
            min(each[f"{raw}, {threads}"].seconds for threads in THREADS) / each[ours].seconds for each in rounds
        )

    return {"file_put_over_raw": over("tier put", "raw write"), "file_get_over_raw": over("tier get", "raw read")}


def tier_rows(rounds: Sequence[dict[str, Taken]], size: Size) -> list[dict[str, object]]:
    """A table: the best of the rounds."""
    return [
        {
            "what": what,
            "GB/s": size.moved_bytes / min(each[what].seconds for each in rounds) / 1e9,
            "CPU ms per GiB": 1000 * min(each[what].cpu_s for each in rounds) * GIB / size.moved_bytes,
        }
        for what in rounds[0]
    ]


def main() -> int:
    parser = arguments("What does kvarve cost behind another engine, and what does it bring?")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where the files are written; a temporary folder")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="of the environment that has vLLM")
    parser.add_argument(
        "--vllm-tp", type=int, default=1, metavar="N", help="with more than one: only cold and hits in vLLM"
    )
    args = parser.parse_args()
    quick, about, python = args.quick, machine(), vllm.python_of(args.vllm_python)
    size = QUICK if quick else Size()
    tables: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvarve-bench-", dir=args.dir) as name:
        folder = Path(name)
        if python is not None and args.vllm_tp > 1:
            rows, ratios = vllm.cost(python, folder, vllm.QUICK if quick else vllm.Size(), args.vllm_tp)
            return told({f"A hybrid of 0.1B in vLLM, {args.vllm_tp} workers": rows}, ratios, about, args.json)
        rounds = [*tier_rounds(folder, size)]
        ratios = tier_ratios(rounds)
        title = f"vLLM's tier, {size.chunks} chunks of {size.row_bytes // MIB} MiB; best of {size.rounds}"
        tables[title] = tier_rows(rounds, size)
        copied = copies.QUICK if quick else copies.Size()
        rows, found = copies.measure(copied)
        ratios |= found
        tables[f"Copies of {copied.payload_bytes // MIB} MiB; best of {copied.rounds}"] = rows
        if python is not None:
            asked = vllm.QUICK if quick else vllm.Size()
            rows, found = vllm.cost(python, folder, asked)
            ratios |= found
            tables[f"A hybrid of 0.1B in vLLM, {asked.prompt_tokens} tokens; median of {asked.pairs} pairs"] = rows
            single, many, found = vllm.kept(python, folder, asked)
            ratios |= found
            tables["Tokens that are not computed of a prompt that the device has forgotten (1,000 are kept)"] = single
            tables[f"{asked.talks} conversations"] = many
    return told(tables, ratios, about, args.json)


def told(
    tables: dict[str, list[dict[str, object]]], ratios: dict[str, float], about: dict[str, object], json: Path | None
) -> int:
    for title, rows in tables.items():
        show(title, rows)
    for ratio, value in ratios.items():
        print(f"{ratio}: {value:.3f}")
    rows = [{"table": title} | row for title, table in tables.items() for row in table]
    write_json(json, {"machine": about, "rows": rows, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
