"""Two servers, each a process as an operator starts it, on one master; and families whose pages people keep there."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mooncake_cluster import MASTER, METRICS, MIB, Cluster, kill, own_network, require_mooncake
from processes import until

from kvarve.bench import demo
from kvarve.cli.main import main
from kvarve.settings.commands import Demo
from tests.sim.models import save_checkpoint, tiny_grid, tiny_model

pytestmark = pytest.mark.long
WORDS = ("cat", "sat", "mat", "and", "dog", "lay", "under", "the", "tree", "while", "rain", "fell", "all", "night")


def prompt(seed: int) -> list[dict[str, str]]:
    """Some 1,500 tokens that no other seed begins with."""
    text = " ".join(WORDS[(seed * 7 + i * i) % len(WORDS)] for i in range(1200))
    return [{"role": "user", "content": f"Story {seed}: {text}"}]


class Servers:
    def __init__(self, folder: Path) -> None:
        self._folder, self._stacks = folder, dict[str, ExitStack]()

    def start(self, name: str) -> demo.Client:
        stack = self._stacks[name] = ExitStack()
        (self._folder / name).mkdir(exist_ok=True)
        storage = f"mooncake://{MASTER}?metrics={METRICS}"
        return stack.enter_context(
            demo.server(Demo(storage=storage), self._folder / name, self._folder / f"{name}.log")
        )

    def stop(self, name: str) -> None:
        self._stacks.pop(name).close()

    def close(self) -> None:
        for name in [*self._stacks]:
            self.stop(name)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, Servers]]:
    require_mooncake()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with own_network():
        cluster, servers = Cluster(tmp_path, "--client_ttl=2"), Servers(tmp_path)
        try:
            yield cluster, servers
            servers.close()
        finally:
            cluster.close()


def ask(client: demo.Client, seed: int, **more: Any) -> demo.Record:
    return client.chat(prompt(seed), 8, **({"read_cache": True} | more))


def emptied(client: demo.Client) -> demo.Client:
    """All computed pages are in storage now, and only there."""
    client.flush("device,host")
    return client


def handed_over(prefill: demo.Client, decode: demo.Client, seed: int) -> demo.Record:
    """The answer of the second server to a prompt that the first one has prefilled."""
    asked = emptied(prefill).chat(prompt(seed), 1, True, kv_transfer_params={"hand_over_s": 60})
    emptied(prefill)
    return ask(decode, seed, kv_transfer_params=asked.transfer)


def test_what_one_server_computed_the_other_has_and_a_restarted_one_has_it_at_once_and_a_lost_master_costs_nothing(
    world: tuple[Cluster, Servers], tmp_path: Path
) -> None:
    cluster, servers = world
    cluster.owner(256 * MIB)
    one, two = servers.start("one"), servers.start("two")
    cold = {seed: ask(one, seed) for seed in range(2)}
    assert all(not sum(answer.cached.values()) for answer in cold.values())
    emptied(one)

    for seed, answer in cold.items():
        again = ask(two, seed)
        assert again.text == answer.text
        assert again.cached["storage"] >= 0.8 * again.prompt

    alone = ask(one, 4, read_cache=False, cache_salt="another")
    second = handed_over(one, two, 4)
    assert second.text == alone.text
    assert second.cached["storage"] >= 0.8 * second.prompt

    servers.stop("one")
    one = servers.start("one")
    again = ask(one, 0)
    assert again.text == cold[0].text
    assert again.cached["storage"] >= 0.8 * again.prompt

    kill(cluster.master)
    for _ in range(2):
        for seed, answer in cold.items():
            assert ask(emptied(two), seed).text == answer.text
    servers.stop("one")
    one = servers.start("one")
    assert "down: served without it until it answers" in (tmp_path / "one.log").read_text()
    assert ask(one, 3).text == ask(two, 3).text

    cluster.start_master()

    def hits() -> bool:
        """The pages that server two has in memory are stored, and server one finds them."""
        ask(two, 1)
        emptied(two)
        again = ask(emptied(one), 1)
        assert again.text == cold[1].text
        return again.cached["storage"] >= 0.8 * again.prompt

    until(hits, "hits from the new master")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("deepseek_v32", ()),
        ("gpt_oss", ()),
        ("deepseek_v4", ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3")),
    ],
    ids=["latents and index keys", "windows and attention", "compressed in FP8"],
)
def test_a_hybrids_logits_are_those_without_a_cache_when_its_pages_come_from_mooncake(
    family: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    require_mooncake()
    save_checkpoint(tiny_model(family), tmp_path / family)
    page, chunk = tiny_grid(family)
    words = ("verify", "--model", tmp_path / family, "--page-tokens", page, "--chunk-tokens", chunk, "--quick")
    with own_network():
        cluster = Cluster(tmp_path)
        try:
            cluster.owner(256 * MIB)
            url = f"mooncake://{MASTER}?metrics={METRICS}"
            assert main([*map(str, (*words, "--storage", url, *more))]) == 0
        finally:
            cluster.close()
