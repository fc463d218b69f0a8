"""``make bench-options``: rows of sets of options, errors of inexact ones, and their tables."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import options, options_errors
from benchmarks.options import MODELS, NAMES, OptionsCase, TracedStep, find_offers, solve
from benchmarks.options_errors import MEASURED, Bits, find_most_bits, format_error_table, measure_errors
from benchmarks.options_table import (
    BUDGETS,
    FLOATING,
    LEAST,
    NONE,
    Offer,
    OptionsRow,
    find_below_bound,
    find_worse,
    format_table,
    list_sets,
)
from planner.capture.options import OPTIONS
from planner.capture.workload.models import build
from planner.capture.workload.workload import parse_spec
from planner.graphs.ir import Op
from planner.graphs.units import format_ratio
from planner.measure import tracing
from planner.solvers.clock import WorkClock
from planner.studies.rows import read_rows

RESULTS = Path(__file__).parents[2] / "results" / "options"
SPECS = {"step": "zoo:mlp"}


def offer(option: str, ops: int, bits: Bits) -> Offer:
    return Offer(model="step", option=option, ops=ops, bits=bits)


def key(row: OptionsRow) -> tuple[str, str, str]:
    return row.model, row.options, row.budget


@pytest.fixture(scope="module")
def case() -> OptionsCase:
    workload = build("mlp", batch=64, width=32, layers=2, classes=2000)
    traced = tracing.trace(*workload, roofline="h200", options=["chunks"])
    step = TracedStep("step", lambda: traced, ("offload", "chunks"))
    return OptionsCase(step, list(find_offers(step, ())), partial(WorkClock, 3.0))


@pytest.fixture(scope="module")
def rows(case: OptionsCase) -> list[OptionsRow]:
    return list(solve(case, ()))


def test_option_sets_are_none_each_and_all_by_exactness() -> None:
    exact, idle = offer("a", 2, Bits.EXACT), offer("b", 0, Bits.EXACT)
    rounding, lossy = offer("c", 1, Bits.ROUNDING), offer("d", 1, Bits.LOSSY)
    assert list_sets([exact, idle, rounding, lossy]) == ((), ("a",), ("c",), ("d",), ("a", "c"), ("a", "c", "d"))
    assert list_sets([exact, offer("e", 1, Bits.EXACT), lossy])[-2:] == (("a", "e"), ("a", "e", "d"))
    assert list_sets([idle]) == ((),)


def test_bits_of_ops_are_exact_rounding_or_lossy() -> None:
    program = Op(0, "op", "f", (), (), 1.0)
    rounding, lossy = replace(program, differs="rounding: t (the loss)"), replace(program, differs="4 bits: t")
    assert find_most_bits([program]) is Bits.EXACT
    assert find_most_bits([program, rounding]) is Bits.ROUNDING
    assert find_most_bits([rounding, lossy]) is Bits.LOSSY


def test_a_set_is_solved_at_each_budget_and_none_is_worse_than_a_smaller_one(case: OptionsCase, rows: list[OptionsRow]) -> None:
    assert [(o.option, o.bits) for o in case.offers] == [("offload", Bits.EXACT), ("chunks", Bits.ROUNDING)]
    sets = (NONE, "offload", "chunks", "offload+chunks")
    assert [key(row) for row in rows] == [("step", name, budget) for name in sets for budget in BUDGETS]
    assert not find_worse(rows, FLOATING) and not find_below_bound(rows)
    least = {row.options: row for row in rows if row.budget == LEAST}
    assert all(row.proved_bytes is not None and row.proved_bytes <= (row.budget_bytes or 0) for row in least.values())
    # The logits are most of the peak: without chunks they cannot be less.
    half = {row.options: row for row in rows if row.budget == "50%"}
    assert half[NONE].status == "infeasible" and half["chunks"].overhead is not None
    assert (least["chunks"].budget_bytes or 0) < 0.5 * least["chunks"].base_peak_bytes < (least[NONE].budget_bytes or 0)
    text = format_table(rows, case.offers, SPECS | {"another": "zoo:vit"})
    assert format_ratio(half["chunks"].overhead) in text and "infeasible" in text and "not run" not in text
    assert "Worse with an option more, by over 0.1%: 0;" in text and "Not run: another." in text
    gaps = [row.gap for row in rows if row.options == "offload+chunks" and row.gap is not None]
    near = sum(gap <= 0.01 for gap in gaps)
    assert f"of {len(gaps)} budgets with a schedule {near} with a gap of at most 1%" in text
    by_time = [replace(row, limit="60 s") if row.options == "chunks" else row for row in rows]
    assert f"Limit of each solve: {rows[0].limit}." in text
    several = format_table(by_time, case.offers, SPECS)
    assert f"Limit of each solve: {rows[0].limit} (none; offload; offload + chunks), 60 s (chunks)." in several


def test_known_rows_are_not_solved_again_and_missing_ones_are_marked(case: OptionsCase, rows: list[OptionsRow]) -> None:
    missing = rows[5]
    assert [key(row) for row in solve(case, [row for row in rows if row != missing])] == [key(missing)]
    assert "| not run |" in format_table([row for row in rows if row != missing], case.offers, SPECS)


def test_worse_and_contradictory_rows_are_reported(rows: list[OptionsRow]) -> None:
    found = {key(row)[1:]: row for row in rows}
    chunks, both = found["chunks", "50%"], found["offload+chunks", "50%"]
    assert both.time_s is not None
    slower = replace(both, time_s=2 * chunks.time_s)
    assert find_worse([chunks, slower], FLOATING) == [(chunks, slower)] and find_worse(
        [chunks, replace(both, time_s=None)], FLOATING
    )
    assert "Worse with an option more, by over 0.1%: 1 (offload+chunks at 50%" in format_table(
        [chunks, slower], [offer("chunks", 1, Bits.EXACT)], SPECS
    )
    refuted = replace(both, bound_s=2 * chunks.time_s, time_s=None)
    assert find_below_bound([chunks, refuted]) == [(chunks, refuted)]
    assert find_below_bound([chunks, replace(refuted, bound_s=None, status="infeasible")])
    least, more = found["chunks", LEAST], found["offload+chunks", LEAST]
    assert find_worse([least, replace(more, budget_bytes=(least.budget_bytes or 0) + 1)], FLOATING)
    assert not find_worse([least, replace(more, budget_bytes=(least.budget_bytes or 0) + 1)], 1e-3)
    assert find_below_bound([least, replace(more, proved_bytes=(least.budget_bytes or 0) + 1)])


def test_lossy_options_have_a_table_of_their_own(rows: list[OptionsRow]) -> None:
    text = format_table(rows, [offer("offload", 1, Bits.EXACT), offer("chunks", 1, Bits.LOSSY)], SPECS)
    faithful, lossy = text.split("With a lossy option:")
    assert "| offload |" in faithful and "| chunks |" not in faithful
    assert "| chunks |" in lossy and "| offload + chunks |" in lossy and "| offload |" not in lossy


@pytest.mark.slow
def test_errors_are_measured_beside_the_same_step_without(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "head": partial(build, "mlp", batch=64, width=16, layers=1, classes=500),
        "narrow": partial(build, "mlp", batch=64, width=64, layers=1, classes=4),
    }
    monkeypatch.setattr(options_errors, "MEASURED", small | {"another": small["head"]})
    found = list(measure_errors(("head", "chunks", partial(WorkClock, 1.0)), ()))
    assert [row.budget for row in found] == list(options_errors.BUDGETS)
    tight = found[-1]
    assert tight.differing
    assert tight.loss_error < 1e-5 and tight.gradient_error < 1e-5 and tight.largest_error < 1e-4
    assert tight.measured_peak_bytes <= tight.budget_bytes < tight.base_peak_bytes
    (exact,) = measure_errors(("narrow", "chunks", partial(WorkClock, 1.0)), ())
    assert (exact.bits, exact.budget) == (Bits.EXACT, "")
    text = format_error_table([*found, exact, replace(tight, bits=Bits.LOSSY)])
    rounding, lossy = text.split("## Lossy")
    assert rounding.count("| head |") == len(found) and lossy.count("| head |") == 1
    assert "Nothing inexact is offered by: chunks on narrow." in text and "Not run: another." in text


def test_bench_options_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MODELS", {"small": "zoo:mlp,batch=32,width=16,layers=1,classes=300"})
    words = ["--models", "small", "--options", "offload,chunks", "--work", "0.1", "--out", str(tmp_path)]
    options.main(words)
    first = (tmp_path / "rows.csv").read_text()
    assert first.count("\n") == 1 + 4 * len(BUDGETS)
    assert "offload + chunks" in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "errors.md").exists()  # no small model was asked for
    monkeypatch.setattr(options, "build_graph", pytest.fail)  # nothing is traced again
    options.main(words)
    assert (tmp_path / "rows.csv").read_text() == first


def test_its_models_can_be_read_and_all_options_are_asked_for() -> None:
    assert all(parse_spec(spec) for spec in MODELS.values())
    assert not set(MODELS) & set(MEASURED)
    assert {name.partition(":")[0] for name in NAMES} == set(OPTIONS) - {"placement", "overlap"}


def test_committed_rows_need_chunks_at_small_budgets() -> None:
    rows = read_rows(RESULTS / "rows.csv", OptionsRow)
    assert not find_below_bound(rows)
    medium = {(row.options, row.budget): row for row in rows if row.model == "gpt2-medium"}
    assert medium[NONE, "30%"].status == "infeasible" and medium["chunks", "30%"].overhead is not None
