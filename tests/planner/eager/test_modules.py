"""Names of the modules that are running, for the report of the eager runtime."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from planner.eager.modules import CurrentModule


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
    current, found = CurrentModule(SimpleNamespace(module=0)), list[str]()
    noting = Noting(current, found)
    model = nn.Sequential(nn.ReLU(), nn.Sequential(noting, nn.ReLU(), noting))
    with current:
        model(torch.ones(1))
        assert current.name == ""
        noting(torch.ones(1))
    model(torch.ones(1))
    assert found == ["Sequential.1.0"] * 2 + ["Noting"] + [""] * 2


def test_a_module_that_fails_is_left() -> None:
    current, found = CurrentModule(SimpleNamespace(module=0)), list[str]()
    failing, after = nn.Sequential(Noting(current, found, fails=True)), nn.Sequential(Noting(current, found))
    with current:
        with pytest.raises(ZeroDivisionError):
            failing(torch.ones(1))
        after(torch.ones(1))
    assert found == ["Sequential.0", "Sequential.0"]


def test_modules_that_were_added_and_modules_that_are_no_submodules() -> None:
    current, found = CurrentModule(SimpleNamespace(module=0)), list[str]()
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
    current, found = CurrentModule(SimpleNamespace(module=0)), list[str]()
    with current:
        thread = threading.Thread(target=nn.Sequential(Noting(current, found)), args=(torch.ones(1),))
        thread.start()
        thread.join()
    assert found == [""]
