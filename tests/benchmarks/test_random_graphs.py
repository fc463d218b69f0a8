"""Random graphs that are solved before and after a change, and what is said of the differences."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.random_graphs import KINDS, STUDY, Row, draw_case, is_wrong, judge, main, solve_case
from tests.support.marks import slow

ROW = Row(kind="plain", seed=1, ops=5, budget_bytes=100, status="feasible", time_s=2.0, bound_s=1.5, peak_bytes=90, steps=12)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (ROW, "equal"),
        (replace(ROW, status="optimal"), "better"),
        (replace(ROW, time_s=1.9), "better"),
        (replace(ROW, bound_s=1.6), "better"),
        (replace(ROW, peak_bytes=80), "other"),
        (replace(ROW, time_s=2.1, status="optimal"), "worse"),
        (replace(ROW, bound_s=1.4), "worse"),
        (replace(ROW, status="limit", time_s=None, peak_bytes=None), "worse"),
        (replace(ROW, time_s=2.2, bound_s=2.1), "wrong"),
        (replace(ROW, time_s=1.4), "wrong"),
    ],
)
def test_verdict_compares_rows_before_and_after(now: Row, expected: str) -> None:
    assert judge(ROW, now) == expected


def test_a_proof_that_nothing_fits_is_better_than_a_bound() -> None:
    unsolved = replace(ROW, status="limit", time_s=None, peak_bytes=None, steps=0)
    infeasible = replace(unsolved, status="infeasible", bound_s=None)
    assert judge(unsolved, infeasible) == "better"
    assert judge(infeasible, unsolved) == "worse"


@pytest.mark.parametrize("seed", [769, *slow(0, 650)])
def test_results_of_the_forward_pass_are_waited_for(seed: int) -> None:
    (row,) = solve_case(("devices", seed))
    assert not is_wrong(row)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_the_same_row_each_time(kind: str) -> None:
    assert list(solve_case((kind, 1))) == list(solve_case((kind, 1)))
    assert len({draw_case(kind, seed)[0].fingerprint for seed in range(5)}) == 5


@pytest.mark.slow
def test_processes_write_the_same_rows_in_order(tmp_path: Path) -> None:
    kept = STUDY.read_kept(tmp_path)
    cases = [("offload", 1), ("plain", 2), ("plain", 1)]
    assert len(list(STUDY.fill(kept, {case: case for case in cases}, jobs=2))) == 3
    assert list(STUDY.read_kept(tmp_path)) == [row for case in (cases[2], cases[1], cases[0]) for row in solve_case(case)]


def test_command_compares_rows_with_those_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kinds", "plain", "--count", "2", "--processes", "1", "--out"]
    assert main([*words, str(tmp_path / "before.csv")]) == 0
    assert main([*words, str(tmp_path / "after.csv"), "--against", str(tmp_path / "before.csv")]) == 0
    assert "'equal': 2" in capsys.readouterr().out


def test_kept_tensor_computed_elsewhere_has_a_schedule() -> None:
    (row,) = solve_case(("devices", 170))
    assert row.status in {"optimal", "feasible"}
