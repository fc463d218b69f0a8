"""What planning keeps of a model: values while they are used, and nothing of a step that is dropped."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.capture.workload.models import Workload, build
from planner.train.compile.lru import LRUCache
from planner.train.compile.step import PlannedStep
from tests.support.marks import slow


def _compiled(workload: Workload, **options: Any) -> PlannedStep:
    step = planner.compile(*workload, budget="100%", passes=1, wait="1 work", swap="never", **options)
    step(*workload.batch).backward()
    return step


def _backend(workload: Workload) -> Callable[..., torch.Tensor]:
    torch.compiler.reset()
    step = torch.compile(workload.model, backend="planner", options={"budget": "1GB"})
    step(workload.batch[0]).sum().backward()
    return step


@pytest.mark.parametrize(
    "use",
    [
        _compiled,
        lambda workload: _compiled(workload, dynamic=True),
        lambda workload: _compiled(workload, options=["offload"], link="10GB/s", host_budget="1GB"),
        lambda workload: planner.trace(*workload, passes=1),
        lambda workload: planner.run(planner.solve(planner.trace(*workload, passes=1), "100%"), *workload, repeats=1),
        _backend,
        *slow(lambda workload: _compiled(workload, kernels="inductor")),
    ],
    ids=["compile", "dynamic", "offload", "trace", "run", "backend", "inductor"],
)
def test_a_model_is_let_go_with_its_step(use: Callable[[Workload], object]) -> None:
    def used() -> weakref.ref[nn.Module]:
        workload = build("mlp", batch=8, layers=2, width=16, classes=3)
        use(workload)
        return weakref.ref(next(workload.model.parameters()))

    parameter = used()
    torch.compiler.reset()
    gc.collect()
    assert parameter() is None


def test_the_one_used_longest_ago_goes_first() -> None:
    kept: LRUCache[str, str] = LRUCache(2)
    made: list[str] = []

    def use(key: str) -> str:
        return kept.use(key, lambda: made.append(key) or key.upper())

    assert [use(key) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]
    assert [*kept.values()] == ["A", "B"]


def test_failed_construction_leaves_the_cache_unchanged() -> None:
    kept: LRUCache[str, float] = LRUCache(1)
    kept.use("a", lambda: 1.0)
    with pytest.raises(ZeroDivisionError):
        kept.use("b", lambda: 1 / 0)
    assert kept == {"a": 1.0}
