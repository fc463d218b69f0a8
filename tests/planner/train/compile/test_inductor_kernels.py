"""Training by plans over Inductor's kernels: the bits of ``torch.compile``, within the budget, at the peak that was predicted."""

import copy
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
import torch

from planner.capture.kernels.variants import CompileVariant
from planner.graphs.ir import Graph, Phase
from planner.graphs.schedule import Compute, Schedule, keep_everything
from planner.graphs.simulate import simulate
from tests.support.budgets import on_the_way
from tests.support.inductor.steps import CASES, Prepared, differences, freed_over, prepare
from tests.support.marks import slow_except

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]

FAST = ("everything",)
RECOMPUTES = ("everything", "mlp", "gpt2", "convnet", "autocast")
_prepared = cache(prepare)


@pytest.fixture(scope="module", autouse=True)
def captures(fresh_compilers: None) -> Iterator[None]:
    """Let go of behind the last test."""
    yield
    _prepared.cache_clear()


def prepared(name: str, variant: CompileVariant = CompileVariant.DEFAULT) -> Prepared:
    return _prepared(CASES[name], variant)


def marked(names: Iterable[str]) -> list[object]:
    return slow_except(names, *FAST)


def measured_as_predicted(graph: Graph, schedule: Schedule) -> int:
    """The peak; the gradient of the loss counts throughout, and is there from the backward pass on."""
    memory = simulate(graph, schedule).memory_bytes
    backward = (isinstance(step, Compute) and graph.ops[step.op].phase is Phase.BACKWARD for step in schedule.steps)
    begin = next(i for i, is_backward in enumerate(backward) if is_backward)
    tangent_bytes = sum(t.size_bytes for t in graph.tensors if t.name.endswith("tangent"))
    return max(max(memory[:begin]) - tangent_bytes, *memory[begin:])


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("name", marked(CASES))
def test_trains_as_torch_compile_does(name: str, share: float) -> None:
    known = prepared(name)
    (budget,) = on_the_way(known.graph, share)
    step = known.step(budget)
    assert differences(known.wanted, known.found(step)) == []
    assert step.plan.measured_peak_bytes == measured_as_predicted(known.graph, step.plan.schedule)
    assert step.plan.measured_peak_bytes <= step.plan.peak_bytes <= budget


@pytest.mark.parametrize("name", marked(RECOMPUTES))
def test_recomputed_inductor_kernels_are_exact(name: str) -> None:
    """Dropout, and batch norm whose statistics are written once."""
    known = prepared(name)
    (budget,) = on_the_way(known.graph, 0.05)
    step = known.step(budget)
    again = Counter(step.plan.schedule.computed)
    assert len(step.plan.schedule.computed) > step.plan.graph.ops
    assert all(count == 1 for op, count in again.items() if known.graph.ops[op].random or known.graph.ops[op].mutates)
    assert differences(known.wanted, known.found(step)) == []


@pytest.mark.parametrize("name", marked(RECOMPUTES))
def test_outputs_take_the_memory_of_inputs_that_go(name: str) -> None:
    """Also where nothing is computed again: less is in memory than out of place, to the byte, with the same bits."""
    known = prepared(name)
    schedule = keep_everything(known.graph)
    assert sum(len(over) for over in (freed_over(known.graph, schedule, i) for i in range(len(schedule.steps)))) > 0
    budget = simulate(known.graph, schedule).peak_bytes
    step = known.step(budget)
    assert step.plan.measured_peak_bytes == measured_as_predicted(known.graph, step.plan.schedule) <= budget
    assert differences(known.wanted, known.found(step)) == []


def test_backward_after_a_second_forward_raises_on_overwritten_tensors() -> None:
    """As by ``torch.compile``: `scale` is written by each forward pass, and its gradient's factor is what it was."""
    known = prepared("everything")
    model, _, batch = known.workload
    (budget,) = on_the_way(known.graph, 0.5)
    step, version = known.step(budget), model.scale._version
    state = copy.deepcopy(model.state_dict())
    first, second = step(*batch)[0], step(*batch)[0]
    assert model.scale._version > version
    second.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    model.zero_grad()
    model.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("variant", CompileVariant)
@pytest.mark.parametrize("name", ["unet", "convnet", "mlp"])
def test_each_compile_variant_meets_its_peak_and_results(name: str, variant: CompileVariant) -> None:
    """Its peak, and what torch.compile computes but for rounding; only those with equal bits are taken."""
    known = prepared(name, variant)
    (budget,) = on_the_way(known.graph, 0.5)
    step = known.step(budget)
    assert step.plan.measured_peak_bytes == measured_as_predicted(known.graph, step.plan.schedule) <= budget
    found = known.found(step)
    if variant is CompileVariant.BUDGET and any(op.random for op in known.graph.ops):
        return  # other numbers are drawn
    assert all(torch.allclose(found[key], known.wanted[key], rtol=1e-3, atol=1e-4) for key in known.wanted)
