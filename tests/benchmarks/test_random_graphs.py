"""Random graphs that are solved before and after a change, and what is said of the differences."""

from dataclasses import replace

import pytest

from benchmarks.random_graphs import KINDS, Row, graph_of, solved, verdict

ROW = Row("plain", 1, 5, 100, "feasible", "2.0", "1.5", "90", 12)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (ROW, "equal"),
        (replace(ROW, status="optimal"), "better"),
        (replace(ROW, time_s="1.9"), "better"),
        (replace(ROW, bound_s="1.6"), "better"),
        (replace(ROW, peak_bytes="80"), "other"),
        (replace(ROW, time_s="2.1", status="optimal"), "worse"),
        (replace(ROW, bound_s="1.4"), "worse"),
        (replace(ROW, status="limit", time_s="", peak_bytes=""), "worse"),
    ],
)
def test_verdicts(now: Row, expected: str) -> None:
    assert verdict(ROW, now) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_the_same_row_each_time(kind: str) -> None:
    assert solved((kind, 1)) == solved((kind, 1))
    assert len({graph_of(kind, seed)[0].fingerprint for seed in range(5)}) == 5


def test_what_is_kept_is_not_copied_to_where_it_was_computed() -> None:
    assert solved(("devices", 170)).status in {"optimal", "feasible"}
