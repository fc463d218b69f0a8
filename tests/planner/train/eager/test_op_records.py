"""Ops that the C++ library executes and records as Python does, with the same evictions."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.train.eager.recording import Recorder
from planner.train.eager.session import Rematerialization, rematerialize
from tests.support.eager.chains import RUNS, Run, chain, with_dropout, with_statistics, written_in_steps
from tests.support.eager.records import describe_records
from tests.support.eager.tensors import other_bytes
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

_LEARNING = 4  # steps, of which Python records the first


def enter_near(session: Rematerialization, *, native: bool) -> None:
    """Log all steps, of ops that last one second each: in Python only, unless `native`."""
    seconds = itertools.count()
    session.debug.recorder.memory.now = lambda: float(next(seconds))
    session.debug.recorder.follower._far_bytes = -1
    if not native:
        session.debug.native.record_with(None)


def record(run: Run, monkeypatch: pytest.MonkeyPatch, *, native: bool) -> tuple[list[Any], int]:
    """Return what is recorded of some steps, and the number of ops of the last forward pass that went through Python."""
    torch.manual_seed(0)
    model, x = chain(), torch.randn(64, 64)
    calls = itertools.count()
    run_in_python = Recorder.run

    def count(*args: Any) -> Any:
        next(calls)
        return run_in_python(*args)

    monkeypatch.setattr(Recorder, "run", count)
    with rematerialize("1GB") as session:
        enter_near(session, native=native)
        for _ in range(_LEARNING):
            run(model, x).backward()
            model.zero_grad()
        before = next(calls)
        loss = run(model, x)
        in_python = next(calls) - before - 1
        recorder = session.debug.recorder
        recorder.memory.settle()
        records = describe_records(recorder)
        log = recorder.follower.log
        assert log is not None
        step = session.plans.longest_step
        assert step is not None
        ops = [op._replace(node=0) for op in log.ops]
        state = [records, ops, log.sizes_bytes, log.made_bytes, log.unpacked, log.released, step.graph.ops, step.graph.tensors,
                 session.ops, session.kept_ops, session.peak_bytes, session.eager_peak_bytes]  # fmt: skip
        del loss
    monkeypatch.setattr(Recorder, "run", run_in_python)
    return state, in_python


@pytest.mark.parametrize("run", RUNS)
def test_records_are_those_of_python(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found, few = record(run, monkeypatch, native=True)
    expected, all_of_them = record(run, monkeypatch, native=False)
    assert found == expected
    assert few < all_of_them
    if run in (with_dropout, with_statistics, written_in_steps):  # draws, statistics and writes of activations among them
        assert few < 0.25 * all_of_them


def train(run: Run, heuristic: str, budget: int, *, native: bool) -> tuple[list[Tensor], list[Any]]:
    """Return the gradients of some steps within a budget, and what was evicted and recomputed."""
    torch.manual_seed(0)
    model, x = chain(), torch.randn(256, 64)
    others = other_bytes()
    with rematerialize(others + budget, heuristic=heuristic, max_recomputation=100) as session:
        enter_near(session, native=native)
        for _ in range(_LEARNING):
            model.zero_grad()
            run(model, x).backward()
        facts = [session.evictions, session.recomputed_ops, session.recomputed_by_module, session.peak_bytes - others]
    return [p.grad for p in model.parameters() if p.grad is not None], facts


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-full", "lru", "msps"])
@pytest.mark.parametrize("run", [with_dropout, with_statistics, written_in_steps])
def test_the_same_tensors_are_evicted(run: Run, heuristic: str) -> None:
    gradients, found = train(run, heuristic, 700_000, native=True)
    expected_gradients, expected = train(run, heuristic, 700_000, native=False)
    assert found == expected
    assert found[0] > 0
    assert all(map(torch.equal, gradients, expected_gradients))


NUMBERS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, i: x * (i + 2),
    lambda x, i: x * (0.5 + i),
    lambda x, i: x * bool(i % 2),
    lambda x, i: nn.functional.leaky_relu(x, 0.1 * (i + 1)),
    lambda x, i: torch.add(x, x, alpha=i + 1),
    lambda x, i: x.roll(i + 1, 0),
    lambda x, i: torch.cat([x, x[: i + 1]])[i + 1 :],
    lambda x, i: x.clamp(-0.5, None if i % 2 else 0.5),
    lambda x, i: x.to(torch.float64 if i % 2 else torch.float32),
]


@pytest.mark.parametrize("change", NUMBERS)
def test_each_op_is_recomputed_with_its_own_numbers(change: Callable[[Tensor, int], Tensor]) -> None:
    """Ops that differ only in a number have records of their own."""

    def run_steps() -> list[np.ndarray]:
        found = []
        for step in range(12):
            x = torch.linspace(-1, 1, 4096).requires_grad_()
            y = x
            for i in range(6):
                y = change(y.sin().exp(), (step + i) % 3).to(torch.float32)
            y.square().sum().backward()
            assert x.grad is not None
            found.append(x.grad.numpy().copy())
        return found

    expected = run_steps()
    with rematerialize(other_bytes() + 11 * 2**14, heuristic="lru", max_recomputation=100) as session:
        enter_near(session, native=True)
        found = run_steps()
    assert session.recomputed_ops > 0
    assert all(map(np.array_equal, found, expected))
