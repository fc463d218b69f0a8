"""``torch.compile(model, backend="planner")``: exact, within its budget, and at home among Dynamo's guards and graph breaks."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.models.parts import FunctionModule
from planner.capture.step import TrainingStep
from planner.graphs.errors import InfeasibleError, PlannerError, UsageError
from planner.measure.steps import measure_memory, measure_outcome
from tests.support.budgets import HALF_WAY
from tests.support.marks import slow
from tests.support.models.backend import Broken
from tests.support.models.outcomes import assert_equal_steps
from tests.support.models.steps import make, norm_twice
from tests.support.raised_warnings import raise_warnings

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]


def compiled(model: nn.Module, **options: object) -> Callable[..., Any]:
    return torch.compile(model, backend="planner", options={"time_limit_s": 10, "tolerance": 0.05, **options})


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize("name", ["gpt2_sdpa", "mutated", "tied", *slow("resnet18", "unet")])
def test_a_compiled_model_trains_as_eager_does(name: str) -> None:
    workload = make(name)
    twin = copy.deepcopy(workload.model)

    model = compiled(twin, budget=HALF_WAY)

    def step(*batch: Any) -> Any:
        return workload.loss_fn(model(*batch[:-1]), batch[-1])

    eager = TrainingStep(workload.model, workload.loss_fn)
    wanted = measure_outcome(eager, workload.model, workload.batch, seed=1)
    assert wanted.list_differences(measure_outcome(step, twin, workload.batch, seed=1)) == ()
    peaks = []
    for run, of in ((eager, workload.model), (step, twin)):
        of.zero_grad()
        peaks.append(measure_memory(run, workload.batch, static_bytes=0, device=torch.device("cpu")).peak_bytes)
    assert peaks[1] < peaks[0]


def taken_apart(x: torch.Tensor) -> torch.Tensor:
    x = F.interpolate(x, scale_factor=1.7, mode="bilinear")
    x = F.interpolate(x, scale_factor=1.7, mode="bicubic")
    x = x * x.tanh().prod(1, keepdim=True)
    x = torch.addcdiv(x, x.tanh(), x.exp(), value=0.3)
    x = x.clone().addcmul_(x.tanh(), x.exp(), value=0.3)
    return x.clone().addcdiv_(x.tanh(), x.exp(), value=0.3)


def test_ops_that_compilers_take_apart_are_eagers() -> None:
    torch.manual_seed(0)
    model = FunctionModule(lambda m, x: taken_apart(m.convolution(x)), convolution=nn.Conv2d(3, 8, 3, padding=1))
    x = torch.randn(2, 3, 16, 16)
    twin = copy.deepcopy(model)
    assert_equal_steps(compiled(twin, budget="100%"), twin, model, x)


def test_a_cell_runs_as_in_eager_pytorch() -> None:
    torch.manual_seed(0)
    model, x, state = nn.GRUCell(12, 20), torch.randn(5, 12), torch.randn(5, 20)
    twin = copy.deepcopy(model)
    assert_equal_steps(compiled(twin, budget="100%"), twin, model, x, state)


def test_other_backends_still_decompose_ops() -> None:
    names = []

    def note(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        names.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    torch.compile(lambda x: torch.addcdiv(x, x, x, value=0.3), backend=note)(torch.ones(3))
    assert not any("addcdiv" in name for name in names)


@pytest.mark.usefixtures("half_way")
def test_a_norm_that_is_used_twice_is_recomputed() -> None:
    torch.manual_seed(0)
    workload = norm_twice()
    twin = copy.deepcopy(workload.model)
    model = compiled(twin, budget=HALF_WAY)
    wanted = measure_outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=1)
    found = measure_outcome(lambda x, y: workload.loss_fn(model(x), y), twin, workload.batch, seed=1)
    assert wanted.list_differences(found) == ()


class AroundEager(Broken):
    """Two stacks of layers around an op of eager PyTorch, whose autograd node saves its output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.compiler.disable(torch.sigmoid)(self.first(x)))


def halves(kind: type[Broken]) -> Broken:
    half = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    return kind(half, copy.deepcopy(half))


def test_layers_around_ops_of_eager_pytorch_are_planned(solves: list[int]) -> None:
    torch.manual_seed(0)
    model, x = halves(AroundEager), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="several graphs"):
        assert_equal_steps(compiled(twin, budget="1MB"), twin, model, x, steps=2)
    assert len(solves) == 2


def test_budget_below_memory_held_by_eager_ops_raises() -> None:
    eager, planned = nn.Sequential(nn.Sigmoid(), nn.Sigmoid()), nn.Linear(32, 2)
    run = torch.compile(lambda x: planned(torch.compiler.disable(eager)(x)), backend="planner", options={"budget": "20kB"})
    with pytest.raises(BackendCompilerFailed, match=r"graph to be planned already takes 32\.77 kB, and the budget is 20\.00 kB"):
        run(torch.randn(256, 32, requires_grad=True))


def test_graphs_share_the_budget_and_say_so(solves: list[int]) -> None:
    torch.manual_seed(0)
    model, x = halves(Broken), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    with pytest.warns(
        UserWarning, match=r"several graphs: the second one gets .* of 1.00 MB, and each what those before it leave"
    ):
        assert_equal_steps(compiled(twin, budget="1MB"), twin, model, x, steps=2)
    assert len(solves) == 2
    unseen_bytes = sum(p.nbytes for p in model.second.parameters())
    assert solves[1] < solves[0] == 10**6 - 2 * unseen_bytes  # they, and their gradients


@pytest.mark.filterwarnings("ignore:the gradient of what")
def test_a_later_graph_that_does_not_fit_names_a_budget_in_which_it_does() -> None:
    model, x = halves(Broken), torch.randn(256, 32)
    with (
        pytest.warns(UserWarning, match="the second one gets"),
        pytest.raises(
            BackendCompilerFailed,
            match=r"budget 260\.00 kB is too small for graph 2 of the model, which is captured as several: those before it keep",
        ) as caught,
    ):
        compiled(model, budget="260kB")(x).sum().backward()
    enough = re.search(r"with ([\d.]+ [kM]B) it would fit", str(caught.value))
    assert enough is not None
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="the second one gets"):
        compiled(model, budget=enough[1])(x).sum().backward()


def test_each_shape_gets_a_plan_once(solves: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    step = compiled(model, budget="100MB")
    with raise_warnings(UserWarning):
        for size in (3, 5, 3, 5, 7, 7):
            step(torch.randn(size, 8)).sum().backward()
    assert solves == [10**8] * 3


def test_sizes_that_are_not_fixed_are_refused() -> None:
    model = torch.compile(nn.Linear(8, 1), backend="planner", dynamic=True, options={"budget": "1GB"})
    with pytest.raises(BackendCompilerFailed, match="for fixed sizes: leave out dynamic=True") as caught:
        model(torch.randn(3, 8)).sum().backward()
    assert isinstance(caught.value.inner_exception, UsageError)


def test_evaluation_is_not_planned(solves: list[int]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(compiled(model, budget="1 GB")(x), model(x))
    assert solves == []


def test_a_model_in_eval_mode_is_another_graph_that_trains_too(solves: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 3))
    twin, x = copy.deepcopy(model), torch.randn(32, 16)
    step = compiled(twin, budget="1GB")
    with raise_warnings(UserWarning):  # the two share no budget: one of them runs at a time
        for training in (True, False, True, False):
            assert_equal_steps(step, twin.train(training), model.train(training), x)
    assert solves == [10**9 - 8, 10**9]  # evaluation does not read the number of batches, which is in memory
    assert torch.equal(compiled(twin.requires_grad_(requires_grad=False), budget="1GB")(x), model(x))
    assert len(solves) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "the backend planner needs a budget"),
        ({"tolerance": 0.1}, "the backend planner needs a budget"),
        ({"budget": "1GB", "params": "many"}, "params is 'many': must be WindowsParams"),
        ({"budget": "1GB", "speed": 3}, "unknown option 'speed' of the backend planner: choose from arena, budget"),
        ({"budget": "1GB", "time_limit_s": "x"}, "option 'time_limit_s' is 'x': must be a number"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    model = torch.compile(nn.Linear(8, 1), backend="planner", options=options)
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        model(torch.randn(3, 8)).sum().backward()
    assert isinstance(caught.value.inner_exception, PlannerError)


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="the least any schedule of this graph needs") as caught:
        compiled(nn.Linear(8, 1), budget="10 B")(torch.randn(3, 8)).sum().backward()
    assert isinstance(caught.value.inner_exception, InfeasibleError)


def test_autocast_around_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))
    twin, x, y = copy.deepcopy(model), torch.randn(32, 16), torch.randint(3, (32,))
    for run in (model, compiled(twin, budget="100%")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(run(x), y)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
