"""Does any copy alter a page? Conversations through all tiers, while every page is compared before and after each copy.

The server compares (`--hash-sample 1` here, a share of all pages in production) and counts what it compared and what
differed. The seal of a page is made from its copy in the host, so a copy that alters a value is sealed and passes
every later check; this finds it.
"""

import asyncio
import re

from kvarve.bench.bench_command import Hash
from kvarve.bench.load import Round, check, connected
from kvarve.bench.run import in_rounds, shown, target
from kvarve.bench.workloads import drawn, random_turns
from kvarve.errors import KvarveError
from kvarve.reports import Printer, plain_table

EDGES = (("device", "host"), ("host", "storage"), ("storage", "host"), ("host", "device"))
OUTPUT_TOKENS = 8
_SAMPLE = re.compile(r'kvarve_(compared|altered)_pages_total\{source="(\w+)",target="(\w+)"\}')

Counts = dict[tuple[str, str, str], int]


def main(options: Hash) -> int:
    """0 if pages were compared and none was altered, 1 if one was. KvarveError: the server compares none."""
    printer = Printer(options.json)
    with target(options, "--hash-sample", "1") as url:
        rounds, counts = asyncio.run(_rounds(url, options))
    rows = [
        {"source": source, "target": to} | {name: counts.get((name, source, to), 0) for name in ("compared", "altered")}
        for source, to in EDGES
    ]
    if not any(row["compared"] for row in rows):
        raise KvarveError("the server compared no page: start it with --hash-sample 1")
    table = plain_table("from", "to", right=("pages compared", "altered"))
    for row in rows:
        table.add_row(str(row["source"]), str(row["target"]), f"{row['compared']:,}", f"{row['altered']:,}")
    printer.table(table)
    altered = any(row["altered"] for row in rows)
    printer.say("A copy alters pages: the server's log names them." if altered else "No copy altered a page.")
    requests = sum(len(each.records) for each in rounds)
    report = {"bench": "hash", "options": shown(options), "requests": requests, "edges": rows}
    return printer.write(report, int(altered))


async def _rounds(url: str, options: Hash) -> tuple[list[Round], Counts]:
    """The rounds, and what the server has counted by then."""
    rng = drawn(options, 14)
    asked = [random_turns(rng, options.turns, options.input_tokens, OUTPUT_TOKENS) for _ in range(options.clients)]
    async with connected(url, options) as client:
        rounds = await in_rounds(client, options, asked, options.clients, ignore_eos=True)
        check(record for each in rounds for record in each.records)
        found = ((_SAMPLE.fullmatch(name), value) for name, value in (await client.metrics()).items())
        return rounds, {(match[1], match[2], match[3]): int(value) for match, value in found if match}
