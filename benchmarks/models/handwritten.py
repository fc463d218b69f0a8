"""Handwritten models with features of real training code, described in their docstrings. All are small, with random weights."""

from collections.abc import Callable
from inspect import isfunction

from benchmarks.models import dense, images, inner_gradients, own_targets, sequences
from planner.capture.workload.models import Workload

# Each public function that one of the modules defines builds a model.
MODELS: dict[str, Callable[[], Workload]] = {
    name: make
    for module in (dense, images, inner_gradients, own_targets, sequences)
    for name, make in vars(module).items()
    if isfunction(make) and make.__module__ == module.__name__ and not name.startswith("_")
}
