"""Many short lives of the core, with everything that can go wrong; and whether the world that watches them can see."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvarve.core.copies.backups import Backups
from kvarve.core.core_config import CoreConfig, Counters
from kvarve.core.lease import Lease, Phase
from kvarve.core.observe.reasons import Reason
from kvarve.core.policies import Policies
from kvarve.core.requests.growth import Growth
from kvarve.core.requests.resume import Resumption
from kvarve.core.tree.prefix_tree import PrefixTree
from kvarve.core.tree.tree import Run
from kvarve.pages.boundaries import members
from tests.sim.world import Life, Trouble, attempt, born, live, shrink
from tests.sim.world.__main__ import main
from tests.sim.world.life import ACTIONS
from tests.sim.world.scenes import configure, draw

CHUNKS, CHUNK_STEPS = 20, 8000


@cache
def chunk(number: int) -> Counter[str]:
    """What happened in lives of consecutive seeds, until CHUNK_STEPS steps have been made."""
    steps, seen = 0, Counter[str]()
    for seed in count(1000 * number + 100):
        print(f"python -m tests.sim.world --seeds {seed}:{seed + 1}")
        world = live(*born(seed))
        steps, seen = steps + world.steps, seen + world.seen + world.happened()
        if steps >= CHUNK_STEPS:
            return seen
    raise AssertionError


def test_a_life_full_of_trouble_breaks_no_law() -> None:
    assert all(chunk(0)[f"hit pages from {tier}"] for tier in ("device", "host", "storage"))


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, CHUNKS))
def test_other_lives_break_no_law(number: int) -> None:
    assert chunk(number)


@pytest.mark.long
def test_the_world_sees_every_kind_of_thing_happen() -> None:
    """The lives above prove little if nothing ever hits, fails, comes too late, or runs out of slots."""
    expected = {f"counted {each.name}" for each in fields(Counters)}
    expected |= {f"hit pages from {tier}" for tier in ("device", "host", "storage")}
    expected |= {f"closed while {phase.value}" for phase in Phase if phase not in (Phase.OFFERED, Phase.CLOSED)}
    expected |= {f"reason {reason.value}" for reason in Reason if reason not in (Reason.ANSWER, Reason.ANOTHER_SAMPLE)}
    expected |= {
        "attached again",
        "attached an empty storage",
        "closed between grow and publish",
        "detached",
        "detached in flight",
        "duplicated",
        "ended before it began",
        "extended",
        "extended in place of others",
        "flushed with copies in flight",
        "forgotten by storage",
        "lost",
        "rotten in storage",
        "rotten in the host",
        "storage answers nothing",
        "handed over",
        "stores backed off",
        "storing paused",
        "storing went on",
        "torn",
        "tried at once",
        "verified",
    }
    seen = sum(map(chunk, range(5)), Counter[str]())
    assert not (missing := expected - set(+seen)), missing


# Policies that the core does not read: the runtime makes a patience of them, divides memory, or checks records.
BEYOND_THE_CORE = {
    "states",
    "storage_wait",
    "verify_host",
    "hash_sample",
}


def test_every_setting_of_the_core_is_drawn() -> None:
    drawn = [configure(draw(random.Random(seed))) for seed in range(200)]
    for each in fields(CoreConfig):
        if each.name != "page_tokens":
            assert len({repr(getattr(config, each.name)) for config in drawn}) > 1, each.name
    for each in fields(Policies):
        if each.name not in BEYOND_THE_CORE:
            assert len({getattr(config.policies, each.name) for config in drawn}) > 1, each.name


def test_the_same_seed_is_the_same_life() -> None:
    lives = born(2), born(2)
    one, two = (live(*life, 150) for life in lives)
    assert lives[0][0] == lives[1][0] and one.log == two.log


@pytest.mark.long
def test_ranks_in_processes_of_their_own_do_not_drift_apart() -> None:
    """Nothing that differs between processes, such as the order of a set of names, decides anything."""
    code = (
        "from tests.sim.world import born, dump, live; import hashlib\n"
        "for seed in range(5):\n"
        "    world = live(*born(seed))\n"
        "    print(hashlib.sha256(repr((world.log, dump(world.core))).encode()).hexdigest())"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1] and len({*told[0].split()}) == 5


# --- a world that finds nothing may be blind


def hand_the_wrong_slot(broken: pytest.MonkeyPatch) -> None:
    honest = Growth.slots

    def slots(growth: Growth, lease: Lease, pool: int) -> tuple[range, list[int]]:
        positions, found = honest(growth, lease, pool)
        turned = (growth._paths.slot_pools.capacity[pool] - 1 - slot for slot in found)
        return positions, [*turned] if growth._paths.lookbacks[pool] == 1 and lease.boundary > 2 else found

    broken.setattr(Growth, "slots", slots)


def mix_up_two_pages(broken: pytest.MonkeyPatch) -> None:
    """All that is counted stays right: only the bytes of two pages change places."""
    honest = Backups.make_resident

    def make_resident(backups: Backups, run: Run, place: int, local: int, slots: Sequence[int]) -> int:
        taken = honest(backups, run, place, local, slots)
        table = run.slots[place]
        for at in members(taken & ~1):
            if table is not None and table[at - 1] >= 0 and (run.first + at) % 5 == 4:
                table[at], table[at - 1] = table[at - 1], table[at]
        return taken

    broken.setattr(Backups, "make_resident", make_resident)


def never_lose_patience(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(Resumption, "check_deadline", lambda resumption, lease: None)


def throw_dice(broken: pytest.MonkeyPatch) -> None:
    honest = PrefixTree.touch

    def touch(tree: PrefixTree, run: Run, positions: int) -> None:
        honest(tree, run, positions)
        tree.tick += random.randrange(2)

    broken.setattr(PrefixTree, "touch", touch)


def broken_life() -> tuple[Life, Trouble]:
    for seed in range(200):
        life, dice = born(seed)
        try:
            live(life, dice)
        except Exception as error:  # noqa: BLE001 - whatever a broken core raises
            return life, Trouble.of(error)
    raise AssertionError("nothing was found in 200 lives")


@pytest.mark.long
@pytest.mark.parametrize("plant", [hand_the_wrong_slot, mix_up_two_pages, never_lose_patience, throw_dice])
def test_a_planted_bug_is_found_played_again_and_shrunk(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    life, trouble = broken_life()
    if plant is throw_dice:  # no life that throws dice can be played again
        assert "differs from rank 0" in trouble.text
        return
    again, done = attempt(life)
    assert again is not None and again.place == trouble.place and done == len(life.actions)
    shortest = shrink(life, trouble)
    assert len(shortest.actions) <= max(1, len(life.actions) // 2)
    found, _ = attempt(shortest)
    assert found is not None and found.place == trouble.place
    shortest.write(tmp_path / "life.json")
    assert Life.read(tmp_path / "life.json") == shortest
    monkeypatch.undo()
    assert attempt(life)[0] is None, "it was the planted bug that broke it"


# --- the command


@pytest.mark.long
def test_a_hunt_in_several_processes_tells_what_it_saw() -> None:
    command = [sys.executable, "-m", "tests.sim.world", "--seed", "3", "--steps", "2000", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "steps/s" in done.stdout and "hit pages from device" in done.stdout and "broke" not in done.stdout


@pytest.mark.long
def test_a_hunt_that_finds_something_keeps_it_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never_lose_patience(monkeypatch)
    assert main(["--seeds", "0:50", "--shrink", "3", "--out", str(tmp_path)]) == 1
    (kept,) = tmp_path.iterdir()
    told = capsys.readouterr().out
    assert f"--replay {kept}" in told and "waits longer than it should" in told and "1 broke" in told
    assert main(["--replay", str(kept)]) == 1
    monkeypatch.undo()
    assert main(["--replay", str(kept)]) == 0
    assert "nothing broke" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--seeds 5:3", "--steps many", "--steps 0", "--out /nowhere", "--seed -1"])
def test_an_argument_that_cannot_work_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(wrong.split())
    assert f"argument {wrong.split(maxsplit=1)[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("more", [None, {"format": "other"}, {"actions": [["fly", 1]]}, {"config": {"pools": []}}])
def test_a_file_that_is_no_life_is_refused(
    more: dict[str, Any] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "life.json"
    born(0)[0].write(path)
    path.write_text("[" if more is None else json.dumps(json.loads(path.read_text()) | more))
    assert main(["--replay", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "not a life" in told and told.count("\n") == 1


def test_an_action_that_means_nothing_does_nothing() -> None:
    """Shrinking drops actions that later ones refer to, so each action has to work in an empty world."""
    world = born(3)[0].world()
    steps = world.steps
    for name in ("claim", "close", "resumed", "lose", "again"):
        assert not ACTIONS[name](world, 7)
    assert not ACTIONS["grow"](world, 7, 1) and not ACTIONS["publish"](world, 7, 0)
    assert not ACTIONS["half"](world, 7, 0, 0, 0) and not ACTIONS["rot"](world, 7, 0, 0)
    assert world.steps == steps


@pytest.mark.long
def test_the_world_needs_neither_torch_nor_pytest() -> None:
    code = "import tests.sim.world.hunt, sys; sys.exit(not {'torch', 'pytest'}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
