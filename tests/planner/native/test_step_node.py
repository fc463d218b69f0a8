"""The node of planned steps: what autograd and the interpreter see of it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from planner.capture.trace import capture
from planner.graphs.schedule import keep_everything
from planner.native.library import wait_for_library
from planner.runtime.executor import Executor
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY

# The graph is freed by C++, as a static variable's would be, after Python has ended.
_OUTLIVED = """
import ctypes
import torch
from tests.planner.native.test_step_node import plan_linear_step

loss = plan_linear_step()(*[torch.randn(2, 4)] * 2)
release = ctypes.cast(ctypes.CDLL("libc10.so")._ZN3c1010TensorImpl17release_resourcesEv, ctypes.c_void_p)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(loss))
ctypes.CDLL(None).__cxa_atexit(release, ctypes.c_void_p(loss._cdata), None)
"""


def plan_linear_step() -> Executor:
    """Return a step whose gradients of weights are transposed products."""
    wait_for_library()
    x = torch.randn(2, 4)
    model = nn.Linear(4, 4)
    captured = capture(model, nn.functional.mse_loss, (x, x))
    return Executor(captured, keep_everything(captured.graph), model, nn.functional.mse_loss)


@pytest.mark.skipif(sys.platform != "linux", reason="names of the C++ library")
def test_a_graph_that_outlives_the_interpreter_is_freed() -> None:
    run = subprocess.run([sys.executable, "-c", _OUTLIVED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_gradients_are_no_views_and_can_be_detached_in_place() -> None:
    step = plan_linear_step()
    step(*[torch.randn(2, 4)] * 2).backward()
    for parameter in step.training_step.parameters():
        assert not parameter.grad._is_view()
        parameter.grad.detach_().zero_()
