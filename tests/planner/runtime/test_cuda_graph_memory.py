"""Recorded steps hold and allocate what was counted, within the budget."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest

import planner
from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.cost.allocator import cpu_allocations
from graphs.errors import InfeasibleError
from graphs.ir import Kind
from graphs.zoo import Workload
from planner.distributed.ranks import SingleProcess
from planner.distributed.wrappers import Unwrapped
from planner.runtime.graphed_step import Recorder, recordable
from planner.search import Search
from planner.training.compiler import Compiler
from planner.training.step import PlannedStep
from tests.support.budgets import between
from tests.support.recorded_steps import RunsAgain, assert_same, dropout_and_norm, on_cuda, recorded, train
from tests.support.steps import make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_what_goes_in_and_out_is_counted_twice() -> None:
    workload = dropout_and_norm()
    plain = capture(*workload)
    captured = recordable(plain)
    inputs = sum(value.nbytes for value in workload.batch)
    trained = sum(p.nbytes for p in workload.model.parameters())
    loss = 4
    added = captured.graph.static_bytes - plain.graph.static_bytes
    assert added == inputs + loss + loss + trained  # inputs, the loss's gradient, the loss, gradients
    by_kind = captured.graph.static_bytes_by_kind
    assert by_kind[Kind.GRADIENT] == trained and by_kind[Kind.OUTPUT] == loss


class OnlyRecords(RunsAgain):
    """Its replays do nothing, so that what is allocated is the copies."""

    def record(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Callable[[], None]]:
        return super().record(function, *args)[0], lambda: None


def test_a_replayed_step_allocates_what_was_counted() -> None:
    workload = dropout_and_norm()
    captured = recordable(capture(*workload))
    step = recorded(workload, recorder=OnlyRecords())

    def run() -> None:
        loss = step(*workload.batch)
        loss.backward()

    run()
    for parameter in workload.model.parameters():
        parameter.grad = None
    by_kind = captured.graph.static_bytes_by_kind
    assert peak_of(run) == by_kind[Kind.GRADIENT] + by_kind[Kind.OUTPUT] + 4  # and the gradient of the loss, by autograd


class Measures(RunsAgain):
    """Holds what both passes have in memory at most, and what it loses."""

    def __init__(self, lost: int) -> None:
        super().__init__(lost)

    def warm_up(self, run: Callable[[], object]) -> None:
        super().warm_up(run)
        self.held += peak_of(run)


def peak_of(run: Callable[[], object]) -> int:
    """What `run` allocates at most, at once."""
    sizes = [event.size_bytes or 0 for event in cpu_allocations(lambda _: run())]
    return max(accumulate(sizes))


def solved(workload: Workload, budget: str | None, recorder: Callable[[], Recorder]) -> PlannedStep:
    """The step within `budget`, or half way from the least to the peak."""
    search = Search({"tolerance": 0.05, "time_limit_s": 60.0}, swap="never")
    making = Compiler(Unwrapped(workload.model, SingleProcess()), workload.loss_fn, "adamw", False, 1, search, recorder)
    profiled = making.profile(making.capture(workload.batch), workload.batch)
    return making.solve(profiled, workload.batch, budget or between(profiled.graph))


def test_the_budget_holds_for_what_the_recordings_keep() -> None:
    workload, other = make("gpt2_written"), make("gpt2_written")
    made: list[weakref.ref[RunsAgain]] = []
    lost = iter([100_000, 0, 0])

    def recorder() -> RunsAgain:
        assert all(before() is None for before in made)  # two recordings are never held
        new = Measures(next(lost))
        made.append(weakref.ref(new))
        return new

    gc.collect()
    gc.disable()
    try:
        step = solved(workload, None, recorder)
    finally:
        gc.enable()
    assert len(made) == 2
    assert step.plan.measured_peak_bytes is not None
    assert 0.97 * step.plan.peak_bytes <= step.plan.measured_peak_bytes <= step.plan.budget_bytes
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert_same(train(other, TrainingStep(other.model, other.loss_fn)), train(workload, step))


def test_a_pool_that_never_fits_is_one_error() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"the measured peak is .*, over the budget of .*a CUDA graph's pool has lost some.*raise the budget",
    ):
        solved(dropout_and_norm(), "100%", partial(RunsAgain, 10**9))


@pytest.mark.gpu
def test_the_pool_of_cuda_graphs_is_within_the_budget() -> None:
    workload = on_cuda()
    step = planner.compile(*workload, budget="1GB", optimizer="adamw", cuda_graph=True)
    assert step.plan.measured_peak_bytes is not None
    assert step.plan.peak_bytes <= step.plan.measured_peak_bytes <= 10**9
    step(*workload.batch).backward()
