"""Each front end plans and trains under a cap of the process's memory under which eager PyTorch runs out, with the same bits."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.distributed import on_processes
from tests.support.marks import slow
from tests.support.memory_limits import front_ends
from tests.support.processes import run_apart

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of the process's memory are those of Linux")

_NEEDS = {"hugging_face": ("transformers", "accelerate"), "lightning": ("lightning",)}
_COMPILING = ("inductor", "torch_compile_inductor")


def run_alone(check: str) -> None:
    for module in _NEEDS.get(check, ()):
        if find_spec(module) is None:
            pytest.skip(f"needs {module}")
    if check in _COMPILING and shutil.which("g++") is None:
        pytest.skip("needs g++")
    run_apart(getattr(front_ends, check))


_ELSEWHERE = (
    *("checkpoint", "commands", "hugging_face", "inductor", "lightning", "offloading", "torch_compile"),
    *("torch_compile_inductor", "traced"),
)


@pytest.mark.parametrize("check", ["compiled", *slow(*_ELSEWHERE)])
def test_front_ends_train_exactly_under_a_memory_cap(check: str) -> None:
    run_alone(check)


@pytest.mark.slow
def test_training_on_two_processes_under_a_cap(tmp_path: Path) -> None:
    on_processes(2, (front_ends.two_processes,), tmp_path)


def test_planning_uses_at_most_plan_memory_and_releases_it() -> None:
    run_alone("memory_of_planning")
