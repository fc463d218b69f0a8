"""A 7B model is planned for a device that is not here, without being allocated."""

import resource

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.capture.workload.models import build
from planner.graphs.errors import InfeasibleError
from planner.graphs.ir import Graph, Kind
from planner.measure.tracing import trace
from planner.plans.solve import solve
from planner.plans.summary import summarize
from planner.solvers.bounds import bound_least_budget
from tests.support.marks import slow


# A quarter of its layers are still more than the memory that tracing them may take.
@pytest.fixture(scope="module", params=[8, *slow(32)])
def layers(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def llama(layers: int) -> Graph:
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build("llama", layers=layers, seq=4096, batch=1, dtype="bfloat16")
        return trace(*workload, roofline="h200")


def test_large_model_is_traced_without_allocation(llama: Graph, layers: int) -> None:
    assert llama.provenance["parameters"] == 262_148_096 + layers * 202_383_360
    assert llama.static_bytes_by_kind[Kind.PARAMETER] == 2 * llama.provenance["parameters"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 4 * 10**9
    assert llama.provenance["times"] == "modelled"


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_large_model_is_solved_to_a_small_gap(llama: Graph, share: float) -> None:
    # Parameters and gradients alone are 68% of the peak: the shares are of what lies above the least budget.
    peak, least = summarize(llama).keep_everything_peak_bytes, bound_least_budget(llama).budget_bytes
    plan = solve(llama, int(least + share * (peak - least)), time_limit_s=60.0, memory="allocated")
    assert plan.gap < 0.005
    assert 0 < plan.overhead < 0.05


def test_parameters_and_gradients_must_fit(llama: Graph) -> None:
    with pytest.raises(InfeasibleError, match=r"GB of tensors that must be kept and .* GB of static memory"):
        solve(llama, "60%", memory="allocated")
