"""The benchmark of the solver: its rows, what the table and the figures make of them, and one tiny run."""

from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import solve_suites
from benchmarks.solve import STUDY, all_solved, main, solve_instance
from benchmarks.solve_case import SolverRow
from benchmarks.solve_suites import Instance, between, of_peak
from benchmarks.solve_table import against_reference, growth_plot, medians, solved, solves_plot, table
from graphs.errors import OutputError
from graphs.synthetic.random_graphs import random_training_step
from planner.studies.rows import KeptRows

COMMITTED = Path(__file__).parents[2] / "results" / "solve"
LIMIT_S = 60.0


def row(
    suite: str,
    graph: str,
    seconds: float,
    *,
    solver: str = "windows",
    run: int = 1,
    reference: tuple[float | None, float | None] = (None, None),
    time_s: float | None = 11.0,
    bound_s: float = 11.0,
    ops: int = 40,
    status: str = "optimal",
) -> SolverRow:
    return SolverRow(
        suite=suite,
        graph=graph,
        budget="least + 0.5",
        solver=solver,
        run=run,
        budget_bytes=1_000,
        time_limit_s=LIMIT_S,
        reference_time_s=reference[0],
        reference_seconds=reference[1],
        ops=ops,
        status=status,
        base_s=10.0,
        time_s=time_s,
        bound_s=bound_s,
        gap=None if time_s is None else time_s / bound_s - 1,
        first_s=None if time_s is None else seconds / 2,
        seconds=seconds,
        model_rows=100 * ops,
        model_columns=50 * ops,
        resident_mb=90,
        commit="abc1234",
        machine="a processor, 2 cores",
        versions="highs 1.15.1, Python 3.11.7",
    )


@pytest.fixture
def kept(tmp_path: Path) -> KeptRows[SolverRow]:
    """A graph solved by both solvers three times, one the reference does not solve, growth, and one with no schedule."""
    kept = STUDY.kept(tmp_path)
    for run, seconds in enumerate((0.1, 0.3, 0.2), 1):
        kept.add(row("reference", "small", seconds, run=run))
        kept.add(row("reference", "small", 100 * seconds, solver="checkmate", run=run, time_s=11.005))
    kept.add(row("reference", "large", 0.5))
    kept.add(row("reference", "large", LIMIT_S, solver="checkmate", time_s=None, status="limit"))
    for ops in (100, 1_000, 3_000):
        kept.add(row("growth", f"gpt2-{ops}", ops / 1e3, ops=ops))
    kept.add(row("checkmate-24h", "unet", 6.0, reference=(11.0, 778.0), time_s=11.11, status="feasible"))
    kept.add(row("moccasin", "vgg", 0.01, time_s=None, status="infeasible"))
    return kept


def test_rows_are_read_as_they_were_written(kept: KeptRows[SolverRow], tmp_path: Path) -> None:
    again = STUDY.kept(tmp_path)
    assert list(again) == list(kept)
    assert again.of("growth", "gpt2-100", "least + 0.5", "windows", 1)[0].model_rows == 10_000
    assert not again.of("growth", "gpt2-100", "least + 0.5", "windows", 2)


def test_rows_of_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("suite,graph\nzoo,unet\n")
    with pytest.raises(OutputError, match="other columns"):
        STUDY.kept(tmp_path)


def test_all_solved_requires_every_given_solver(kept: KeptRows[SolverRow]) -> None:
    assert all_solved(kept.of("reference", "small", "least + 0.5"), ("windows", "checkmate"))
    assert not all_solved(kept.of("reference", "large", "least + 0.5"), ("windows", "checkmate"))
    assert all_solved(kept.of("moccasin", "vgg", "least + 0.5"), ("windows",))


def test_medians_are_per_graph_and_solver(kept: KeptRows[SolverRow]) -> None:
    solves = medians(tuple(kept))
    small = solves[solves["graph"] == "small"]
    assert small["seconds"].tolist() == pytest.approx([0.2, 20.0])
    assert small["runs"].tolist() == [3, 3]
    assert small["overhead"].tolist() == pytest.approx([0.1, 0.1005])
    assert solved(solves).tolist() == [True, True, True, False, True, True, True, False, True]


def test_pairs_with_the_reference_state_whether_both_ended_and_agree(kept: KeptRows[SolverRow]) -> None:
    pairs = against_reference(medians(tuple(kept))).set_index("graph")
    assert pairs["ended"].to_dict() == {"small": True, "large": False}
    assert pairs["agree"].to_dict() == {"small": True, "large": False}


def test_table_states_speed_gap_and_versions(kept: KeptRows[SolverRow]) -> None:
    text = table(tuple(kept))
    assert "The reference solved 1 of 2 within its limit of 60 s, and took 100 times as long in the median" in text
    assert "costs agree in 1 of 1" in text
    assert "| 20.00 s | - | 0.05% | 0.200 s | 100.0 | 0.9995 | yes |" in text
    assert "| not solved in 60 s | - | - | 0.500 s | over 120.0 | - | - |" in text
    assert "| unet | 40 | least + 0.5 | feasible | 11.10% | 10.00% | 1.00% | 1.0100 | 778 | 3.00 s | 6.00 | 90 |" in text
    assert "up to 5,000 ops a first schedule within 20 s in 1 of 1 (latest 1.50 s)" in text
    assert "1 solves: a schedule in 0, proved to have none 1; gap at most 0.5% in 0" in text
    assert "Commits: abc1234." in text
    assert "highs 1.15.1, Python 3.11.7" in text


def test_plots_from_the_csv_alone(kept: KeptRows[SolverRow], tmp_path: Path) -> None:
    rows = tuple(kept)
    growth_plot(rows, tmp_path / "growth.png")
    solves_plot(rows, tmp_path / "solves.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("growth.png", "solves.png"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["growth.png", "rows.csv", "solves.png"]


def test_suites_include_only_published_graphs_present(tmp_path: Path) -> None:
    names = ("vgg16_train", "random_layered_n100")
    (tmp_path / "moccasin").mkdir()
    for name in names:
        (tmp_path / "moccasin" / f"{name}.json").touch()
    random, training = solve_suites.SUITES["moccasin"](tmp_path)
    assert [budget.label for budget in random.budgets] == ["90% of peak", "80% of peak"]
    assert [budget.label for budget in training.budgets][-2:] == ["50% of peak", "half way to least"]
    assert not list(solve_suites.SUITES["checkmate-24h"](tmp_path))
    assert not {"vgg16-176", "unet-11"} & {instance.graph for instance in solve_suites.SUITES["reference"](tmp_path)}


def test_half_way_starts_where_a_schedule_is_known() -> None:
    marks = solve_suites.Landmarks(random_training_step(1, 4))
    least, peak = marks.least_bytes, marks.peak_bytes
    assert least < peak
    assert between(0.5).bytes_at(marks) == int(least + 0.5 * (peak - least))
    assert of_peak(0.9).bytes_at(marks) == int(0.9 * peak)
    assert solve_suites._half_way(marks, shares=(0.1,)) == (least + peak) // 2
    assert solve_suites._half_way(marks, shares=(least / peak + 0.01, 0.1)) == (least + int((least / peak + 0.01) * peak)) // 2


def test_a_tiny_suite_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Instance(
        "reference", "chain", partial(random_training_step, 1, 5), (between(0.5),), ("windows", "checkmate"), time_limit_s=20.0
    )
    monkeypatch.setitem(solve_suites.SUITES, "reference", lambda published: iter([tiny]))
    main(["--suites", "reference,moccasin", "--instances", str(tmp_path / "none"), "--out", str(tmp_path / "solve")])
    said = capsys.readouterr()
    assert "checkmate-24h, moccasin and parts of reference are left out" in said.err
    assert said.out.count("optimal") == 2
    assert "costs agree in 1 of 1" in (tmp_path / "solve" / "table.md").read_text()

    rows = pd.read_csv(tmp_path / "solve" / "rows.csv")
    assert rows["status"].tolist() == ["optimal", "optimal"]
    assert rows["resident_mb"].between(20, 1_000).all()
    assert rows["writing_s"].notna().tolist() == [False, True]
    assert list(solve_instance(tiny, tuple(STUDY.kept(tmp_path / "solve")))) == []


@pytest.mark.slow
def test_a_tiny_suite_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("distributed")
    tiny = [
        Instance(
            "reference",
            f"random-{seed}",
            partial(random_training_step, seed, 5),
            (between(0.5),),
            ("windows",),
            time_limit_s=20.0,
        )
        for seed in range(2)
    ]
    monkeypatch.setitem(solve_suites.SUITES, "reference", lambda published: iter(tiny))
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0", worker_dashboard_address=":0"
    ) as local:
        asked = ["--suites", "reference", "--instances", str(tmp_path), "--out", str(tmp_path / "solve")]
        main([*asked, "--cluster", local.scheduler_address])
    assert capsys.readouterr().out.count("optimal") == 2
    assert sorted(row.graph for row in STUDY.kept(tmp_path / "solve")) == ["random-0", "random-1"]
    assert main([*asked, "--fresh", "--cluster", "nowhere"]) == 2
    assert "missing port number" in capsys.readouterr().err
