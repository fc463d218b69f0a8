"""Names of the modules that are running, for the report of the eager runtime."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner.train.eager.modules import CurrentModule


class Noting(nn.Module):
    """A module that notes the name under which it runs, and may fail."""

    def __init__(self, current: CurrentModule, found: list[str], *, fails: bool = False) -> None:
        super().__init__()
        self.current, self.found, self.fails = current, found, fails

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(self.current.name)
        if self.fails:
            raise ZeroDivisionError
        return x


def test_names_are_paths_from_the_outermost_module() -> None:
    current, found = CurrentModule(), list[str]()
    noting = Noting(current, found)
    model = nn.Sequential(nn.ReLU(), nn.Sequential(noting, nn.ReLU(), noting))
    with current:
        model(torch.ones(1))
        assert current.name == ""
        noting(torch.ones(1))
    model(torch.ones(1))
    assert found == ["Sequential.1.0"] * 2 + ["Noting"] + [""] * 2


def test_a_module_that_fails_is_left() -> None:
    current, found = CurrentModule(), list[str]()
    failing, after = nn.Sequential(Noting(current, found, fails=True)), nn.Sequential(Noting(current, found))
    with current:
        with pytest.raises(ZeroDivisionError):
            failing(torch.ones(1))
        after(torch.ones(1))
    assert found == ["Sequential.0", "Sequential.0"]


def test_modules_that_were_added_and_modules_that_are_no_submodules() -> None:
    current, found = CurrentModule(), list[str]()
    lone = Noting(current, found)

    class Calling(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return lone(super().forward(x))

    model = Calling(Noting(current, found))
    with current:
        model(torch.ones(1))
        model.append(Noting(current, found))
        model(torch.ones(1))
    assert found == ["Calling.0", "Calling.Noting", "Calling.0", "Calling.1", "Calling.Noting"]


def test_other_threads_are_not_named() -> None:
    current, found = CurrentModule(), list[str]()
    with current:
        thread = threading.Thread(target=nn.Sequential(Noting(current, found)), args=(torch.ones(1),))
        thread.start()
        thread.join()
    assert found == [""]


def test_calls_go_the_usual_way_after_the_last_of_several_threads() -> None:
    call = nn.Module.__call__
    first, second = CurrentModule(), CurrentModule()
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__()
    assert nn.Module.__call__ is not call
    second.__exit__()
    assert nn.Module.__call__ is call


def test_replaced_module_calls_are_called_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def noting(call: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        def noted(module: nn.Module, x: Tensor) -> Tensor:
            found.append(name)
            return call(module, x)

        return noted

    monkeypatch.setattr(nn.Module, "__call__", before := noting(nn.Module.__call__, "before"))
    with CurrentModule():
        nn.ReLU()(torch.ones(1))
    assert found == ["before"] and nn.Module.__call__ is before
    with CurrentModule():
        nn.Module.__call__ = inside = noting(nn.Module.__call__, "inside")
    assert nn.Module.__call__ is inside
    nn.ReLU()(torch.ones(1))
    assert found == ["before", "inside", "before"]
    with CurrentModule():
        nn.ReLU()(torch.ones(1))
    assert found[3:] == ["inside", "before"]
