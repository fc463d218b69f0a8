"""What a model does once, in its first call, happens before it is captured."""

import functools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import TraceError
from tests.support.models.as_eager import check_trains_as_eager

LOCK = threading.Lock()


class Hooked(nn.Module):
    """Installs hooks under a lock in its first call, as models of Transformers do, draws, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.register_buffer("calls", torch.zeros(()))
        self.caches: dict[int, torch.Tensor] = {}
        self.names: list[str] = []
        self.is_running = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_running = True
        if not self.names:
            with LOCK:
                for name, layer in self.layers.named_children():
                    layer.register_forward_hook(lambda _module, _inputs, output: 0.5 * output)
                    self.names.append(name)
        if x.shape[1] not in self.caches:
            with LOCK:
                self.caches[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        self.calls.add_(1)
        found = F.dropout(self.layers(x + self.caches[x.shape[1]]), 0.1) * self.calls
        self.is_running = False
        return found


def vectors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(96, 16, generator=generator), torch.randn(96, 16, generator=generator)


def test_hooks_and_caches_of_the_first_call_are_made_before_the_capture() -> None:
    check_trains_as_eager(Hooked, F.mse_loss, vectors)


class Normed(nn.Module):
    """Normalizes a weight in its first call, which makes its layer one of another class; may refuse to be captured."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.layers, self.refuses = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), refuses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not parametrize.is_parametrized(self.layers[0]):
            parametrizations.weight_norm(self.layers[0])
        with LOCK if self.refuses else nullcontext():
            return self.layers(x)


def test_a_layer_that_the_first_call_makes_another_class_is_captured_as_such() -> None:
    model = Normed()
    step = planner.compile(model, F.mse_loss, vectors(0), budget="100%", passes=1, compare_eager=False)
    assert parametrize.is_parametrized(model.layers[0], "weight")
    assert torch.equal(step(*vectors(1)), F.mse_loss(model(vectors(1)[0]), vectors(1)[1]))
    model = Normed(refuses=True)
    with pytest.raises(TraceError, match="lock"):
        planner.trace(model, F.mse_loss, vectors(0), passes=1)
    assert type(model.layers[0]) is nn.Linear
    assert model(vectors(0)[0]).shape == (96, 16)


def test_planning_makes_the_first_call_and_restores_tensors_and_random_states() -> None:
    model = Hooked()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    planner.trace(model, F.mse_loss, vectors(0), passes=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.calls.item() == 0
    assert model.names == ["0", "1", "2"] and list(model.caches) == [16]
    assert all(len(layer._forward_hooks) == 1 for layer in model.layers)


class Log:
    """What is no module."""

    def __init__(self) -> None:
        self.calls: list[int] = []


class Counting(Hooked):
    """Counts its calls in Python besides, which no capture can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.log = Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.log.calls.append(self.count)
        return len(self.log.calls) * super().forward(x)


@pytest.mark.parametrize("package", [__name__, "graphs"])  # a package of the user's, not one of our folders
def test_values_that_every_call_changes_are_as_before(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "__module__", package)
    model = Counting()
    with pytest.raises(TraceError, match="changes at every step"):
        planner.trace(model, F.mse_loss, vectors(0), passes=1)
    assert (model.count, model.log.calls) == (0, [])


def test_a_step_that_cannot_be_captured_has_the_error_of_its_capture() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        with LOCK:
            return m.layer(x)

    with pytest.raises(TraceError, match="lock"):
        planner.trace(FunctionModule(forward, layer=nn.Linear(16, 16)), F.mse_loss, vectors(0), passes=1)


def with_lazy_layers() -> nn.Module:
    return nn.Sequential(nn.LazyConv1d(8, 3), nn.LazyBatchNorm1d(), nn.GELU(), nn.Flatten(), nn.LazyLinear(16), nn.LazyLinear(16))


class ScaledByFirstBatch(nn.Module):
    """Sets a parameter from the data of its first call, and notes that in a flag (ActNorm), by a value or by a buffer."""

    def __init__(self, *, in_a_buffer: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
        self.scale, self.norm = nn.Parameter(torch.zeros(16)), nn.BatchNorm1d(16)
        self.is_initialized: bool | torch.Tensor = False
        if in_a_buffer:
            del self.is_initialized
            self.register_buffer("is_initialized", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layers(x))
        if not self.is_initialized:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            if isinstance(self.is_initialized, torch.Tensor):
                self.is_initialized.fill_(1)
            else:
                self.is_initialized = True
        return hidden * self.scale


class Growing(nn.Module):
    """Makes a layer, a parameter and a table when it first sees the size of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.last: nn.Module | None = None
        self.register_parameter("bias", None)

    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.linspace(0, 1, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if self.last is None:
            self.last, self.bias = nn.Linear(hidden.shape[-1], x.shape[-1]), nn.Parameter(torch.ones(x.shape[-1]))
        return self.last(hidden) + self.bias * self.table


MAKE: dict[str, Callable[[], nn.Module]] = {
    "lazy layers": with_lazy_layers,
    "flag": lambda: ScaledByFirstBatch(in_a_buffer=False),
    "buffer": lambda: ScaledByFirstBatch(in_a_buffer=True),
    "growing": Growing,
}


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning", "ignore:.*is set by the first step:UserWarning")
@pytest.mark.parametrize("name", MAKE)
def test_what_the_first_batch_initializes_is_trained_as_in_eager_mode(name: str) -> None:
    def train(*, planned: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        model, batches = MAKE[name](), [vectors(number) for number in range(3)]
        if name == "lazy layers":
            batches = [(x.view(96, 2, 8), y) for x, y in batches]
        step = planner.compile(model, F.mse_loss, batches[0], budget="100%", wait=0.1) if planned else None
        optimizer, losses = None, []
        for x, y in batches:
            loss = F.mse_loss(model(x), y) if step is None else step(x, y)
            loss.backward()
            optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model.state_dict(), torch.random.get_rng_state()

    wanted, found = train(planned=False), train(planned=True)
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())
    assert torch.equal(found[2], wanted[2])


class Remembering(nn.Module):
    """Sets a tensor in each call, and asks whether an earlier one did, as Qwen2-VL does for its offsets of positions."""

    def __init__(self, *, computes: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.offsets: torch.Tensor | None = None
        self.computes = computes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.offsets = self.offsets, torch.tensor([max((x[:, 0] > 9).long().tolist()) + 1.0])
        hidden = self.layers(x) + self.offsets
        if before is None:
            return hidden
        return hidden + before if self.computes else 1 * hidden


@pytest.mark.filterwarnings("ignore:.*model.offsets is set by the:UserWarning")
def test_a_tensor_that_each_step_sets_may_be_asked_for_and_not_computed_with() -> None:
    check_trains_as_eager(Remembering, F.mse_loss, vectors)
    model = Remembering(computes=True)
    with pytest.raises(TraceError, match=r"^model.offsets changes at every step \(.*first_call.py:\d+\), and the step reads it"):
        planner.compile(model, F.mse_loss, vectors(0), budget="100%", wait=0)
    assert model.offsets is None


class Keeping(nn.Module):
    """Keeps outputs in a dict, as a forward hook does that collects features for the loss."""

    def __init__(self, outputs: dict[str | int, Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.outputs, self.key = outputs, next(iter(outputs), "hidden")
        self.layers[1].register_forward_hook(lambda _, __, output: self.outputs.__setitem__(self.key, output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.outputs[self.key].square().mean()


@pytest.mark.filterwarnings("ignore:.*model.outputs is set by the first step:UserWarning")
@pytest.mark.parametrize("outputs", [{"hidden": None, "other": 1}, {}, {0: None}])
def test_an_item_that_each_step_sets_before_it_reads_it_is_planned(outputs: dict[str | int, Any]) -> None:
    with pytest.warns(UserWarning, match=r"model.outputs\[.*\] is set by the step .*: a planned step does not set it"):
        check_trains_as_eager(lambda: Keeping({**outputs}), F.mse_loss, vectors)


def test_an_item_that_each_step_reads_and_sets_is_named() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.outputs["last"] = (m.layer(x) + m.outputs["last"]).detach()
        return m.layer(x) + m.outputs["last"]

    model = FunctionModule(forward, layer=nn.Linear(16, 16))
    model.outputs = {"last": torch.zeros(96, 16)}
    with pytest.raises(TraceError, match=r"^model.outputs\['last'\] changes at every step"):
        planner.trace(model, F.mse_loss, vectors(0), passes=1)


def test_an_optimizer_over_lazy_layers_is_measured_after_their_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.LazyLinear(16))
    optimizer = torch.optim.Adam(model.parameters())
    plan = planner.compile(model, F.mse_loss, vectors(0), budget="100%", optimizer=optimizer, wait=0.1).plan
    assert plan.graph.static_bytes >= 3 * sum(p.nbytes for p in model.parameters())


def test_a_list_of_texts_that_grows_in_each_step_and_is_read_is_named() -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = nn.Linear(4, 4), list[str]()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.layer(x).square().mean()
            self.losses.append(f"{loss.item():.3f}")
            return loss / len(self.losses)

    with pytest.raises(TraceError, match=r"^model.losses changes at every step \(.*test_first_call.py:\d+\)"):
        planner.compile(Logging(), None, (torch.randn(2, 4),), budget="100%", wait=0)
