"""Ops that the C++ library records on a CUDA device: bits of eager PyTorch and the budget, before and after memory runs out."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from planner.capture.workload.models import build
from planner.graphs.errors import BudgetError
from planner.runtime.libraries import warm_up_libraries
from planner.train.eager.session import rematerialize

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

Step = Callable[[int], Tensor]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def multilayer() -> tuple[nn.Module, Step]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).cuda()

    def step(scale: int) -> Tensor:
        x = torch.randn(512 * scale, 512, device="cuda")
        for layer in model:
            x = nn.functional.dropout(layer(x), 0.2)
            x = x[(x.mean(1) > -1.0).nonzero().flatten()].cos().add_(1.0)
        return x.square().mean()

    return model, step


def convolutional() -> tuple[nn.Module, Step]:
    model, loss_fn, (_, _) = build("resnet18", width=64, size=128, classes=10, batch=2, device="cuda")

    def step(scale: int) -> Tensor:
        x, y = torch.randn(32 * scale, 3, 128, 128, device="cuda"), torch.randint(10, (32 * scale,), device="cuda")
        return loss_fn(model(x), y)

    return model, step


def mixed_devices() -> tuple[nn.Module, Step]:
    """Return a model whose backward pass runs in two threads."""
    on_cpu = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)))
    on_cuda = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8))).cuda()

    def step(scale: int) -> Tensor:
        x = torch.randn(2**15 * scale, 64)
        return on_cpu(x[:64]).square().mean().cuda() + on_cuda(x.cuda()).square().mean()

    return nn.ModuleList([on_cpu, on_cuda]), step


no_block = pytest.mark.xfail(raises=BudgetError, reason="a convolution's workspace finds no memory in one piece")


@pytest.mark.parametrize(
    ("of", "memory"),
    [
        (multilayer, "allocated"),
        (convolutional, "allocated"),
        (mixed_devices, "allocated"),
        (multilayer, "reserved"),
        pytest.param(convolutional, "reserved", marks=no_block),
        (mixed_devices, "reserved"),
    ],
)
def test_a_step_that_does_not_fit_after_steps_that_do(of: Callable[[], tuple[nn.Module, Step]], memory: str) -> None:
    share = 0.75 if memory == "allocated" else 0.9  # what lies between tensors is reserved, too
    warm_up_libraries(torch.device("cuda"))

    def steps() -> list[Tensor]:
        torch.manual_seed(1)
        model, step = of()
        results = []
        for scale in (1, 1, 1, 1, 3, 3):
            if scale == 3:  # in the first of them, workspaces that were not measured yet may exceed the budget
                torch.cuda.reset_peak_memory_stats()
            loss = step(scale)
            loss.backward()
            results += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters()), torch.cuda.get_rng_state()]
            model.zero_grad()
        return results

    def requested_bytes(kind: str) -> int:
        return int(torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"])

    gc.collect()
    before = requested_bytes("current")
    expected = steps()
    gc.collect()
    budget = before + int(share * (requested_bytes("peak") - before))
    torch.cuda.empty_cache()
    with rematerialize(budget, memory=memory, max_recomputation=100) as session:
        found = steps()
    assert all(map(torch.equal, found, expected))
    assert session.evictions > 0
    assert requested_bytes("peak") <= budget
    if memory == "reserved":
        assert torch.cuda.max_memory_reserved() <= budget
