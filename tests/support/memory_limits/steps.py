"""Checks of steps under a limit of the process's memory.

A process of its own: glibc is told to give memory back at once, so that what is free does not depend on what was before.
"""

import copy
import ctypes
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.lowering.lower import Capture
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.errors import OutOfMemoryError
from planner.graphs.schedule import keep_everything
from planner.measure import tracing
from planner.plans.solve import solve
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from tests.support.models.outcomes import assert_equal_steps

_MMAP_THRESHOLD = -3  # of mallopt
_MB = 10**6

Batch = tuple[torch.Tensor, torch.Tensor]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 64)) for _ in range(4)
    ]
    return nn.Sequential(*parts)


def batch() -> Batch:
    torch.manual_seed(1)
    return torch.randn(2048, 64), torch.randn(2048, 64)


def used_bytes() -> int:
    return int(psutil.Process().memory_info().data)


def elements() -> int:
    """Of all tensors that Python knows, but for fake ones."""
    return sum(t.numel() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))


@contextmanager
def limited(more_bytes: int) -> Iterator[None]:
    """Inside, the process may take `more_bytes` more than it has."""
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes() + more_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def profiled(model: nn.Module, given: Batch) -> Capture:
    return tracing.profile_capture(capture(model, F.mse_loss, given), Workload(model, F.mse_loss, given), PlanSettings(passes=1))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, buffers, gradients, the optimizer's state and the random state."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moments = [value for of_one in optimizer.state.values() for value in of_one.values()]
    return [value.clone() for value in (*model.state_dict().values(), *gradients, *moments, torch.get_rng_state())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def both_passes() -> None:
    """Either pass may fail: all is as before, nothing is held, and the next call is right."""
    model, given = blocks(), batch()
    twin = copy.deepcopy(model)
    captured = profiled(model, given)
    plan = solve(captured.graph, "60%", solver="sac")  # the backward pass takes far more than the forward pass
    step = Executor(captured, plan.schedule, model, F.mse_loss)
    optimizer, others = torch.optim.Adam(model.parameters()), torch.optim.Adam(twin.parameters())
    torch.manual_seed(2)
    step(*given).backward()
    optimizer.step()
    torch.manual_seed(2)
    F.mse_loss(twin(given[0]), given[1]).backward()
    others.step()
    before, seen = state(model, optimizer), set()
    assert same(before, state(twin, others))
    for more in count(2, 6):
        loss, there = None, elements()
        with limited(more * _MB):
            try:
                loss = step(*given)
                loss.backward()
            except MemoryError as error:
                failed = error
            else:
                break
        assert isinstance(failed, OutOfMemoryError)
        assert failed.op is not None and failed.asked_bytes
        assert f"op {failed.op!r}" in str(failed) and "\n" not in str(failed)
        seen.add("forward" if loss is None else "backward")
        assert f"in the {'forward' if loss is None else 'backward'} pass" in str(failed)
        loss = None
        assert elements() - there < given[0].numel()  # no activation, though the error is still there
        assert same(before, state(model, optimizer))
    assert seen == {"forward", "backward"}
    torch.set_rng_state(before[-1])
    expected = F.mse_loss(twin(given[0]), given[1])
    expected.backward()
    assert loss is not None and torch.equal(loss, expected)
    assert same(state(model, optimizer), state(twin, others))  # the step that fits was called after all those that did not


def advised_budget() -> None:
    """What is advised runs under the same limit; where nothing is, no schedule fits."""
    model, given = blocks(), batch()
    captured = profiled(model, given)
    step = Executor(captured, keep_everything(captured.graph), model, F.mse_loss)
    step(*given).backward()
    advised: list[int | None] = []
    for more in (4, 26, 42, 58):
        model.zero_grad()
        with limited(more * _MB):
            try:
                step(*given).backward()
            except OutOfMemoryError as error:
                advised.append(error.budget_bytes)
                text = str(error)
        if (budget_bytes := advised[-1]) is None:
            assert "No schedule of this step fits into what is free: at least" in text
            continue
        assert f"Plan with budget='{budget_bytes / _MB:g}MB'" in text
        plan = solve(captured.graph, budget_bytes, tolerance=0.5)
        other = Executor(captured, plan.schedule, model, F.mse_loss)
        model.zero_grad()
        with limited(more * _MB):
            other(*given).backward()
    assert [budget is None for budget in advised] == [True, False, False, False]
    assert advised[1:] == sorted(advised[1:])


def torch_compile() -> None:
    """A graph under ``torch.compile``, in either pass."""
    model, given = blocks(), batch()
    twin = copy.deepcopy(model)
    # Modelled times: measured ones make a plan now and then by which one pass alone can fail.
    compiled = torch.compile(model, backend="planner", dynamic=False, options={"budget": "60%", "roofline": "cpu"})
    torch.manual_seed(2)
    F.mse_loss(compiled(given[0]), given[1]).backward()
    torch.manual_seed(2)
    F.mse_loss(twin(given[0]), given[1]).backward()
    seen = set[tuple[str, bool]]()
    for more in count(2):
        model.zero_grad()
        before = [value.clone() for value in (*model.state_dict().values(), torch.get_rng_state())]
        out = None
        with limited(more * _MB):
            try:
                out = compiled(given[0])
                F.mse_loss(out, given[1]).backward()
                break
            except OutOfMemoryError as error:
                seen.add((str(error).split()[5], error.op is not None))
        if out is None:
            assert same(before, [*model.state_dict().values(), torch.get_rng_state()])
        assert all(p.grad is None for p in model.parameters())
        del out
    assert seen == {("forward", True), ("backward", True)}, seen
    model.load_state_dict(twin.state_dict())
    assert_equal_steps(compiled, model, twin, given[0])


CHECKS: dict[str, Callable[[], None]] = {
    "both_passes": both_passes,
    "advised_budget": advised_budget,
    "torch_compile": torch_compile,
}


def run_check(name: str) -> None:
    """Run one of them, in a process of its own."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)
    CHECKS[name]()
