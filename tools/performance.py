"""The table of docs/performance.md, from what the benchmarks wrote to benchmarks/results/: one file a benchmark."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
# By benchmark and ratio: what it is, and what it should be.
FIGURES: dict[str, dict[str, tuple[str, str]]] = {
    "core": {
        "restore_page_64_ms": ("scheduler's thread: restore of 100,000 tokens, 4 pools, pages of 64, ms", "<= 4"),
        "restore_page_16_ms": ("the same with pages of 16, ms", "<= 14"),
        "restore_page_64_over_sglang": ("the first, over SGLang's own match of as many tokens on its device", ""),
        "step_page_64_ms": ("a step of 256 running requests and nothing new, ms", "<= 0.3"),
        "bytes_per_token": ("memory of the tree, bytes a token", ""),
        "match_10x_tree": ("a match in a tree ten times as large", "1"),
    },
    "lanes": {
        "gather_over_memcpy": ("device and host: pages of 1 MiB, over one thread's memcpy", ">= 0.9"),
        "scattered_over_memcpy": ("pages of 40 layers, slots scattered at both ends", ">= 0.9 on a GPU"),
        "checked_over_memcpy": ("the same, sealed and checked", ">= 0.75 on a GPU"),
    },
    "storage": {
        "durable_put_over_raw": ("files: a durable, sealed put, over raw writes", ">= 0.9"),
        "cold_get_over_raw": ("a cold, checked get, over raw reads", ">= 0.95"),
        "put_small_over_lmdb": ("durable puts of 64 KiB, over LMDB", ">= 1"),
        "restore_over_raw": ("a prompt from files to the device, over raw reads", ">= 0.95"),
        "holds_128_us": ("128 names among a million, microseconds", ""),
    },
    "engine": {
        "cold_ttft_on_over_off": ("cold prompt of 4,112 tokens, with the cache over without", "1"),
        "decode_on_over_off": ("decoding, the same in tokens a second", "1"),
        "warm_host_ttft": ("warm from the host, over cold", ""),
        "warm_storage_ttft": ("warm from files, over cold", ""),
        "mixed_lengths": ("31 short answers beside one of 6,000 tokens, over alone", ">= 0.9"),
        "throughput_16_over_1": ("16 conversations, over one", ""),
        "elastic_over_fixed": ("memory that follows the traffic, over the best fixed division", ">= 1"),
    },
    "conversations": {
        "full_exact_over_kept": ("exact hits on answers at full load, over rounded ones", ">= 0.97"),
        "full_limit_over_kept": ("the limit of that", ""),
        "hits_half_exact_over_kept": ("their hits at half load", "1"),
    },
    "engines": {
        "file_put_over_raw": ("vLLM's tier on files: put, over raw", ">= 0.9"),
        "file_get_over_raw": ("get, over raw", ">= 0.9"),
        "load_over_memcpy": ("vLLM's blocks: host to device, over memcpy", ""),
        "external_hit_ttft": ("vLLM with kvarve: a hit from the host, over cold", "<= 0.25"),
        "cold_on_over_off": ("vLLM: a cold answer with kvarve, over without", "<= 1.03"),
        "hit_tokens_over_tiering": ("hit tokens, over vLLM's own tiering", ">= 1"),
    },
    "linker": {
        "hit_tokens_over_hicache": ("behind SGLang: hit tokens, over HiCache with its file backend", ">= 1"),
        "lookup_100k_ms": ("behind SGLang: a lookup of 100,000 tokens, ms of the scheduler's thread", "<= 2"),
        "hand_over_64_pages_ms": ("behind SGLang: the hand-over of 64 pages, ms of the same", "<= 1"),
    },
    "start": {
        "start_s": ("`kvarve serve` on the built-in model until it is ready, s", "<= 3"),
        "start_over_libraries": ("the same, over its libraries and transformers alone", ""),
        "busy_start_s": ("the first beside a busy loop on each core, s", ""),
    },
    "prefixes": {
        "warm_host": ("8,192 tokens from the host: time to first token, over cold", ""),
        "warm_storage": ("the same from files", ""),
    },
}


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _machine(about: dict[str, Any]) -> str:
    return str(about.get("gpu") or f"{about['cpu']}, {about['cores']} cores")


def table() -> str:
    """One row a figure that was measured."""
    rows = ["| what | figure | should be | command |", "|---|---|---|---|"]
    machines: dict[str, list[str]] = {}
    for name, figures in FIGURES.items():
        file = RESULTS / f"{name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        about = found["machine"]
        machines.setdefault(f"{_machine(about)}, {about['day']}", []).append(f"`{name}` at {about['commit']}")
        for ratio, (what, bar) in figures.items():
            if ratio in found["ratios"]:
                rows.append(f"| {what} | {_shown(found['ratios'][ratio])} | {bar} | `benchmarks/{name}.py` |")
    where = [f"- {machine}: {', '.join(names)}." for machine, names in machines.items()]
    return "\n".join([*rows, "", "Where and when:", "", *where]) + "\n"


def prefixes() -> str:
    """Time to first token by length and tier."""
    rows = json.loads((RESULTS / "prefixes.json").read_text())["rows"]
    found = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    found += [
        "| " + " | ".join(each if isinstance(each, str) else f"{each:.0f}" for each in row.values()) + " |"
        for row in rows
    ]
    return "\n".join(found) + "\n"
