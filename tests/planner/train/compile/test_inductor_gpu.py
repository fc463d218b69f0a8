"""Plans over Triton's kernels, on a GPU."""

import copy

import pytest
import torch

import planner
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure.steps import measure_outcome
from tests.support.budgets import HALF_WAY, half_way_known, on_the_way

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler", "deterministic")]


# What the pool of CUDA graphs keeps besides their tensors: a workspace of cuBLAS, and segments of 20 MiB that are not full; and
# what goes in and out, which is there twice.
POOL_BYTES = 128 * 2**20


def on_cuda(workload: Workload) -> Workload:
    return Workload(workload.model.cuda(), workload.loss_fn, tuple(tensor.cuda() for tensor in workload.batch))


WORKLOADS = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"layers": 2, "width": 128, "heads": 4, "vocab": 500, "batch": 8, "seq": 128, "dropout": 0.1}),
        ("resnet18", {"width": 16, "size": 64, "classes": 10, "batch": 8}),
        ("unet", {"channels": 8, "size": 64, "batch": 4, "depth": 3}),
    ],
)


@WORKLOADS
@pytest.mark.parametrize("budget", ["1GB", HALF_WAY])
def test_a_step_has_the_bits_of_torch_compile_within_its_budget(name: str, options: dict[str, object], budget: str) -> None:
    torch.manual_seed(0)
    with half_way_known():
        check_bits_and_budget(on_cuda(build(name, **options)), budget)


@WORKLOADS
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_captured_step_has_the_bits_of_torch_compile(name: str, options: dict[str, object], share: float) -> None:
    torch.manual_seed(0)
    workload = on_cuda(build(name, **options))
    (budget,) = on_the_way(planner.trace(*workload, passes=1), share)
    check_bits_and_budget(workload, budget + POOL_BYTES, cuda_graph=True)


def check_bits_and_budget(workload: Workload, budget: int | str, *, cuda_graph: bool = False) -> None:
    reference = copy.deepcopy(workload.model)
    compiled = torch.compile(TrainingStep(reference, workload.loss_fn), dynamic=False)
    step = planner.compile(*workload, budget=budget, kernels="inductor", cuda_graph=cuda_graph, memory="allocated")
    assert step.plan.measured_peak_bytes <= step.plan.budget_bytes
    for seed in range(3):
        wanted = measure_outcome(compiled, reference, workload.batch, seed=seed)
        assert not wanted.list_differences(measure_outcome(step, workload.model, workload.batch, seed=seed))
