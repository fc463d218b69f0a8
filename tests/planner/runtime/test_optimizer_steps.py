"""The server of an optimizer's memory learns when its steps begin and end."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from planner.runtime import optimizer_steps
from tests.support.models.optimizers import Wrapping

WHOLE, BROKEN = "whole", "broken"
BEGUN_AND_ENDED = ["SGD", WHOLE]


class Server:
    """Notes what happens.

    Attributes:
        optimizers: the optimizers that it is for; None for all.
    """

    def __init__(self, optimizers: Sequence[Optimizer] | None = None) -> None:
        self.events: list[str] = []
        self.optimizers = optimizers

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        return self.optimizers is None or optimizer in self.optimizers

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        self.events.append(type(optimizer).__name__)

    def end_optimizer(self, optimizer: Optimizer, *, is_whole: bool) -> None:
        self.events.append(WHOLE if is_whole else BROKEN)


class Failing(SGD):
    """Fails in each step."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        raise RuntimeError("in the step")


class Derived(SGD):
    """Steps as its base class does."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        return super().step(closure)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    optimizer_steps.install()
    optimizer_steps.follow(found)
    yield found
    optimizer_steps.interrupt()


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(3))
    made.grad = torch.ones(3)
    return made


def test_a_step_begins_and_ends(server: Server) -> None:
    SGD([parameter()], lr=0.1).step()
    assert server.events == BEGUN_AND_ENDED


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_runs_before_the_step_begins(server: Server, how: str) -> None:
    def closure() -> float:
        server.events.append("closure")
        return 3.0

    optimizer = SGD([parameter()], lr=0.1)
    returned = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
    assert returned == 3.0
    assert server.events == ["closure", "SGD", WHOLE]


def test_a_closure_that_is_called_again_interrupts_the_step(server: Server) -> None:
    optimizer = LBFGS([parameter()], max_iter=3, tolerance_grad=0.0, tolerance_change=0.0)

    def closure() -> torch.Tensor:
        server.events.append("closure")
        return torch.ones(())

    optimizer.step(closure)
    assert server.events[:4] == ["closure", "LBFGS", BROKEN, "closure"]
    assert set(server.events[4:]) == {"closure"}


def test_failed_step_ends_on_interrupt(server: Server) -> None:
    with pytest.raises(RuntimeError, match="in the step"):
        Failing([parameter()], lr=0.1).step()
    assert server.events == ["Failing"]
    optimizer_steps.interrupt()
    optimizer_steps.interrupt()
    assert server.events == ["Failing", BROKEN]


def test_a_step_that_fails_ends_when_another_one_begins(server: Server) -> None:
    with pytest.raises(RuntimeError, match="in the step"):
        Failing([parameter()], lr=0.1).step()
    SGD([parameter()], lr=0.1).step()
    assert server.events == ["Failing", BROKEN, "SGD", WHOLE]


def test_of_nested_steps_the_inner_one_is_served(server: Server) -> None:
    Wrapping(SGD([parameter()], lr=0.1)).step()
    assert server.events == ["Wrapping", BROKEN, "SGD", WHOLE]


def test_a_step_may_call_that_of_its_base_class(server: Server) -> None:
    optimizer = Derived([parameter()], lr=0.1)
    optimizer.step()
    assert server.events == ["Derived", WHOLE]
    optimizer.step(lambda: 3.0)
    assert server.events[2:] == ["Derived", WHOLE]


def test_other_threads_have_a_server_of_their_own(server: Server) -> None:
    other = Server()

    def work() -> None:
        SGD([parameter()], lr=0.1).step()
        optimizer_steps.follow(other)
        SGD([parameter()], lr=0.1).step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert other.events == ["SGD", WHOLE]
    assert not server.events


def test_last_followed_server_of_an_optimizer_serves_its_steps(server: Server) -> None:
    first, second = SGD([parameter()], lr=0.1), SGD([parameter()], lr=0.1)
    of_first, of_both = Server([first]), Server([first, second])
    optimizer_steps.follow(of_both)
    optimizer_steps.follow(of_first)
    first.step()
    second.step()
    assert (of_first.events, of_both.events) == (BEGUN_AND_ENDED, BEGUN_AND_ENDED)
    optimizer_steps.follow(of_both)
    first.step()
    assert (len(of_first.events), len(of_both.events)) == (2, 4)
    del of_both, of_first
    first.step()
    assert server.events == BEGUN_AND_ENDED


def test_optimizers_of_other_models_are_not_served(server: Server) -> None:
    server.optimizers = ()
    SGD([parameter()], lr=0.1).step()
    assert not server.events


def test_a_compiled_step_begins_and_ends(server: Server) -> None:
    given = parameter()
    optimizer = SGD([given], lr=0.25)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    step()
    assert given.tolist() == [0.5, 0.5, 0.5]
    assert server.events == 2 * BEGUN_AND_ENDED


def test_hooks_are_put_in_place_once(server: Server) -> None:
    optimizer_steps.install()
    SGD([parameter()], lr=0.1).step()
    assert server.events == BEGUN_AND_ENDED
