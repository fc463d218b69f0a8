"""Random ops draw what they drew when they are recomputed, whatever other threads draw; saved states of generators."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.rewrites.reproducible_random import draw_dropout
from planner.capture.trace import capture
from planner.graphs.ir import Phase
from planner.graphs.schedule import schedule_of
from planner.runtime.allocator import measure_segment_peaks, record_cpu_allocations
from planner.runtime.executor import Executor
from planner.runtime.random_state import RandomState
from tests.support.marks import slow

aten = torch.ops.aten


class Masks(nn.Module):
    """Its gradients show the masks of the backward pass, its output those of the forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(32, 64)), kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.weight * x
        for _ in range(3):
            match self.kind:
                case "dropout":
                    hidden = F.dropout(hidden, 0.3)
                case "bernoulli":
                    hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.7))
                case "rand_like":
                    hidden = hidden * (torch.rand_like(hidden) < 0.7)
        return torch.sin(hidden).sum(), hidden


def computed_twice(model: Masks, x: torch.Tensor) -> Executor:
    """All that the forward pass draws is dropped behind it, and drawn again in the backward pass."""
    captured = capture(model, None, (x,))
    forward = [op.id for op in captured.graph.ops if op.phase is Phase.FORWARD]
    again = [op for op in forward if captured.graph.ops[op].recomputable]
    assert any(captured.graph.ops[op].random for op in again)
    schedule = schedule_of(captured.graph, [*forward, *again, *range(len(forward), len(captured.graph.ops))])
    return Executor(captured, schedule, model, None)


def wrong_masks(step: Executor, model: Masks, x: torch.Tensor, steps: int) -> int:
    """How many of so many steps had a backward pass with another mask than its forward pass."""
    wrong = 0
    for _ in range(steps):
        loss, hidden = step(x)
        (gradient,) = torch.autograd.grad(loss, model.weight)
        wrong += not torch.equal(hidden == 0, gradient == 0)
    return wrong


@pytest.mark.parametrize("kind", ["dropout", "rand_like", *slow("bernoulli")])
@pytest.mark.parametrize("drawing", ["a step of the same plan", "somebody else"])
def test_masks_are_those_of_the_forward_pass(kind: str, drawing: str) -> None:
    torch.manual_seed(0)
    model, x = Masks(kind), torch.rand(32, 64) + 0.5
    step, wrong, done = computed_twice(model, x), [], threading.Event()

    def draw() -> None:
        while not done.is_set():
            torch.rand(50)

    def train() -> None:
        wrong.append(wrong_masks(step, model, x, 150))

    other = threading.Thread(target=train if drawing == "a step of the same plan" else draw)
    other.start()
    train()
    done.set()
    other.join()
    assert sum(wrong) == 0


def test_generator_state_after_the_step_equals_eager() -> None:
    for kind in ("dropout", "bernoulli", "rand_like"):
        model, x = Masks(kind), torch.rand(32, 64) + 0.5
        step, found = computed_twice(model, x), []
        for run in (step, model):
            torch.manual_seed(3)
            loss, hidden = run(x)
            found.append([loss, hidden, *torch.autograd.grad(loss, model.weight), torch.get_rng_state()])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("x", [torch.randn(4, 6, 8, 10), torch.randn(3, 1).expand(3, 5), torch.randn(())])
@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_from_a_generator_is_that_of_the_default_one(x: torch.Tensor, p: float, dtype: torch.dtype) -> None:
    for layout in (x.to(dtype), x.to(dtype).transpose(0, -1) if x.dim() else x.to(dtype)):
        before = torch.get_rng_state()
        expected = aten.native_dropout(layout, p, True)
        own = torch.Generator().set_state(before)
        found = draw_dropout(layout, p, True, generator=own)
        assert all(map(torch.equal, expected, found)) and torch.equal(own.get_state(), torch.get_rng_state())
        assert [t.stride() for t in expected] == [t.stride() for t in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_from_a_generator_takes_no_more_than_that_of_the_default_one(dtype: torch.dtype) -> None:
    x, own = torch.randn(4, 64, 32, dtype=dtype), torch.Generator()
    ways = (lambda _: aten.native_dropout(x, 0.1, True), lambda _: draw_dropout(x, 0.1, True, generator=own))
    expected, found = (measure_segment_peaks(way, x.device) for way in ways)
    assert found <= expected


def test_restoring_draws_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    saved = RandomState.of(generator)
    first = torch.randn(5, generator=generator)
    saved.restore(generator)
    assert torch.equal(first, torch.randn(5, generator=generator))


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: torch.rand(1, generator=generator),
        lambda generator: torch.randint(3, (1,), generator=generator),
        lambda generator: torch.randn(1, generator=generator),
        lambda generator: torch.randn(1, dtype=torch.float64, generator=generator),
    ],
)
@pytest.mark.parametrize("drawn_before", [0, 1])
def test_states_differ_after_any_draw(draw: Callable[[torch.Generator], torch.Tensor], drawn_before: int) -> None:
    """After one normal number the next waits, and drawing that leaves the engine where it is."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(drawn_before):
        torch.randn(1, generator=generator)
        torch.randn(1, dtype=torch.float64, generator=generator)
    before = RandomState.of(generator)
    assert before == RandomState.of(generator)
    draw(generator)
    assert before != RandomState.of(generator)


def test_saving_and_comparing_takes_no_counted_memory() -> None:
    generator = torch.Generator()
    assert not record_cpu_allocations(lambda: RandomState.of(generator) == RandomState.of(generator))
