"""What steps leave behind that were executed by a schedule, beside eager PyTorch."""

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner.capture.lowering.lower import Capture
from planner.capture.replay import collect_written_tensors
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.ir import Op
from planner.graphs.schedule import Schedule
from planner.measure.pool_memory import measure_peak
from planner.measure.steps import StepOutcome, get_loss, measure_memory, measure_outcome
from planner.runtime.allocator import measure_memory_rise
from planner.runtime.executor import Executor
from tests.support.models.steps import random_schedule


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch's CPU allocator provides at once while `run` runs."""
    gc.collect()  # else tensors of other tests may be freed in between
    return measure_memory_rise(run, torch.device("cpu")).peak_bytes


def train(workload: Workload, schedule: tuple[Capture, Schedule] | None) -> dict[str, torch.Tensor]:
    """All that three steps of AdamW leave behind; plain PyTorch without a schedule."""
    model = copy.deepcopy(workload.model)
    step = TrainingStep(model, workload.loss_fn)
    run = step if schedule is None else Executor(schedule[0], schedule[1], model, workload.loss_fn)
    return train_by(run, model, [workload.batch] * 3)


def train_by(run: Callable[..., Any], model: nn.Module, batches: Iterable[Sequence[Any]]) -> dict[str, torch.Tensor]:
    """All that a step of AdamW on each of `batches` leaves behind, which are drawn as they come."""
    # With an eps that half precision has.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    torch.manual_seed(11)
    left = {}
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = get_loss(run(*batch))
        loss.backward()
        left[f"loss {i}"] = loss.detach()
        left |= {f"gradient {i} of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    left |= {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    left["random state"] = torch.get_rng_state()
    return {name: value if value.layout is torch.strided else value.to_dense() for name, value in left.items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_equal_steps(
    step: Callable[..., Any], model: nn.Module, twin: nn.Module, *batch: Any, loss_fn: Any = None, steps: int = 1, seed: int = 1
) -> None:
    """Compare steps of `model` with those of `twin` in eager PyTorch: results, gradients, buffers and random state."""
    eager = twin if loss_fn is None else TrainingStep(twin, loss_fn)
    for _ in range(steps):
        found: list[dict[str, torch.Tensor]] = []
        for run, of in ((eager, twin), (step, model)):
            of.zero_grad()
            torch.manual_seed(seed)
            result = get_loss(run(*batch))
            result.square().sum().backward()
            gradients = {f"gradient of {name}": p.grad for name, p in of.named_parameters() if p.grad is not None}
            found.append({"result": result.detach(), "random": torch.get_rng_state(), **dict(of.named_buffers()), **gradients})
        assert_same(*found)
    model.zero_grad(), twin.zero_grad()


def assert_exact(step: Callable[..., Any], model: nn.Module, batch: Batch, loss_fn: Any = None, *, seed: int = 1) -> None:
    """Compare a step with eager PyTorch from one state of `model`, which both leave as it was."""
    wanted = measure_outcome(TrainingStep(model, loss_fn), model, batch, seed=seed)
    assert wanted.list_differences(measure_outcome(step, model, batch, seed=seed)) == ()


def assert_exact_within_budget(step: Any, model: nn.Module, batch: Batch, loss_fn: Any = None) -> None:
    """Compare a step of ``planner.compile`` with eager PyTorch, and its peak with the budget, in this step and the next."""
    model.zero_grad()
    assert_exact(step, model, batch, loss_fn)
    static_bytes = step.plans[-1].graph.static_bytes - 4  # without the gradient of the loss
    again = measure_memory(step, batch, static_bytes=static_bytes, device=torch.device("cpu"))
    assert again.peak_bytes <= step.plans[-1].budget_bytes == step.plan.budget_bytes


def executor(model: nn.Module, batch: Batch, loss_fn: Any = None) -> Executor:
    captured = capture(model, loss_fn, batch)
    return Executor(captured, random_schedule(captured.graph, 1), model, loss_fn)


def check_three_steps(model: nn.Module, batch: Batch, loss_fn: Any = None) -> Executor:
    """Three steps of a plan equal eager PyTorch's to the last bit, as parameters change."""
    planned, eager = executor(model, batch, loss_fn), TrainingStep(model, loss_fn)
    for seed in range(3):
        found = measure_outcome(eager, model, batch, seed=seed).list_differences(
            measure_outcome(planned, model, batch, seed=seed)
        )
        # wav2vec2 makes its input's view a leaf (requires_grad = True), whose gradient nobody can read.
        assert [name for name in found if "outside the model" not in name] == []
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
    return planned


def executed(capture: Capture, schedule: Schedule, workload: Workload) -> tuple[StepOutcome, int]:
    """What the step leaves behind, and its measured peak."""
    model, loss_fn, batch = workload
    step = TrainingStep(model, loss_fn)
    executor = Executor(capture, schedule, model, loss_fn)
    found = measure_outcome(executor, model, batch, seed=0, written=collect_written_tensors(capture, step, batch))
    return found, measure_peak(capture, executor, step, batch).peak_bytes


def may_differ(capture: Capture, op: Op) -> set[str]:
    """Names of the results of the step that may differ by `op`, as ``StepOutcome`` has them."""
    said = op.differs.partition("(")[2].removesuffix(")")
    gradients = [f"gradient of {capture.graph.tensors[t].name.removeprefix('model.')}" for t, _ in capture.program.gradients]
    return {name.removeprefix("the ") for name in said.split(", ")}.union(gradients if said.endswith("gradients") else ())


def assert_alike_in_threads(executor: Executor, batch: Sequence[Any], *, rounds: int) -> None:
    """Three threads that step at once compute the gradients that one does, `rounds` times."""
    parameters = list(executor.training_step.parameters())
    expected = torch.autograd.grad(executor(*batch), parameters)
    wrong = []

    def steps() -> None:
        for _ in range(rounds):
            found = torch.autograd.grad(executor(*batch), parameters)
            wrong.extend(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 3 * rounds * len(parameters) and not any(wrong)


def late_copies(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make copies in the host's memory slow; the names of the threads that have made some."""
    makers: set[str] = set()

    def slow(target: Any, source: Any) -> None:
        makers.add(threading.current_thread().name)
        time.sleep(0.001)
        target[:] = source

    monkeypatch.setattr(np, "copyto", slow)
    return makers
