"""Models that use what the zoo does not: each captured, planned, run, and held to the budget and to eager PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models.dense import Squash
from benchmarks.models.parts import FunctionModule
from planner.capture.workload.models import Workload
from planner.graphs.simulate import simulate
from planner.measure.run_plan import run
from planner.measure.tracing import trace
from planner.solvers.clock import WorkClock
from planner.solvers.least import bracket_least_budget
from tests.support.marks import slow_among
from tests.support.models.steps import classes, norm_twice, solve_for


def encoder() -> Workload:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = FunctionModule(
        lambda m, x: m.head(m.encoder(x).mean(1)), encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(32, 3)
    )
    return classes(model, torch.randn(24, 7, 32))


def in_place() -> Workload:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m.first(x) * 2
        hidden += x
        hidden[:, 0] = 0
        return m.second(F.relu(hidden, inplace=True))

    model = FunctionModule(forward, first=nn.Linear(32, 32), second=nn.Linear(32, 32))
    return Workload(model, lambda out, x: out.sum(), (torch.randn(24, 32), torch.zeros(())))


def custom_function() -> Workload:
    model = FunctionModule(lambda m, x: m.b(Squash.apply(m.a(x))), a=nn.Linear(32, 32), b=nn.Linear(32, 3))
    return classes(model, torch.randn(24, 32))


def checkpointed() -> Workload:
    inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64))
    model = FunctionModule(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False) + x), a=inner, b=nn.Linear(64, 3))
    return classes(model, torch.randn(24, 64))


def mixed_precision() -> Workload:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.b(F.gelu(m.a(x))).float()

    return classes(FunctionModule(forward, a=nn.Linear(32, 64), b=nn.Linear(64, 3)), torch.randn(24, 32))


def images() -> Workload:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.ConvTranspose2d(8, 3, 2, 2))
    model = nn.Sequential(*layers, nn.InstanceNorm2d(3, affine=True), nn.Upsample(scale_factor=2), nn.AvgPool2d(2))
    x = torch.randn(2, 3, 16, 16)
    # mse_loss keeps a storage of its input's size behind the scalar it returns.
    return Workload(model, F.mse_loss, (x, torch.randn(2, 3, 16, 16)))


def channels_last() -> Workload:
    model, loss_fn, (x, target) = images()
    return Workload(model.to(memory_format=torch.channels_last), loss_fn, (x.to(memory_format=torch.channels_last), target))


def dictionary() -> Workload:
    return classes(
        FunctionModule(lambda m, d: m.a(d["x"]) * d["scale"], a=nn.Linear(32, 3)), {"x": torch.randn(24, 32), "scale": 2.0}
    )


def spectral() -> Workload:
    inner = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
    return classes(FunctionModule(lambda m, x: m.b(torch.relu(m.a(x))), a=inner, b=nn.Linear(32, 3)), torch.randn(24, 32))


def fourier() -> Workload:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(m.a(x))
        return m.b(torch.fft.irfft(spectrum * spectrum.abs(), n=32))

    return classes(FunctionModule(forward, a=nn.Linear(32, 32), b=nn.Linear(32, 3)), torch.randn(24, 32))


def overwritten_input() -> Workload:
    return classes(FunctionModule(lambda m, x: m.a(x.mul_(2)), a=nn.Linear(32, 3)), torch.randn(24, 32))


def bags() -> Workload:
    return classes(
        FunctionModule(lambda m, x: m.a(m.bag(x)), bag=nn.EmbeddingBag(20, 8), a=nn.Linear(8, 3)), torch.randint(20, (24, 4))
    )


def transposed_output() -> Workload:
    # mse_loss_backward lays its result out as its fake one does not, so that it cannot be viewed as was captured.
    model = FunctionModule(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(8, 8))
    return Workload(model, F.mse_loss, (torch.randn(3, 4, 8), torch.randn(3, 4, 8)))


MODELS = [
    encoder,
    in_place,
    custom_function,
    checkpointed,
    mixed_precision,
    images,
    channels_last,
    dictionary,
    norm_twice,
    spectral,
    fourier,
    overwritten_input,
    bags,
    transposed_output,
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make", slow_among(MODELS, bags, channels_last, encoder, fourier, images, spectral), ids=lambda make: make.__name__
)
def test_tight_plans_of_other_models_are_exact_within_budget(make: Callable[[], Workload]) -> None:
    torch.manual_seed(5)
    workload = make()
    graph = trace(*workload, passes=1)
    least = bracket_least_budget(graph, clock=WorkClock(0.5)).found_bytes
    plan = solve_for(1.0, graph, int(1.02 * least), tolerance=0.1)
    assert simulate(graph, plan.schedule).peak_bytes <= plan.budget_bytes
    report = run(plan, *workload, repeats=1)
    assert report.differences == ()
    assert report.eager_differences == ()
    assert report.measured_peak_bytes <= plan.peak_bytes
