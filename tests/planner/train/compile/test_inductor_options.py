"""``planner.compile(kernels="inductor")`` with its other options, and what it refuses."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import InfeasibleError, TraceError
from planner.measure.steps import measure_outcome
from planner.plans.summary import summarize
from planner.settings.budget import Share
from planner.train.compile import inductor_compiler
from planner.train.compile.inductor_compiler import InductorCompiler
from planner.train.compile.per_batch import BatchPlans, check_options
from planner.train.distributed.wrappers import unwrap
from tests.support.inductor.steps import compiled as by_torch_compile, everything
from tests.support.marks import slow
from tests.support.models.planned import assert_no_trace

pytestmark = [
    pytest.mark.usefixtures("fresh_compilers"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
]

Batch = tuple[torch.Tensor, torch.Tensor]


def model_and_batch(rows: int = 64) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]
    return nn.Sequential(*layers), (torch.randn(rows, 16), torch.randn(rows, 16))


def compiled(model: nn.Module, batch: Any, *, budget: str | int = "100%", **options: Any) -> planner.PlannedStep:
    return planner.compile(model, F.mse_loss, batch, budget=budget, kernels="inductor", passes=1, **options)


def assert_as_torch_compile(step: planner.PlannedStep, model: nn.Module, batch: Batch) -> None:
    plain = by_torch_compile(lambda x, y: F.mse_loss(model(x), y))
    assert measure_outcome(plain, model, batch, seed=1).list_differences(measure_outcome(step, model, batch, seed=1)) == ()


@pytest.mark.slow
def test_a_share_of_the_peak_and_bytes_are_budgets() -> None:
    model, batch = model_and_batch()
    whole = compiled(model, batch)
    assert whole.plan.graph.provenance["kernels"] == "inductor"
    eager = summarize(planner.trace(model, F.mse_loss, batch, passes=1))  # whose peak shares are of
    assert whole.plan.budget_bytes == eager.keep_everything_peak_bytes > whole.plan.graph.keep_everything_peak_bytes
    assert (whole.plan.eager.reference, whole.plan.eager.identical, whole.plan.eager.failure) == ("torch.compile", True, "")
    assert_as_torch_compile(whole, model, batch)
    for budget in ("95%", int(0.95 * whole.plan.budget_bytes)):
        part = compiled(model, batch, budget=budget)
        assert part.plan.measured_peak_bytes <= part.plan.budget_bytes == int(0.95 * whole.plan.budget_bytes)
        assert_as_torch_compile(part, model, batch)


def test_inductor_step_without_eager_comparison_is_exact() -> None:
    model, batch = model_and_batch()
    step = compiled(model, batch, compare_eager=False)
    assert step.plan.eager is None
    assert_as_torch_compile(step, model, batch)


@pytest.mark.parametrize("variant", ["default", *slow("keep")])
def test_a_plan_comes_out_of_the_cache(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        inductor_compiler, "_compute_relative_time", lambda step: step.plan.graph.provenance["variant"] != variant
    )
    monkeypatch.setattr(inductor_compiler, "_WORTH_IT", -1.0 if variant != "default" else 1.0)
    model, batch = model_and_batch()
    first = compiled(model, batch, cache=tmp_path)
    assert first.plan.graph.provenance["variant"] == variant
    monkeypatch.setattr(InductorCompiler, "solve", lambda *_: pytest.fail("solved again"))
    again = compiled(model, batch, cache=tmp_path)
    assert again.plan == first.plan
    assert len(list(tmp_path.iterdir())) == 1
    assert_as_torch_compile(again, model, batch)


def test_kernels_of_eager_pytorch_have_a_plan_of_their_own(tmp_path: Path) -> None:
    model, batch = model_and_batch()
    compiled(model, batch, cache=tmp_path)
    planner.compile(model, F.mse_loss, batch, budget="100%", passes=1, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_plans_again_for_another_shape() -> None:
    model, batch = model_and_batch()
    step = compiled(model, batch, budget="1MB", replan=True)
    assert_as_torch_compile(step, model, batch)
    _, other = model_and_batch(32)
    with pytest.warns(UserWarning, match=r"planned again: input 0 of the batch is float32\[32, 16\]"):
        step(*other).backward()
    assert step.plan.graph.provenance["kernels"] == "inductor"
    model.zero_grad()
    assert_as_torch_compile(step, model, other)


def test_plans_inside_a_training_loop() -> None:
    model, batch = model_and_batch()
    check_options({"kernels": "inductor"})
    plans = BatchPlans(unwrap(model), Share(100), {"kernels": "inductor", "passes": 1})
    step = plans.step(F.mse_loss, batch, optimizer=torch.optim.AdamW(model.parameters()), accumulate=True)
    assert step.plan.graph.provenance["kernels"] == "inductor"
    assert (step.plan.graph.provenance["optimizer"]["name"], step.plan.graph.provenance["accumulate"]) == ("AdamW", True)
    assert_as_torch_compile(step, model, batch)


def test_a_budget_that_nothing_meets_is_one_clear_error() -> None:
    model, batch = model_and_batch()
    with pytest.raises(InfeasibleError, match=r"^budget 1\.00 kB is below .*, the least") as raised:
        compiled(model, batch, budget="1kB")
    assert "\n" not in str(raised.value)


class Chooses(nn.Linear):
    """Branches on a mask, and takes as many rows as a number in the batch says."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        hidden = hidden.tanh() if mask.all() else F.gelu(hidden) * mask[:, None]
        return hidden[: int(mask.sum())].square().mean()


def test_each_data_dependent_branch_is_compiled_when_first_taken() -> None:
    torch.manual_seed(0)
    model, x, mask = Chooses(16, 16), torch.randn(64, 16), torch.ones(64, dtype=torch.bool)
    step = planner.compile(model, None, (x, mask), budget="1MB", kernels="inductor", passes=1, replan=True)
    masked = mask.clone()
    masked[:3] = False
    for given, again in ((mask, False), (masked, True), (mask, False)):
        with pytest.warns(UserWarning, match="gives False for this batch, but gave True") if again else nullcontext():
            found = measure_outcome(step, model, (x, given), seed=1)
        torch._dynamo.reset()
        plain = torch.compile(model, dynamic=False)  # which breaks the graph at the branch
        assert measure_outcome(plain, model, (x, given), seed=1).list_differences(found) == ()


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(x)
        return hidden if hidden.sum().item() > 0 else -hidden


class Picks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x[:, 0] > 0].mean() * torch.ones_like(x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Branches, r"if hidden\.sum\(\)\.item\(\) > 0 .* depends on the data, on parameters or activations"),
        *slow((Picks, r"^Inductor's code has the statement .* shapes and control flow must not depend on data")),
    ],
)
def test_uncompilable_models_raise(kind: type[nn.Linear], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        compiled(kind(16, 16), model_and_batch()[1])


def configurations() -> list[dict[str, Any]]:
    return [config.get_config_copy() for config in (dynamo_config, functorch_config, inductor_config)]


def test_planning_leaves_no_trace() -> None:
    torch.manual_seed(7)
    model, loss_fn, batch = everything()
    before = configurations()
    assert_no_trace(model, lambda: planner.compile(model, loss_fn, batch, budget="100%", kernels="inductor", passes=1))
    assert configurations() == before


def test_a_step_that_computes_nothing_that_can_be_compiled_is_refused() -> None:
    model = FunctionModule(lambda m, x: m.weight.view(()), weight=nn.Parameter(torch.ones(())))
    with pytest.raises(TraceError, match=r"^the step computes nothing that Inductor could compile: plan with kernels='eager'$"):
        planner.compile(model, None, (torch.ones(3),), budget="100%", kernels="inductor", passes=1)


@pytest.mark.slow
def test_results_of_inductor_kernels_are_offloaded_exactly() -> None:
    model, batch = model_and_batch()
    budget = int(0.9 * compiled(model, batch).plan.graph.keep_everything_peak_bytes)
    step = compiled(model, batch, budget=budget, options=["offload"], link="100GB/s", host_budget="1GB", time_limit_s=10.0)
    assert step.plan.pool_peaks_bytes["host"] > 0
    assert step.plan.measured_peak_bytes == step.plan.peak_bytes
    assert_as_torch_compile(step, model, batch)
