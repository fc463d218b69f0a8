"""Errors and warnings are those of the line that called a public function, with the user's frames only."""

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import InfeasibleError, PlannerError, TraceError, UsageError

X, Y = torch.randn(8, 16), torch.randn(8, 4)
ROOT = Path(planner.__file__).parent
QUICK: dict[str, Any] = {"passes": 1, "time_limit_s": 5.0, "compare_eager": False}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def compile_without_time() -> None:
    planner.compile(net(), F.mse_loss, (X, Y), budget="1MB", time_limit_s=0)  # which a dataclass refuses


def report_before_the_block() -> None:
    planner.rematerialize("1GB").report("page.html")


def read_the_peak_before_the_block() -> None:
    planner.rematerialize("1GB").peak_bytes  # noqa: B018


def wait_before_the_block() -> None:
    planner.rematerialize("1GB").wait_for_plans()


def compile_too_little() -> None:
    planner.compile(net(), F.mse_loss, (X, Y), budget=3000, **QUICK)


def solve_too_little() -> None:
    planner.solve(planner.trace(net(), F.mse_loss, (X, Y), roofline="h100"), 3000)


def trace_wrong() -> None:
    planner.trace(net(), F.mse_loss, X)


def advise_wrong() -> None:
    planner.advise(net(), F.mse_loss, X)


def run_wrong() -> None:
    planner.run(planner.solve(planner.trace(net(), F.mse_loss, (X, Y), roofline="h100"), "100%"), net(), F.mse_loss, (X,))


def checkpoint_wrong() -> None:
    planner.checkpoint(net(), budget="8 bananas")


def checkpoint_too_little() -> None:
    torch._dynamo.reset()
    planner.checkpoint(net(), budget=3000)(X)


def rematerialize_wrong() -> None:
    planner.rematerialize("8 bananas")


def step_with_another_batch() -> None:
    planner.compile(net(), F.mse_loss, (X, Y), budget="1MB", **QUICK)(X.repeat(2, 1), Y)


def load_nothing() -> None:
    planner.Plan.load("there_is_no_such_file.json")


@pytest.mark.parametrize(
    "call",
    [
        compile_without_time,
        report_before_the_block,
        read_the_peak_before_the_block,
        wait_before_the_block,
        compile_too_little,
        solve_too_little,
        trace_wrong,
        advise_wrong,
        run_wrong,
        checkpoint_wrong,
        checkpoint_too_little,
        rematerialize_wrong,
        step_with_another_batch,
        load_nothing,
    ],
)
def test_errors_are_raised_at_the_public_call(call: Callable[[], None]) -> None:
    with pytest.raises(PlannerError) as raised:
        call()
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert len(frames) <= 3 and "<string>" not in [
        frame.filename for frame in frames
    ]  # a call of a module passes through PyTorch
    assert [frame.filename for frame in frames if Path(frame.filename).is_relative_to(ROOT)] == []
    assert "Traceback (most recent call last)" in raised.value.full_traceback
    assert raised.value.full_traceback.count("\n  File") > 2
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback (most recent call last)") == 1


def test_arguments_that_a_function_does_not_take_are_named_with_those_that_it_does() -> None:
    with pytest.raises(
        UsageError, match=r"compile\(model, loss_fn, batch\): too many positional arguments; options are"
    ) as raised:
        planner.compile(net(), F.mse_loss, X, Y, budget="1MB", **QUICK)  # type: ignore[call-arg, arg-type]
    assert len(traceback.extract_tb(raised.value.__traceback__)) == 1
    with pytest.raises(UsageError, match=r"planner\.checkpoint\(model, budget=\.\.\.\): missing a required argument: 'budget'"):
        planner.checkpoint(net())  # type: ignore[call-arg]


def test_arguments_that_a_model_does_not_take_are_refused_as_by_eager_pytorch(capfd: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    model = planner.checkpoint(net(), budget="100%")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'") as raised:
        model()
    assert [f for f in traceback.extract_tb(raised.value.__traceback__) if Path(f.filename).is_relative_to(ROOT)] == []
    with pytest.raises(TraceError, match="an op of the model fails on this batch"):
        model(X[:, :3])
    assert capfd.readouterr().err == ""  # no log of fake kernels


def test_errors_in_the_backend_have_no_frames_of_ours() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="InfeasibleError: budget 3") as raised:
        torch.compile(net(), backend="planner", options={"budget": 3000})(X).sum().backward()
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames if Path(frame.filename).is_relative_to(ROOT)] == []


class Wrong(nn.Module):
    """Fails in its own code, or in an op that only real tensors refuse."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(16, 4), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "own":
            raise KeyError("missing")
        if self.fault == "index":
            x = x + F.embedding(torch.tensor([99]), self.linear.weight)
        return self.linear(x.double() if self.fault == "dtype" else x)


def train_by_compile(model: nn.Module) -> None:
    planner.compile(model, F.mse_loss, (X, Y), budget="100%", **QUICK)(X, Y).backward()


def train_by_checkpoint(model: nn.Module) -> None:
    torch._dynamo.reset()
    F.mse_loss(planner.checkpoint(model, budget="100%")(X), Y).backward()


def train_in_a_block(model: nn.Module) -> None:
    with planner.rematerialize("1MB"):
        F.mse_loss(model(X), Y).backward()


@pytest.mark.filterwarnings("ignore:op addmm cannot be measured alone")
@pytest.mark.parametrize("fault", ["own", "index", "dtype"])
@pytest.mark.parametrize("train", [train_by_compile, train_by_checkpoint, train_in_a_block])
def test_errors_of_the_users_model_have_its_line_and_no_frames_of_ours(train: Callable[[nn.Module], None], fault: str) -> None:
    with pytest.raises((KeyError, IndexError, RuntimeError)) as eager:
        Wrong(fault)(X)
    with pytest.raises(eager.type) as raised:
        train(Wrong(fault))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.filename for frame in frames if Path(frame.filename).is_relative_to(ROOT)] == []
    assert any(frame.name == "forward" and frame.filename == __file__ for frame in frames)
    assert len(frames) <= 9 and not any("_dynamo" in frame.filename for frame in frames)
    assert str(ROOT) in raised.value.full_traceback


def test_an_op_of_the_loss_function_has_no_frames_of_ours() -> None:
    batch = X, torch.full((8,), 9)
    with pytest.raises(IndexError, match="Target 9 is out of bounds") as raised, pytest.warns(match="measured alone"):
        planner.compile(net(), F.cross_entropy, batch, budget="1MB", **QUICK)
    assert [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)] == [__file__]


def test_an_op_that_fails_on_the_batch_under_checkpoint_is_named_in_one_line() -> None:
    with pytest.raises(TraceError, match=r"an op of the model fails on this batch: RuntimeError: .*, at .*test_short_tracebacks"):
        train_by_checkpoint(FunctionModule(lambda m, x: m.linear(m.linear(x)), linear=nn.Linear(16, 4)))


def test_frames_of_the_model_stay() -> None:
    model = FunctionModule(lambda m, x: m.linear(m.linear(x)), linear=nn.Linear(16, 4))
    with pytest.raises(PlannerError) as raised:
        planner.compile(model, F.mse_loss, (X, Y), budget="1MB", **QUICK)
    shown = "".join(traceback.format_exception(raised.value))
    assert "torch/_dynamo" not in shown
    assert len(shown.splitlines()) < 40


def test_an_error_that_is_being_handled_stays_as_context() -> None:
    try:
        raise KeyError("ours")
    except KeyError:
        with pytest.raises(UsageError) as raised:
            planner.compile(net(), F.mse_loss, (X, Y), budget="1MB", swap="sometimes")
    assert isinstance(raised.value.__context__, KeyError)
    with pytest.raises(InfeasibleError) as refused:
        compile_too_little()
    assert refused.value.__context__ is None


def test_warnings_point_at_the_users_line() -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 4)
            self.last = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.linear(x)
            return self.last

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        planner.compile(Setting(), F.mse_loss, (X, Y), budget="1MB", **QUICK)
    assert [Path(warning.filename) for warning in seen if "last is set by the step" in str(warning.message)] == [Path(__file__)]
