"""Batches of varying sizes over Inductor's kernels: the bits of ``torch.compile`` at each, and the budget from the first on."""

import copy
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.replay import collect_static
from planner.capture.step import TrainingStep
from planner.graphs.errors import InfeasibleError
from planner.measure.profile import profile
from planner.measure.steps import measure_outcome
from planner.settings.link import MEASURED_LINK
from planner.train.compile.dynamic import DynamicStep
from tests.support.inductor.steps import CASES, Case, compiled, mlp, prepare
from tests.support.marks import slow
from tests.support.models.outcomes import peak_bytes

pytestmark = [
    pytest.mark.usefixtures("fresh_compilers"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]

Batch = tuple[torch.Tensor, torch.Tensor]


def by_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Other ops for few rows, and much that is there at a time for many."""
    for layer in m.layers:
        x = F.dropout(layer(x).sin(), 0.1) if len(x) > 20 else layer(x).cos()
    return x


def batch(rows: int) -> Batch:
    return torch.randn(rows, 16), torch.randn(rows, 16)


@pytest.mark.slow
def test_each_size_is_compiled_and_planned_for_itself() -> None:
    torch.manual_seed(0)
    model = FunctionModule(by_size, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(4)))
    step = planner.compile(
        model,
        F.mse_loss,
        batch(256),
        budget="85%",  # of eager PyTorch's peak: less than what Inductor's kernels take with 288 rows
        kernels="inductor",
        dynamic=True,
        passes=1,
        time_limit_s=10.0,
        max_plans=2,
        options=["offload"],
        host_budget="1GB",
    )
    assert isinstance(step, DynamicStep)
    budget_bytes = step.plan.budget_bytes
    for rows in (12, 288):
        given = batch(rows)
        most = peak_bytes(partial(step, *given))
        plan = step.plans[-1]
        assert plan == step.plan
        assert plan.measured_peak_bytes <= plan.peak_bytes <= budget_bytes == plan.budget_bytes
        whole_bytes = plan.graph.keep_everything_peak_bytes
        if rows == 288:  # what was measured before the plan was made fits too
            assert whole_bytes > budget_bytes > most + plan.graph.static_bytes - 3 * given[0].nbytes
        assert MEASURED_LINK in plan.graph.provenance
        plain = compiled(lambda x, y: F.mse_loss(model(x), y))
        assert measure_outcome(plain, model, given, seed=1).list_differences(measure_outcome(step, model, given, seed=1)) == ()
    assert [plan.graph.provenance["inputs"][0] for plan in step.plans] == ["float32[12, 16]", "float32[288, 16]"]
    with pytest.raises(InfeasibleError, match=r"^for a batch of \[4096, 16\], \[4096, 16\]: budget .* is below"):
        step(*batch(4096))


@pytest.mark.parametrize("case", [Case(mlp), *slow(CASES["everything"])])
def test_kernels_profiled_alone_have_the_sizes_of_the_step(case: Case) -> None:
    """To the byte; the times differ by what was in the caches."""
    known = prepare(case)
    graph, step = known.graph, TrainingStep(known.workload.model, known.workload.loss_fn)
    unknown = replace(
        graph,
        ops=tuple(replace(op, time_s=0.0, workspace_bytes=0) for op in graph.ops),
        tensors=tuple(t if t.static else replace(t, size_bytes=0, shape=(), dtype="") for t in graph.tensors),
    )
    state, drawn = copy.deepcopy(step.state_dict()), torch.get_rng_state()
    captured = replace(known.captured, graph=unknown)
    found = profile(captured, collect_static(captured, step, known.workload.batch)).graph
    assert found.tensors == graph.tensors
    assert [op.workspace_bytes for op in found.ops] == [op.workspace_bytes for op in graph.ops]
    assert all(op.time_s > 0 for op in found.ops)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, state[name]) for name, value in step.state_dict().items())
