"""``planner compare``: methods at their best, judged by one judge, rows kept, and table and figures from the rows alone."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare_summary import format_summary
from planner.cli.main import main
from planner.graphs.errors import BudgetError, OutputError, PlannerError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.reordering import Reordering
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.memory.reserved import predict_eager_bytes
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import RECOMPUTATION, build_option_settings
from planner.solvers.clock import Clock, WorkClock
from planner.solvers.registry import SOLVERS
from planner.solvers.request import Start
from planner.solvers.result import Reason, Result, Status
from planner.studies.best_rows import (
    HEURISTICS,
    build_tuned_table,
    explain_none,
    find_best_measured,
    find_best_schedule,
    find_undominated,
    get_kind,
)
from planner.studies.compare import Shares, Task, compare, cut_short, parse_methods
from planner.studies.comparison_rows import OPTIMUM, ComparisonRow, RunBy, bound_of
from planner.studies.comparisons import build_simulated_table, format_cell, format_tables, write_report
from planner.studies.rows import list_columns, read_rows, write_rows
from planner.studies.settings import StudySettings
from planner.studies.solves import solve_in_order
from tests.support.marks import slow_except

METHODS = ("windows", "keep-everything", "chen-sqrt", "dtr", "lru", "rotor")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return transformer(TransformerSize(layers=3))


@pytest.fixture(scope="module")
def rows(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[ComparisonRow]:
    return compare(graph, ["100%", "75%", "65%"], METHODS, tmp_path_factory.mktemp("rows"), StudySettings(model="three layers"))


def test_every_method_at_every_budget(rows: list[ComparisonRow]) -> None:
    assert len(rows) == 3 * len(METHODS)
    assert {row.method for row in rows} == set(METHODS)
    assert all(row.time_s is None or row.peak_bytes is not None for row in rows)
    assert all(row.message for row in rows if row.time_s is None)


def test_no_method_is_below_the_bound_and_none_is_better_than_the_optimum(rows: list[ComparisonRow]) -> None:
    for row in rows:
        bound_s = bound_of(rows, row.budget_bytes)
        assert bound_s is not None
        optimum = next(o for o in rows if o.method == OPTIMUM and o.budget_bytes == row.budget_bytes)
        assert optimum.time_s is not None
        if row.time_s is not None and row.peak_bytes is not None:
            assert row.peak_bytes <= row.budget_bytes
            assert row.time_s >= bound_s * (1 - 1e-9)
            assert optimum.time_s <= row.time_s * (1 + row.tolerance)


QUICK = (CountedMemory.RESERVED, CountedMemory.DEVICE)


@pytest.mark.parametrize("memory", [None, *slow_except(CountedMemory, *QUICK)])
def test_cuda_percentages_refer_to_and_are_met_in_counted_memory(memory: CountedMemory | None, tmp_path: Path) -> None:
    chain = make_training_chain(8)
    tensors = tuple(replace(t, size_bytes=11 * 2**20) for t in chain.tensors)  # in segments of 12 MiB
    graph = replace(chain, tensors=tensors, provenance={"device": "h200", "context_bytes": 5_000_000})
    counted, settings = memory or CountedMemory.RESERVED, StudySettings(memory=memory, time_limit_s=4.0)
    found = compare(graph, ["100%", "70%"], METHODS, tmp_path, settings)
    assert {row.budget_bytes for row in found} == {predict_eager_bytes(graph, counted) * share // 100 for share in (100, 70)}
    for row in found:
        bound_s = bound_of(found, row.budget_bytes or 0)
        assert row.memory is counted and bound_s is not None
        if row.method == OPTIMUM or row.budget == "100%":
            assert row.time_s is not None
        if row.time_s is not None:
            assert row.counted_bytes <= (row.budget_bytes or 0)
            assert row.time_s >= bound_s * (1 - 1e-9)
            assert row.reserved_bytes >= row.peak_bytes
    write_report(found, tmp_path)
    assert f"Budgets count {counted.said}." in (tmp_path / "table.md").read_text()
    other = CountedMemory.ALLOCATED if memory is None else CountedMemory.RESERVED_EXPANDABLE
    if other is not counted:
        with pytest.raises(OutputError, match="rows made with"):
            compare(graph, ["100%"], METHODS, tmp_path, replace(settings, memory=other))


def test_budget_below_the_least_reserved_memory_is_out_of_memory(tmp_path: Path) -> None:
    small = replace(
        make_training_chain(8), provenance={"device": "h200"}
    )  # in one segment of 2 MiB, which no schedule goes without
    row, kept = compare(small, ["1MB"], ["windows", "keep-everything"], tmp_path, StudySettings(time_limit_s=2.0))
    assert (row.status, row.reason, kept.reason) == ("limit", Reason.MEMORY, Reason.MEMORY)
    assert "the least found is 2.10 MB" in row.message


@pytest.mark.parametrize("offload", [False, True])
def test_all_methods_can_be_compared(offload: bool, tmp_path: Path) -> None:
    methods = parse_methods("all", offload=offload)
    every = {name: entry for name, entry in SOLVERS.items() if not entry.only_devices}
    assert set(methods) == {name for name, entry in every.items() if offload or not entry.only_transfers}
    options = build_option_settings(["offload"], 1.0, 10**6) if offload else RECOMPUTATION
    found = compare(make_training_chain(6), ["80%"], methods, tmp_path, StudySettings(options=options, time_limit_s=20))
    assert found[0].method == OPTIMUM and {row.method for row in found} == set(methods)
    assert not [row.message for row in found if row.status == "error"]


def test_methods_with_large_programs_run_last_and_share_remaining_time() -> None:
    methods = ("checkmate", "lru", "rounding", OPTIMUM)
    tasks = [Task(RunBy.SIMULATOR, method, budget, 1) for budget in ("80%", "60%") for method in methods]
    clock = WorkClock(40.0)
    shares = Shares(tasks, clock, 60.0, jobs=2, needs=lambda _: 0.0)
    taken = []
    while (task := shares.take()) is not None:
        assert task.time_limit_s is not None
        taken.append((task.method, task.budget, task.time_limit_s))
        clock.spend(1.0 if task.method in (OPTIMUM, "lru") else task.time_limit_s / 2)
    assert [method for method, _, _ in taken] == [OPTIMUM] * 2 + ["lru"] * 2 + ["checkmate", "rounding"] * 2
    assert [budget for _, budget, _ in taken] == ["80%", "60%"] * 2 + ["80%", "80%", "60%", "60%"]
    assert [limit for _, _, limit in taken] == [13, 15, 60, 60, 18, 18, 18, 9]
    unlimited = Shares(tasks, WorkClock(math.inf), 60.0, jobs=1, needs=lambda _: 30.0)
    assert {task.time_limit_s for task in iter(unlimited.take, None)} == {60.0}


def test_large_programs_get_the_time_that_they_need_or_leave_it_to_others() -> None:
    needs = {"rounding": 8.2, "checkmate": 20.0, "monet": 0.0}
    tasks = [
        Task(RunBy.SIMULATOR, method, budget, 1) for budget in ("80%", "60%") for method in ("checkmate", "rounding", "monet")
    ]

    def limits(total_s: float, time_limit_s: float = 60.0) -> list[tuple[str, float | None]]:
        clock, taken = WorkClock(total_s), []
        shares = Shares(tasks, clock, time_limit_s, jobs=1, needs=lambda task: needs[task.method])
        while (task := shares.take()) is not None:
            taken.append((task.method, task.time_limit_s))
            clock.spend(task.time_limit_s if needs[task.method] <= task.time_limit_s else 0.0)
        return taken

    # What is left after both of rounding does for one of checkmate only.
    assert limits(42.0) == [("monet", 1.0)] * 2 + [("rounding", 9.0), ("rounding", 10.0), ("checkmate", 21.0), ("checkmate", 1.0)]
    assert limits(90.0) == [("monet", 5.0)] * 2 + [("rounding", 14.0)] * 2 + [("checkmate", 26.0)] * 2
    assert limits(90.0, 12.0)[2:] == [("rounding", 12.0)] * 2 + [("checkmate", 12.0)] * 2


def test_the_optimum_goes_on_in_the_time_that_others_leave(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Start | None] = []

    def solve(order: Reordering, budget_bytes: int, memory: CountedMemory, clock: Clock, method: str, **settings: Any) -> Result:
        found = solve_in_order(order, budget_bytes, memory, WorkClock(1.0), "lru")
        if method == OPTIMUM:
            starts.append(settings["start"])
            status, bound_s = (Status.FEASIBLE, graph.time_s) if len(starts) == 1 else (Status.OPTIMAL, found.time_s)
            return replace(found, graph=graph, status=status, bound_s=bound_s, seconds=clock.limit)
        return found

    monkeypatch.setattr("planner.studies.compare.solve_in_order", solve)
    settings = StudySettings(time_limit_s=20.0, total_time_limit_s=60.0, jobs=1)
    row, _ = compare(graph, ["75%"], [OPTIMUM, "lru"], tmp_path, settings)
    assert starts[0] is None and starts[1] is not None and len(starts) == 2
    assert (row.status, row.bound_s, row.seconds) == (Status.OPTIMAL, row.time_s, row.time_limit_s)
    assert 20.0 + 30.0 < row.time_limit_s <= 20.0 + 60.0
    compare(graph, ["75%"], [OPTIMUM], tmp_path / "each", StudySettings(time_limit_s=20.0, total_time_limit_s=math.inf, jobs=1))
    assert len(starts) == 3


def test_a_program_that_will_not_end_in_its_time_says_so_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = transformer(TransformerSize(layers=6))
    write_graph(graph, tmp_path / "six.json")
    where = ["compare", str(tmp_path / "six.json"), "--budgets", "70%", "-o", str(tmp_path / "out"), "--quiet"]
    assert main([*where, "--methods", "lru,checkmate,rounding", "--time-limit", "3"]) == 0
    rows = {row.method: row for row in read_rows(tmp_path / "out" / "rows.csv", ComparisonRow)}
    for method in ("checkmate", "rounding"):
        assert rows[method].reason == Reason.TIME and (rows[method].seconds or 0.0) < 1.0
        assert "to write it and solve its relaxation once takes about" in rows[method].message
    said = capsys.readouterr().out
    assert f"not begun: checkmate (70%): {rows['checkmate'].message}" in said
    assert "for more, raise --total-time-limit, or --time-limit for each row" in said


def test_where_time_is_up_the_last_rows_are_tried_for_a_moment_and_said_to_be_cut_short(tmp_path: Path) -> None:
    graph = transformer(TransformerSize(layers=6))
    found = compare(graph, ["70%"], ["windows", "checkmate", "lru"], tmp_path, StudySettings(total_time_limit_s=1.5))
    assert [row.method for row in found] == ["windows", "checkmate", "lru"]
    assert [row.method for row in read_rows(tmp_path / "rows.csv", ComparisonRow)] == ["windows", "checkmate", "lru"]
    checkmate = found[1]
    assert (checkmate.time_limit_s, checkmate.reason) == (1.0, Reason.TIME)
    assert [row.method for row in found if cut_short(row)] == ["checkmate"]


@pytest.mark.slow
def test_methods_that_offload_beside_those_that_recompute(graph: Graph, tmp_path: Path) -> None:
    options = build_option_settings(["offload"], 50e9, 10**11)
    names = ("windows", "chen-sqrt", "dtr", "save-on-cpu", "capuchin-swap", "delta")
    found = compare(graph, ["75%"], names, tmp_path, StudySettings(options=options, time_limit_s=4))
    by_method = {row.method: row for row in found}
    bound_s = by_method["windows"].bound_s
    assert bound_s is not None and set(by_method) == set(names)
    assert all(row.time_s is None or row.time_s >= bound_s * (1 - 1e-9) for row in found)
    # Those that recompute find what they find without the choice.
    alone = compare(graph, ["75%"], ["chen-sqrt", "dtr"], tmp_path / "alone")
    assert {row.method: row.time_s for row in alone} == {row.method: by_method[row.method].time_s for row in alone}
    assert all(json.loads(row.settings)["link"]["in_bytes_per_s"] == 50e9 for row in found)
    assert compare(graph, ["75%"], names, tmp_path, StudySettings(options=options)) == found
    with pytest.raises(OutputError, match="ask for the same"):
        compare(graph, ["75%"], names, tmp_path, StudySettings(options=build_option_settings(["offload"], 25e9, 10**11)))


def test_rows_that_are_known_are_not_computed_again(graph: Graph, tmp_path: Path) -> None:
    first = compare(graph, ["80%"], ["windows", "keep-everything"], tmp_path)
    write_rows(tmp_path / "rows.csv", ComparisonRow, [replace(row, message="marked") for row in first])
    new: list[ComparisonRow] = []
    again = compare(graph, ["80%", "70%"], ["windows", "lru"], tmp_path, on_row=lambda row, done, count: new.append(row))
    assert [(row.method, row.budget) for row in new] == [("windows", "70%"), ("lru", "80%"), ("lru", "70%")]
    assert [row.message for row in again if row.budget == "80%" and row.method == "windows"] == ["marked"]
    assert len(read_rows(tmp_path / "rows.csv", ComparisonRow)) == 5
    assert len(again) == 4


@pytest.mark.slow
def test_two_at_a_time_find_the_same(graph: Graph, rows: list[ComparisonRow], tmp_path: Path) -> None:
    beside = compare(
        graph, ["75%"], ["keep-everything", "chen-sqrt", "lru"], tmp_path, StudySettings(model="three layers", jobs=2)
    )
    times = {row.method: row.time_s for row in rows if row.budget == "75%"}
    assert {row.method: row.time_s for row in beside} == {name: times[name] for name in ("keep-everything", "chen-sqrt", "lru")}


def test_a_stopped_comparison_goes_on_later(graph: Graph, tmp_path: Path) -> None:
    done: list[ComparisonRow] = []
    compare(
        graph,
        ["80%"],
        ["keep-everything", "lru"],
        tmp_path,
        on_row=lambda row, *_: done.append(row),
        should_stop=lambda: bool(done),
    )
    assert [row.method for row in done] == ["keep-everything"]
    assert {row.method for row in compare(graph, ["80%"], ["keep-everything", "lru"], tmp_path)} == {"keep-everything", "lru"}


def test_the_table_has_the_best_in_bold_and_the_bound_last(rows: list[ComparisonRow]) -> None:
    text = format_tables(rows)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == "| budget | windows | keep-everything | chen-sqrt | rotor | dtr | lru | bound |"
    assert lines[2].count("**0.00%**") >= 2  # at the peak, the optimum and keeping everything
    assert "OOM" in lines[4]
    assert format_tables(rows) == text


def test_cuda_comparison_has_a_table_of_reserved_memory(graph: Graph, rows: list[ComparisonRow], tmp_path: Path) -> None:
    on_cuda = replace(graph, provenance={**graph.provenance, "device": "h200"})
    found = compare(on_cuda, ["75%"], ("keep-everything", "windows"), tmp_path, StudySettings())
    by_method = {row.method: row for row in found}
    assert by_method["keep-everything"].reserved_bytes is None  # it does not fit
    row = by_method["windows"]
    assert row.reserved_bytes >= row.peak_bytes
    table = format_tables(found)
    assert f"| {row.reserved_bytes / row.budget_bytes:.2f}** |" in table[table.index("## Reserved") :].replace("| **", "| ")
    assert "Reserved" not in format_tables(rows)


def test_cell_text_names_the_reason_of_a_failure(rows: list[ComparisonRow]) -> None:
    row = next(row for row in rows if row.time_s is None)
    said = {reason: format_cell(replace(row, reason=str(reason), message="it thrashes at the limit")) for reason in Reason}
    assert said == {
        Reason.INAPPLICABLE: "does not apply",
        Reason.MEMORY: "OOM",
        Reason.THRASHING: "thrash",
        Reason.SIZE: "too large",
        Reason.TIME: "time",
    }
    assert format_cell(replace(row, status="infeasible", reason="")) == "infeasible"


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", ",".join(list_columns(ComparisonRow)) + "\n" + "x," * (len(list_columns(ComparisonRow)) - 1) + "x\n"],
)
def test_other_csvs_are_refused(graph: Graph, tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(OutputError, match=r"rows.csv (has other columns|is damaged)"):
        compare(graph, ["80%"], ["keep-everything"], tmp_path)
    assert (tmp_path / "rows.csv").read_text() == text


def test_rows_of_another_profile_are_not_mixed_with_new_ones(graph: Graph, tmp_path: Path) -> None:
    before = compare(graph, ["80%"], ["keep-everything"], tmp_path)
    slower = Graph(tuple(replace(op, time_s=2 * op.time_s) for op in graph.ops), graph.tensors, graph.kept, graph.provenance)
    assert compare(slower, ["80%"], ["keep-everything"], tmp_path) == before
    with pytest.raises(OutputError, match=r"its ops were measured again, for no graph.json is beside it"):
        compare(slower, ["80%", "60%"], ["keep-everything"], tmp_path)
    assert read_rows(tmp_path / "rows.csv", ComparisonRow) == before


def test_rows_of_another_graph_are_refused(graph: Graph, tmp_path: Path) -> None:
    compare(make_training_chain(4), ["80%"], ["keep-everything"], tmp_path)
    with pytest.raises(OutputError, match="holds rows of another graph"):
        compare(graph, ["80%"], ["keep-everything"], tmp_path)


def test_invalid_compare_requests_raise(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="no budget"):
        compare(graph, [], ["keep-everything"], tmp_path)
    with pytest.raises(PlannerError, match="no solver 'magic'"):
        compare(graph, ["80%"], ["magic"], tmp_path)
    with pytest.raises(PlannerError, match="jobs is 0"):
        compare(graph, ["80%"], ["keep-everything"], tmp_path, StudySettings(jobs=0))
    with pytest.raises(PlannerError, match="there is no solver 'magic': `planner solvers` lists them all"):
        parse_methods("windows,magic")
    assert not list(tmp_path.iterdir())


def test_compare_command_writes_table_and_figures(graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_graph(graph, tmp_path / "model.json")
    words = [
        "compare",
        str(tmp_path / "model.json"),
        "--budgets",
        "80%,70%",
        "--methods",
        "keep-everything,windows",
        "--jobs",
        "1",
        "--quiet",
    ]
    out = tmp_path / "deep" / "results"
    assert main([*words, "-o", str(out)]) == 0
    assert f"written to {out}: rows.csv, table.md, overhead.png, memory.png" in capsys.readouterr().out
    assert "| budget | windows | keep-everything | bound |" in (out / "table.md").read_text()
    assert {file.name for file in out.iterdir()} == {"rows.csv", "table.md", "overhead.png", "memory.png"}
    assert main([*words, "-o", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["holds"] == "comparison"
    assert len(data["rows"]) == 4


def test_compare_command_accepts_options(graph: Graph, tmp_path: Path) -> None:
    write_graph(graph, tmp_path / "model.json")
    asked = ["--options", "offload", "--link", "50GB/s", "--host-budget", "64GB", "--methods", "save-on-cpu,delta", "--quiet"]
    assert main(["compare", str(tmp_path / "model.json"), "--budgets", "80%", *asked, "-o", str(tmp_path / "out")]) == 0
    assert "| budget | save-on-cpu | delta | bound |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.filterwarnings("error")
def test_figures_where_no_method_fits(rows: list[ComparisonRow], tmp_path: Path) -> None:
    none = [replace(row, time_s=None, peak_bytes=None, bound_s=None, status="infeasible") for row in rows]
    write_report(none, tmp_path)
    assert (tmp_path / "overhead.png").exists()


TUNED = ("windows", "checkpoint-blocks", "sac", *HEURISTICS["dtr"], *HEURISTICS["megengine"])


@pytest.fixture(scope="module")
def two_layers() -> Graph:
    return transformer(TransformerSize(layers=2))


@pytest.fixture(scope="module")
def tuned(two_layers: Graph, tmp_path_factory: pytest.TempPathFactory) -> list[ComparisonRow]:
    return compare(two_layers, ["70%", "60%", "50%"], TUNED, tmp_path_factory.mktemp("rows"), StudySettings(model="two layers"))


@pytest.fixture
def row(tuned: list[ComparisonRow]) -> ComparisonRow:
    return tuned[0]


def step(
    row: ComparisonRow, method: str, ratio: float | None, peak: int | None, exactness: str = "identical", reason: str = ""
) -> ComparisonRow:
    """A row of what PyTorch ran."""
    return replace(
        row,
        run_by=str(RunBy.TORCH),
        method=method,
        budget="",
        budget_bytes=None,
        status="ran" if ratio else "error",
        reason=reason,
        time_s=None,
        peak_bytes=None,
        measured_ratio=ratio,
        measured_peak_bytes=peak,
        exactness=exactness if ratio else "",
    )


def test_inapplicable_methods_are_not_reported_as_out_of_memory(tuned: list[ComparisonRow]) -> None:
    # A synthetic graph has neither modules nor ops with PyTorch's names.
    for method in ("checkpoint-blocks", "sac"):
        own = [row for row in tuned if row.method == method]
        assert len(own) == 3
        for row in own:
            assert (row.status, row.reason) == ("limit", Reason.INAPPLICABLE)
            assert "does not apply" in row.message
            assert format_cell(row) == "does not apply"
    assert format_tables(tuned).count("| does not apply |") == 3
    assert "does not apply: the method does not support this model" in format_tables(tuned)


def test_methods_above_the_budget_are_out_of_memory(tmp_path: Path) -> None:
    found = compare(make_training_chain(8), ["90%", "30%"], ["keep-everything", "chen-sqrt", "dtr"], tmp_path)
    cells = {row.key[1:]: format_cell(row) for row in found}
    assert cells["keep-everything", "90%"] == cells["keep-everything", "30%"] == cells["dtr", "30%"] == "OOM"


def test_a_row_that_is_not_there_was_not_tried(tuned: list[ComparisonRow]) -> None:
    some = [row for row in tuned if (row.method, row.budget) != ("dtr", "60%")]
    header, *lines = build_simulated_table(some)
    assert [line[header.index("dtr")] == "not tried" for line in lines] == [False, True, False]
    assert explain_none([]) == "not tried"


def test_every_heuristic_is_of_a_kind(row: ComparisonRow) -> None:
    evicting = ("planner.solvers.baselines.dtr", "planner.solvers.baselines.megengine")
    assert {name for kind in HEURISTICS.values() for name in kind} == {
        name for name, entry in SOLVERS.items() if entry.module in evicting
    }
    assert get_kind(replace(row, run_by="simulator", method="msps")) == "dtr"
    assert get_kind(replace(row, run_by="simulator", method="megengine-static")) == "megengine"
    assert get_kind(replace(row, run_by="torch", method="sac-every-second level 2")) == "sac"
    assert get_kind(replace(row, run_by="torch", method="memory-budget 0.50 inductor")) == "memory-budget inductor"


def test_the_best_heuristic_is_the_fastest_that_fits(tuned: list[ComparisonRow]) -> None:
    kind = [row for row in tuned if row.method in HEURISTICS["dtr"]]
    budgets = sorted({row.budget_bytes or 0 for row in tuned})
    times = []
    for budget in budgets:
        best = find_best_schedule(kind, budget)
        here = [row.time_s for row in kind if row.budget_bytes == budget and row.time_s is not None]
        if best is None:
            assert not here
            continue
        assert best.peak_bytes <= budget
        assert best.time_s <= min(here, default=best.time_s)
        times.append(best.time_s)
    assert times
    assert times == sorted(times, reverse=True)  # with more memory never slower


def test_a_schedule_for_less_memory_serves_where_its_own_kind_fails_with_more(row: ComparisonRow) -> None:
    small = replace(row, method="lru", budget="50%", budget_bytes=50, time_s=2.0, peak_bytes=50)
    large = replace(row, method="lru", budget="70%", budget_bytes=70, time_s=None, peak_bytes=None, reason="thrashing")
    assert find_best_schedule([small, large], 70) is small
    assert find_best_schedule([small, large], 40) is None


def test_the_summary_names_the_best_heuristics(tuned: list[ComparisonRow], tmp_path: Path) -> None:
    write_rows(tmp_path / "h200" / "two-layers" / "rows.csv", ComparisonRow, tuned)
    lines = [line.strip("| ").split(" | ") for line in format_summary(tmp_path).splitlines() if line.startswith("| ")]
    cells = dict(zip(lines[0], lines[2], strict=True))
    assert (cells["model"], cells["budget"], cells["chen-sqrt"]) == ("two-layers", "70%", "not tried")
    assert cells["checkpoint-blocks"] == cells["sac"] == "does not apply"
    for kind in HEURISTICS:
        own = [row for row in tuned if row.method in HEURISTICS[kind]]
        best = find_best_schedule(own, next(row.budget_bytes or 0 for row in tuned if row.budget == "70%"))
        assert cells[f"{kind} (best)"].strip("*") == f"{format_cell(best)} ({best.method})"


def test_overheads_equal_in_print_are_all_marked_best(row: ComparisonRow) -> None:
    base = replace(row, base_s=1.0, budget_bytes=10, peak_bytes=10, bound_s=1.0)
    table = build_simulated_table(
        [
            replace(base, method="windows", time_s=1.10001),
            replace(base, method="dtr", time_s=1.10004),
            replace(base, method="lru", time_s=1.1002),
        ]
    )
    assert table[1][1:4] == ("**10.00%**", "**10.00%**", "10.02%")


def test_dominated_methods_of_a_kind_are_left_out(row: ComparisonRow) -> None:
    a = step(row, "sac", 1.2, 80)
    b = step(row, "sac-attention depth 1", 1.3, 60)
    beaten = step(row, "sac every second convolution", 1.3, 80)
    wrong = step(row, "sac matmul", 1.0, 10, "wrong")
    other = step(row, "checkpoint-blocks", 1.4, 90)
    failed = step(row, "checkpoint-blocks level 2", None, None)
    assert find_undominated([a, b, beaten, wrong, other, failed]) == [a, b, wrong, other]
    assert find_undominated([a, replace(a, method="sac level 2")]) == [a]


def test_pytorchs_own_methods_are_tuned_for_each_budget(row: ComparisonRow) -> None:
    optimum = replace(row, run_by=str(RunBy.EXECUTOR), method="windows", measured_ratio=1.2, measured_peak_bytes=60)
    found = [
        replace(optimum, budget="70%", budget_bytes=70),
        replace(
            optimum, budget="50%", budget_bytes=50, measured_ratio=None, measured_peak_bytes=None, reason="", status="infeasible"
        ),
        step(row, "eager", 1.0, 100),
        step(row, "checkpoint-blocks", None, None),
        step(row, "checkpoint-blocks depth 1", 1.3, 65),
        step(row, "sac", 1.1, 90),
        step(row, "sac-every-second depth 1", 1.204, 70),
        step(row, "memory-budget 0.50 aot_eager", 1.1, 40, "wrong"),
        step(row, "sac-attention", None, None, reason="inapplicable"),
        step(row, "auto-sac", None, None),
    ]
    assert find_best_measured(found[5:7], 70) is found[6]
    header, seventy, fifty = build_tuned_table(found)
    assert header == ("budget", "optimal schedule", "checkpoint-blocks", "sac", "memory-budget aot_eager", "auto-sac")
    assert seventy[1:] == (
        "**1.20x**, 60 B",
        "1.30x, 65 B (depth 1)",
        "**1.20x**, 70 B (sac-every-second depth 1)",
        "wrong",
        "does not run",
    )
    # Saving nothing is checkpointing.
    assert build_tuned_table([found[0], found[4], found[5]])[1][2:] == (
        "1.30x, 65 B (depth 1)",
        "1.30x, 65 B (checkpoint-blocks depth 1)",
    )
    assert fifty[1:] == ("infeasible", "OOM", "OOM", "wrong", "does not run")
    inapplicable = build_tuned_table([found[0], found[8]])[1]
    assert inapplicable[2] == "does not apply"
