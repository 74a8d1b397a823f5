"""The figures of known times, and the table they make."""

import io

from rich.console import Console

from kvarve.bench.figures import figures, same_answers, table
from kvarve.bench.load import Record, Round
from kvarve.bench.run import bars


def record(**more: object) -> Record:
    """Due at 10 s, sent 0.1 s late, first text at 11 s, two more a second and three seconds later."""
    times = {"due_s": 10.0, "sent_s": 10.1, "first_s": 11.0, "end_s": 15.0, "gaps_s": [1.0, 3.0]}
    usage = {"prompt": 100, "completion": 5, "cached": {"device": 20, "host": 0, "storage": 44}, "text": "abc"}
    return Record(**(times | usage | more))  # type: ignore[arg-type]


def test_latencies_count_from_when_a_request_was_due() -> None:
    row = figures(Round("round 1", [record(), record(end_s=19.0)], 20.0))
    assert row["ttft_ms"] == {"mean": 1000.0, "median": 1000.0, "p99": 1000.0}
    assert row["e2e_ms"]["mean"] == 7000.0
    assert row["tpot_ms"]["mean"] == 1500.0, "(4 + 8) s over the four tokens after the first"
    assert row["itl_ms"]["median"] == 2000.0
    assert row["late_ms"]["mean"] == 100.0
    assert (row["requests_per_s"], row["input_tok_per_s"], row["output_tok_per_s"]) == (0.1, 10.0, 0.5)
    assert row["total_tok_per_s"] == 10.5
    assert row["cached_tokens"] == {"device": 40, "host": 0, "storage": 88}


def test_a_failed_request_counts_as_failed_and_nowhere_else() -> None:
    row = figures(Round("round 1", [record(), record(error="HTTP 503", prompt=999, end_s=99.0)], 10.0))
    assert (row["requests"], row["failed"], row["error"]) == (1, 1, "HTTP 503")
    assert row["prompt_tokens"] == 100 and row["e2e_ms"]["p99"] == 5000.0


def test_answers_are_compared_one_by_one() -> None:
    first = [record(), record(), record()]
    assert same_answers(first, [record(), record(text="other"), record(error="x")]) == 1


def test_a_request_that_ends_costs_the_client_no_look_at_those_before() -> None:
    looks = list[float]()

    class Seen(Record):
        @property
        def ttft_s(self) -> float:
            looks.append(self.first_s)
            return 1.0

    each = Round("round 1")
    with bars([each], 20) as begin:
        tick = begin(each)
        for at in range(20):
            tick(Seen(0.0, first_s=at))
    assert looks == [*range(20)]


def shown(made: object) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(made)
    return out.getvalue()


def test_the_table_of_two_large_rounds_fits_80_columns() -> None:
    rows = [figures(Round(f"round {number}", [record() for _ in range(3)], 1e-4)) for number in (1, 2)]
    text = shown(table([row | {"same_answers": 3} for row in rows], timed=True))
    lines = text.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines) and "…" not in text
    for what in ("duration", "request throughput", "output token throughput", "p99 TTFT", "median TPOT", "mean ITL"):
        assert any(line.startswith(what) for line in lines), text
    assert next(line for line in lines if line.startswith("mean TTFT")).split()[-3:] == [
        "1,000.00",
        "1,000.00",
        "1.000",
    ]
    assert "prompt tokens from storage" in text and "from host" not in text, "tiers that gave nothing are left out"
    assert "sent late" in text
    assert "sent late" not in shown(table(rows, timed=False))
