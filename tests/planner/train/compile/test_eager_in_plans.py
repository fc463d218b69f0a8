"""The comparison with eager PyTorch in plans: warnings, files, and what a plan says."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from graphs.errors import EagerWarning, FormatError
from planner.plans.document import plan_to_dict, write_plan
from planner.plans.eager import EagerComparison
from planner.plans.plan import Plan, plan_from_dict, read_plan
from planner.show.report.describe import plan_data, plan_text
from planner.train.compile.compare_eager import warn_of_differences
from tests.support.models.planned import DIFFERS, compiled, plain


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(plain(), compare_eager=False).plan


def test_a_difference_is_a_warning(plan: Plan) -> None:
    said = (
        r"the planned step differs from eager in loss by up to 5.0e-01, 2.5e-01 of its largest element; buffer mean; gradient of "
        r"0 by up to 1.0e-07 and 2 more, from op 'mm_3' \(aten.mm.default\) in h.0 on, by a gradient error of 2.0e-06; "
        r"eager run twice"
    )
    with pytest.warns(EagerWarning, match=said):
        warn_of_differences(replace(plan, eager=replace(DIFFERS, peak_bytes=10**6)))


def test_large_difference_from_eager_warns(plan: Plan) -> None:
    same = EagerComparison(peak_bytes=10**9, time_s=1.0, planned_time_s=1.4)
    large = replace(plan, graph=replace(plan.graph, keep_everything_peak_bytes=2 * 10**9))
    with pytest.warns(EagerWarning, match=r"takes 2.00 GB without recomputation, and eager 1.00 GB: one op was"):
        warn_of_differences(replace(large, eager=same))
    with pytest.warns(
        EagerWarning, match=r"takes 1.6 s without recomputation, and eager 1 s: other work ran on the machine, and"
    ):
        warn_of_differences(replace(plan, eager=replace(same, planned_time_s=1.6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_differences(replace(plan, eager=same))
        warn_of_differences(replace(plan, eager=replace(same, time_s=1e-4, planned_time_s=1e-3)))  # of no weight
        warn_of_differences(replace(plan, eager=EagerComparison(failure="no memory")))
        warn_of_differences(plan)


@pytest.mark.parametrize("eager", [None, DIFFERS, EagerComparison(failure="no memory"), EagerComparison(time_s=1e-3)])
def test_the_comparison_is_kept_in_files(plan: Plan, eager: EagerComparison | None, tmp_path: Path) -> None:
    compared = replace(plan, eager=eager)
    write_plan(compared, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == compared
    assert ("eager" in json.loads((tmp_path / "plan.json").read_text())) == (eager is not None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_s": -1.0}, r"eager.time_s is -1.0: expected `float` >= 0.0"),
        ({"more": 1}, r"eager: object contains unknown field `more`"),
        (
            {"differences": [{"name": "loss", "max_abs": -1, "relative": None}]},
            r"eager.differences\[0\].max_abs is -1: expected `float` >= 0.0",
        ),
        (
            {"differences": [{"name": "loss", "max_abs": None}]},
            r"eager.differences\[0\]: object missing required field `relative`",
        ),
        ({"first_op": {"name": "a"}}, r"eager.first_op: object missing required field `target`"),
        ({"eager_error": -1.0}, r"eager.eager_error is -1.0: expected `float` >= 0.0"),
    ],
)
def test_a_comparison_that_is_none_is_refused(plan: Plan, change: dict[str, object], said: str) -> None:
    data = plan_to_dict(replace(plan, eager=DIFFERS))
    with pytest.raises(FormatError, match=said):
        plan_from_dict({**data, "eager": {**data["eager"], **change}})


def test_plan_reports_the_comparison_with_eager(plan: Plan, tmp_path: Path) -> None:
    compared = replace(plan, eager=DIFFERS)
    assert "100.0% slower than eager, one step of each" in plan_text(compared)
    assert "differs from eager in loss" in plan_text(compared)
    assert "beside eager" in plan_text(compared) and "beside eager" not in plan_text(plan)
    assert plan_data(compared)["eager"]["overhead"] == 1.0
    assert plan_data(compared)["eager"]["identical"] is False
    assert plan_data(plan)["eager"] is None
    step = compiled(plain())
    step.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "slower than eager" in text
    assert "identical to eager" in text
