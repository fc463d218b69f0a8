"""The benchmark of the solver: its rows, what the table and the figures make of them, and one tiny run."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import solve_suites
from benchmarks.solve import STUDY, main, solve_instance
from benchmarks.solve_case import SolverRow
from benchmarks.solve_suites import Instance, make_between, make_share_of_peak
from benchmarks.solve_table import compute_medians, iterate_rows
from planner.graphs.synthetic.random_graphs import draw_training_step


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
    marks = solve_suites.Landmarks(draw_training_step(1, 4))
    least, peak = marks.least_bytes, marks.peak_bytes
    assert least < peak
    assert make_between(0.5).bytes_at(marks) == int(least + 0.5 * (peak - least))
    assert make_share_of_peak(0.9).bytes_at(marks) == int(0.9 * peak)
    assert marks.find_half_way_bytes((0.1,)) == (least + peak) // 2
    share = least / peak + 0.01
    assert marks.find_half_way_bytes((share, 0.1)) == (least + int(share * peak)) // 2


def test_runs_are_summed_up_as_their_columns_say() -> None:
    case = SolverRow(suite="zoo", graph="chain", budget="50%", solver="windows", run=0, budget_bytes=1, time_limit_s=1.0)
    rows = [replace(case, run=run, seconds=seconds, resident_mb=9 - run) for run, seconds in enumerate((1.0, 5.0, 2.0))]
    (found,) = iterate_rows(compute_medians(rows))
    assert (found.graph, found.runs, found.seconds, found.resident_mb, found.model_rows) == ("chain", 2, 2.0, 9, None)


def test_a_tiny_suite_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Instance(
        "reference", "chain", partial(draw_training_step, 1, 5), (make_between(0.5),), ("windows", "checkmate"), time_limit_s=20.0
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
    assert list(solve_instance(tiny, tuple(STUDY.read_kept(tmp_path / "solve")))) == []


@pytest.mark.slow
def test_a_tiny_suite_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("distributed")
    tiny = [
        Instance(
            "reference",
            f"random-{seed}",
            partial(draw_training_step, seed, 5),
            (make_between(0.5),),
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
    assert sorted(row.graph for row in STUDY.read_kept(tmp_path / "solve")) == ["random-0", "random-1"]
    assert main([*asked, "--fresh", "--cluster", "nowhere"]) == 2
    assert "missing port number" in capsys.readouterr().err
