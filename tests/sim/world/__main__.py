"""Search for failures of the core in many short lives: python -m tests.sim.world --seed 7 --steps 100000

A failing life is shrunk to the fewest actions that fail in the same way, printed, and saved to a file.
"""

import argparse
import sys
import time
from itertools import count
from pathlib import Path

from kvarve.errors import ConfigError
from tests.sim.world.hunt import Tally, hunt
from tests.sim.world.life import Life
from tests.sim.world.shrink import Trouble, attempt, shrink

LIVES_PER_SEED = 10**6
REPORT_S = 10.0
KINDS = {
    "engine": "lives of an engine's scheduler over the core",
    "ranks": "lives of two to eight ranks with their own protocol",
    "blocks": "lives of a core over an engine's blocks",
}


def run(options: argparse.Namespace) -> int:
    """Run lives until enough steps have been made, or one has failed."""
    tally, told = Tally(), time.monotonic()
    seeds = iter(options.seeds) if options.seeds else count(options.seed * LIVES_PER_SEED)
    for story in hunt(seeds, options.jobs, options.kind):
        tally.add(story)
        if story.broken and tally.troubles[story.broken[1].place] == 1:
            report(*story.broken, options)
        if time.monotonic() > told + REPORT_S:
            told = time.monotonic()
            print(tally.line(), file=sys.stderr, flush=True)
        if (options.steps and tally.steps >= options.steps) or (tally.troubles and not options.all):
            break
    print(f"\n{tally.line()}")
    for what, times in sorted(tally.seen.items()):
        print(f"{times:12,} {what}")
    for place, times in tally.troubles.most_common():
        print(f"{times:12,} lives broke: {place}")
    return int(bool(tally.troubles))


def report(life: Life, trouble: Trouble, options: argparse.Namespace) -> None:
    print(f"life {life.seed} broke after {len(life.actions)} actions; shrinking ...", file=sys.stderr, flush=True)
    shortest = shrink(life, trouble, options.shrink)
    path: Path = options.out / f"life-{life.seed}.json"
    shortest.write(path)
    show(shortest)
    print(f"\nthis again:        python -m tests.sim.world --replay {path}")
    kind = "" if options.kind == "core" else f"--{options.kind} "
    print(f"all of that life:  python -m tests.sim.world {kind}--seeds {life.seed}:{life.seed + 1}", flush=True)


def show(life: Life) -> int:
    """Replay a life and print it; 1 if it fails."""
    trouble, done = attempt(life)
    print(f"\nlife {life.seed}: {life.ranks} ranks, {life.config}")
    for action in life.actions[:done]:
        print("   ", action)
    print(trouble.text.rstrip() if trouble else f"{done} actions, and nothing broke")
    return int(trouble is not None)


def seeds_of(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds such as 0:100")
    return range(int(first), int(last))


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def positive(text: str) -> int:
    if not natural(text):
        raise argparse.ArgumentTypeError("0 is too few")
    return int(text)


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


def parse(arguments: list[str]) -> argparse.Namespace:
    about = "Hunt for trouble in the core: many short lives of random requests and random trouble, all of it checked."
    parser = argparse.ArgumentParser("python -m tests.sim.world", description=about)
    parser.add_argument("--seed", type=natural, default=0, help="where to begin; each seed has a million lives")
    parser.add_argument("--seeds", type=seeds_of, metavar="A:B", help="these lives, each by its own seed")
    kinds = parser.add_mutually_exclusive_group()
    for kind, about in KINDS.items():
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="core", help=about)
    parser.add_argument(
        "--steps", type=positive, help="stop after this number of inputs to the core (100,000 unless --seeds)"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="processes")
    parser.add_argument("--all", action="store_true", help="go on after a failure, and report each kind once")
    parser.add_argument("--shrink", type=natural, default=60, metavar="SECONDS", help="time to shrink a failure")
    parser.add_argument("--out", type=folder, default=Path(), help="folder for the lives that broke")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play a life that broke, and nothing else")
    options = parser.parse_args(arguments)
    if not options.steps and not options.seeds:
        options.steps = 100_000
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        return show(Life.read(options.replay)) if options.replay else run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
