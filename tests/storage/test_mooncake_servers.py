"""A server on a Mooncake master that is lost, and replaced."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mooncake_cluster import MASTER, METRICS, MIB, Cluster, kill, own_network, require_mooncake, until

from kvarve import demo
from kvarve.commands import Demo

WORDS = ("cat", "sat", "mat", "and", "dog", "lay", "under", "the", "tree", "while", "rain", "fell", "all", "night")


@contextmanager
def serving(folder: Path) -> Iterator[demo.Client]:
    with demo.server(Demo(storage=f"mooncake://{MASTER}?metrics={METRICS}"), folder, folder / "log") as client:
        yield client


def ask(client: demo.Client, seed: int) -> demo.Answer:
    """Some 1,500 tokens that no other seed begins with."""
    text = " ".join(WORDS[(seed * 7 + i * i) % len(WORDS)] for i in range(1200))
    return client.chat([{"role": "user", "content": f"Story {seed}: {text}"}], 8, True)


@pytest.mark.long
def test_a_lost_master_costs_nothing_but_hits_and_another_one_is_used_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_mooncake()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with own_network(), ExitStack() as stack:
        cluster = Cluster(tmp_path, "--client_ttl=2")
        stack.callback(cluster.close)
        cluster.owner(256 * MIB)

        def is_warm(client: demo.Client) -> bool:
            """Of pages that are in storage alone."""
            ask(client, 0)
            client.flush("device,host")
            again = ask(client, 0)
            assert again.text == cold.text
            return again.by_tier["storage"] >= 0.8 * again.prompt

        with serving(tmp_path) as client:
            cold = ask(client, 0)
            assert is_warm(client)
            kill(cluster.master)
            assert not is_warm(client)
        with serving(tmp_path) as client:
            assert "down: served without it until it answers" in (tmp_path / "log").read_text()
            assert not is_warm(client)
            cluster.restart_master()
            until(lambda: is_warm(client), "hits from the new master")
