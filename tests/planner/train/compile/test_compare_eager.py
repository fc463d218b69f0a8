"""What planner.compile finds beside plain eager PyTorch: bits, time, peak; in the plan, in files, in words, as a warning."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.parts import FunctionModule
from planner.capture.program.program import call_of
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.errors import EagerWarning, FormatError
from planner.graphs.schedule import keep_everything
from planner.measure.steps import StepOutcome
from planner.plans.document import plan_to_dict, write_plan
from planner.plans.eager import DifferingOp, EagerComparison
from planner.plans.plan import Plan, plan_from_dict, read_plan
from planner.runtime.executor import Executor
from planner.show.report.describe import plan_data, plan_text
from planner.train.compile import compare_eager
from planner.train.compile.compare_eager import compare_with_eager, warn_of_differences
from tests.support.marks import slow
from tests.support.models.planned import DIFFERS, compiled, gpt2, plain
from tests.support.models.steps import random_schedule


def test_a_step_is_compared_with_eager() -> None:
    workload = gpt2()
    random_state = torch.get_rng_state()
    step = compiled(workload)
    assert torch.equal(torch.get_rng_state(), random_state)
    found = step.plan.eager
    assert found.identical and found.differences == () and found.first_op is None and found.failure == ""
    assert found.time_s > 0 and found.planned_time_s > 0
    assert found.overhead == found.planned_time_s / found.time_s - 1
    assert found.peak_bytes == pytest.approx(step.plan.measured_peak_bytes, rel=0.25)
    assert f"step time measured {found.slowdown} (predicted 0.0% slower than keeping everything)" in str(step.plan)
    assert "identical to eager; eager takes" in str(step.plan)


def test_eager_peak_equals_its_allocated_memory() -> None:
    width, batch = 512, 256
    model = nn.Sequential(nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, 1))
    workload = Workload(model, F.mse_loss, (torch.randn(batch, width), torch.randn(batch, 1)))
    found = compiled(workload).plan.eager
    parameters = 4 * sum(p.numel() for p in model.parameters())
    kept = 4 * batch * width
    assert 2 * parameters + 2 * kept <= found.peak_bytes <= 2 * parameters + 6 * kept


def test_eager_casts_its_weights_in_each_step_under_autocast() -> None:
    """A cast that is still there from an earlier step would lower eager PyTorch's peak and time."""
    width = 512
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = compiled(Workload(model, F.mse_loss, (torch.randn(1024, width), torch.randn(1024, 1))))
    assert step.plan.eager.peak_bytes >= step.plan.measured_peak_bytes


def test_compare_eager_false_skips_the_comparison() -> None:
    step = compiled(plain(), compare_eager=False)
    assert step.plan.eager is None
    assert "step time predicted 0.0% slower than keeping everything, optimal" in str(step.plan)
    assert "eager" not in str(step.plan)


def wrong(target: torch._ops.OpOverload, instead: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Workload, EagerComparison]:
    """What is found where the capture calls something else instead of `target`."""
    torch.manual_seed(0)
    # The two halves are alike; one op of the second is exchanged.
    model = FunctionModule(
        lambda m, x: m.last(torch.sin(m.second(torch.tanh(m.first(x + x[:1, :1]))))),  # one element, whose stride is a row's
        first=nn.Linear(16, 16),
        second=nn.Linear(16, 16),
        last=nn.Linear(16, 3),
    )
    workload = Workload(model, F.cross_entropy, (torch.randn(8, 16), torch.randint(3, (8,))))
    captured = capture(*workload)
    calls = captured.program.calls
    assert any(each.call.target is target for each in calls)
    others = (call_of(replace(each.call, target=instead), each.outputs) if each.call.target is target else each for each in calls)
    captured = replace(captured, program=replace(captured.program, calls=tuple(others)))
    executor = Executor(captured, random_schedule(captured.graph, 1), workload.model, workload.loss_fn)
    step = TrainingStep(workload.model, workload.loss_fn)
    return workload, compare_with_eager(captured, executor, step, workload.batch)


def test_differences_are_named_with_the_first_differing_op() -> None:
    workload, found = wrong(torch.ops.aten.sin.default, lambda x: torch.sin(x) * (1 + 1e-3))
    assert not found.identical
    assert found.eager_error is None
    by_name = {difference.name: difference for difference in found.differences}
    assert by_name.keys() == {"loss", *(f"gradient of {name}" for name, _ in workload.model.named_parameters())}
    assert all(d.max_abs is not None and 0 < d.max_abs < 0.1 and 0 < (d.relative or 0) < 1 for d in found.differences)
    assert found.first_op == DifferingOp("sin", "aten.sin.default", "")
    assert all(p.grad is None for p in workload.model.parameters())


def test_an_op_of_the_backward_pass_is_found_too() -> None:
    _, found = wrong(torch.ops.aten.cos.default, lambda x: torch.cos(x) + 1e-3)
    assert found.first_op.target == "aten.cos.default"
    assert {difference.name for difference in found.differences} == {
        f"gradient of {module}.{kind}" for module in ("first", "second") for kind in ("weight", "bias")
    }


def test_nan_difference_has_no_magnitude() -> None:
    _, found = wrong(torch.ops.aten.sin.default, lambda x: torch.sin(x) * float("nan"))
    assert [(d.max_abs, d.relative) for d in found.differences if d.name == "loss"] == [(None, None)]
    assert "differs from eager in loss; gradient of first.weight" in str(found)


class Noisy(nn.Module):
    """A step of eager PyTorch that does not repeat its bits, as where a kernel adds up in no particular order."""

    calls = 0

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            vars(Noisy)  # read, so that it is no constant
            setattr(Noisy, "calls", Noisy.calls + 1)  # noqa: B010
            x = x * (1 + self.offset + 1e-5 * (Noisy.calls % 2))
        return self.linear(x)


@pytest.mark.parametrize(("offset", "within"), [(0.0, True), *slow((0.01, False))])
def test_where_eager_does_not_repeat_its_bits_errors_are_compared(offset: float, within: bool) -> None:
    workload = Workload(Noisy(offset), F.cross_entropy, (torch.randn(8, 16), torch.randint(3, (8,))))
    captured = capture(*workload)
    executor = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
    Noisy.calls = 0  # the plan computes what the even calls do
    found = compare_with_eager(captured, executor, TrainingStep(workload.model, workload.loss_fn), workload.batch)
    assert not found.identical
    assert found.first_op is None
    assert 0 < found.eager_error < 1e-4
    assert found.within_own_error == within
    assert "eager run twice differs from itself by" in str(found)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EagerWarning)
        warn_of_differences(replace(compiled(plain(), compare_eager=False).plan, eager=found))
    assert any("the planned step differs from eager" in str(warning.message) for warning in caught) != within


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "it needs more memory than there is"),
        (ValueError("no\nway"), "ValueError: no"),
    ],
)
def test_eager_that_fails_does_not_stop_the_plan(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = compare_eager.measure_outcome

    def fails(step: object, *args: object, **options: object) -> object:
        if isinstance(step, TrainingStep):
            raise error
        return run(step, *args, **options)

    monkeypatch.setattr(compare_eager, "measure_outcome", fails)
    workload = plain()
    step = compiled(workload)
    assert step.plan.eager == EagerComparison(failure=said)
    assert step.plan.eager.overhead is None
    assert not step.plan.eager.identical
    assert f"eager: not run, {said}" in str(step.plan)
    assert "step time predicted 0.0% slower than keeping everything" in str(step.plan)
    step(*workload.batch).backward()


def test_a_kept_plan_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(plain(), cache=tmp_path)
    again = compiled(plain(), cache=tmp_path)
    assert again.plan == first.plan
    (path,) = tmp_path.iterdir()
    write_plan(replace(first.plan, eager=DIFFERS), path)
    found = compiled(plain(), cache=tmp_path).plan.eager  # what another process found does not hold here
    assert found.identical
    assert compiled(plain(), cache=tmp_path, compare_eager=False).plan.eager is None
    assert len(list(tmp_path.iterdir())) == 1
    found_names = iter((("loss",), ()))  # beside the plan, and beside another run of eager PyTorch
    monkeypatch.setattr(StepOutcome, "list_differences", lambda *_: next(found_names))
    write_plan(first.plan, path)
    with pytest.warns(EagerWarning, match="differs from eager in loss"):
        assert not compiled(plain(), cache=tmp_path).plan.eager.identical


def test_of_varying_sizes_the_first_is_compared() -> None:
    workload = plain()
    step = compiled(workload, dynamic=True)
    assert step.plan.eager.identical
    step(torch.randn(6, 16), torch.randint(3, (6,))).backward()
    assert step.plan.eager is None
    workload.model.zero_grad()
    step(*workload.batch).backward()
    assert step.plan.eager is not None


def test_reentrant_checkpoints_are_compared_too() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)
            self.inside = nn.Sequential(nn.Linear(16, 16), nn.GELU())  # reached by the nested backward pass only

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.inside, self.first(x), use_reentrant=True)
            return self.last(hidden)

    workload = plain()._replace(model=Checkpointed())
    found = compiled(workload).plan.eager
    assert found.identical
    assert all(p.grad is None for p in workload.model.parameters())


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
