"""Pictures of hit rates over memory, which are read on a light page and on a dark one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvarve.pages.sizes import format_size

PICTURES = (".svg", ".png", ".pdf")
INK = "#7a7a7a"  # as far from white as from black


def pyplot() -> Any:
    """matplotlib's, which draws into files. It is slow to import, and ImportError says that it is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextmanager
def chart(path: Path, title: str, memory: str) -> Iterator[Any]:
    """Axes without a background: hit rates from 0 over bytes of memory, of which each line has its label at its end."""
    plt = pyplot()
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with plt.rc_context(colors | {"svg.hashsalt": "kvarve", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        yield axes
        axes.set_xscale("log", base=2)
        axes.set(ylim=(0, 100), xlabel=memory, ylabel="hit, % of prompt tokens", title=title)
        axes.xaxis.set_major_formatter(lambda size, _: format_size(int(size)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        _apart(axes)
        figure.savefig(path, dpi=130, transparent=True)
        plt.close(figure)


def line(axes: Any, sizes: Sequence[int], hit: Sequence[float], label: str, **style: Any) -> None:
    """One line; `hit` are shares."""
    drawn = axes.plot(sizes, [100 * each for each in hit], **{"marker": "o", "markersize": 3} | style)
    at = (sizes[-1], 100 * hit[-1])
    color = drawn[0].get_color()
    axes.annotate(label, at, (6, 0), textcoords="offset points", va="center", color=color, gid="end")


def mark(axes: Any, size: int, label: str, *, right: bool = False) -> None:
    """A size of memory that matters; its label stands left of it, or right."""
    axes.axvline(size, color=INK, linewidth=1, linestyle=":")
    axes.annotate(
        label,
        (size, 2),
        (4 if right else -4, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        rotation=90,
        fontsize=8,
    )


def _apart(axes: Any) -> None:
    """Labels at the lines' ends do not lie on one another: each is moved above the one below."""
    lowest = -100.0
    labels = sorted((each for each in axes.texts if each.get_gid() == "end"), key=lambda each: each.xy[1])
    for each in labels:
        lowest = max(each.xy[1], lowest + 4.5)  # in percent
        each.set_position((6, (lowest - each.xy[1]) * 2.4))  # points for a percent
