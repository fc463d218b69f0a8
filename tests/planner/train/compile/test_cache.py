"""Plans that are kept: loaded instead of solved again, replaced where they are of no use, shared between processes."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
from planner.graphs.errors import OutputError
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.cache import PlanCache
from planner.plans.document import write_plan
from planner.settings.budget import Share, read_budget
from tests.support.marks import slow
from tests.support.models.planned import compiled_with_cache, workload
from tests.support.processes import run_apart
from tests.support.raised_warnings import raise_warnings


def test_a_plan_is_solved_once(tmp_path: Path, solves: list[object]) -> None:
    folder = tmp_path / "not" / "there"
    first = compiled_with_cache(folder)
    again = compiled_with_cache(folder)
    assert solves == [Share(100)]
    assert again.plan == first.plan
    model, loss_fn, batch = workload()
    torch.manual_seed(1)
    found = again(*batch)
    torch.manual_seed(1)
    assert torch.equal(found, loss_fn(model(batch[0]), batch[1]))


@pytest.mark.parametrize(
    "other", [{"budget": "99%"}, {"batch": 9}, *slow({"optimizer": "adamw"}, {"tolerance": 0.5}, {"tolerance": 0.001})]
)
def test_different_settings_are_solved_again(other: dict[str, Any], tmp_path: Path, solves: list[object]) -> None:
    compiled_with_cache(tmp_path)
    compiled_with_cache(tmp_path, **other)
    assert len(solves) == 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("get", "set_to", "values"),
    [
        (torch.get_num_threads, torch.set_num_threads, (1, 2, 1)),
        *slow((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, ("highest", "high", "highest"))),
    ],
    ids=["threads", "precision"],
)
def test_another_setting_of_kernels_needs_another_plan(
    get: Callable[[], Any], set_to: Callable[[Any], None], values: tuple[Any, ...], tmp_path: Path, solves: list[object]
) -> None:
    before = get()
    try:
        for value in values:
            set_to(value)
            compiled_with_cache(tmp_path)
    finally:
        set_to(before)
    assert len(solves) == 2
    assert len(list(tmp_path.iterdir())) == 2


def change(fields: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[str], str]:
    """Change some fields of a plan in its file."""
    return lambda text: json.dumps((plan := json.loads(text)) | fields(plan))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda text: text[: len(text) // 2], "cut short"),
        (change(lambda plan: {"steps": plan["steps"][1:]}), "not in memory|never computes"),
        *slow(
            (lambda text: "", "the file is empty"),
            (change(lambda plan: {"graph": plan["graph"] | {"fingerprint": "0" * 32}}), "the plan is for another graph"),
            (change(lambda _: {"budget_bytes": 1, "peak_bytes": 1}), "its measured peak here is .*, over its budget of 1 B"),
            (
                change(lambda _: {"budget_bytes": 10**12, "peak_bytes": 10**12, "measured_peak_bytes": 10**11}),
                r"its budget is 1000000000000 B, and \d+ B was asked for",
            ),
            (
                change(lambda plan: {"measured_peak_bytes": plan["budget_bytes"] + 1}),
                "its measured peak here is .*, over its budget of",
            ),
            (change(lambda _: {"peak_bytes": 1}), "a peak of 1 B, but its tensors alone take"),
            (
                change(lambda plan: {"graph": plan["graph"] | {"keep_everything_peak_bytes": 2 * plan["peak_bytes"] // 3}}),
                r"its budget is \d+ B, and \d+ B was asked for",
            ),
            (
                change(lambda plan: {"time_s": 2 * plan["time_s"], "bound_s": 2 * plan["bound_s"]}),
                "a step time of .*, but its schedule neither recomputes nor transfers",
            ),
            (change(lambda plan: {"bound_s": 2 * plan["time_s"]}), "that no schedule takes less than .*, but its own takes"),
            (
                change(lambda plan: {"bound_s": plan["time_s"] / 2, "status": "optimal"}),
                "that it is optimal, but its gap of 100.* is over the tolerance",
            ),
        ),
    ],
)
def test_a_spoiled_plan_is_replaced(spoil: Any, said: str, tmp_path: Path, solves: list[object]) -> None:
    compiled_with_cache(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(spoil(path.read_text()))
    with pytest.warns(UserWarning, match=f"cannot be used, and the step is planned again: .*({said})"):
        compiled_with_cache(tmp_path)
    assert len(solves) == 2
    with raise_warnings(UserWarning):
        compiled_with_cache(tmp_path)
    assert len(solves) == 2


@pytest.mark.parametrize("kind", ["link", "dangling link", "circle of links", "pipe", "link to a folder"])
def test_links_and_pipes_in_the_cache_are_replaced(kind: str, tmp_path: Path) -> None:
    cache, elsewhere = PlanCache(tmp_path / "cache"), tmp_path / "elsewhere.json"
    plan = planner.solve(make_training_chain(4), "100%")
    path = cache.get_path({"budget": "100%"})
    write_plan(replace(plan, seconds=7.0), elsewhere)
    kept = elsewhere.read_text()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(
            {"link": elsewhere, "dangling link": tmp_path / "none", "circle of links": path, "link to a folder": tmp_path}[kind]
        )
    with pytest.warns(UserWarning, match=r"cannot be used, and the step is planned again: it is (a symbolic link|no file)"):
        assert cache.load(path, Share(100)) is None
    cache.store(plan, path)
    assert cache.load(path, Share(100)) == plan
    assert path.is_file() and not path.is_symlink()
    assert elsewhere.read_text() == kept
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "elsewhere.json"]


def test_a_folder_in_the_place_of_a_plan_is_left_alone(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    path = cache.get_path({})
    path.mkdir()
    with pytest.warns(UserWarning, match="is planned again: it is no file"):
        assert cache.load(path, Share(100)) is None
    with pytest.warns(UserWarning, match="the plan was not stored in the cache: .* is a folder"):
        cache.store(planner.solve(make_training_chain(4), "100%"), path)
    assert path.is_dir()


def test_cached_plan_is_loaded_for_its_own_budget_only(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    graph = make_training_chain(6)
    plan = planner.solve(graph, "80%")
    path = cache.get_path({})
    cache.store(plan, path)
    for budget in ("80%", plan.budget_bytes, f"{plan.budget_bytes}B"):
        assert cache.load(path, read_budget(budget)) == plan
    for budget in ("60%", "100%", plan.budget_bytes - 1, plan.budget_bytes + 1):
        with pytest.warns(UserWarning, match=rf"its budget is {plan.budget_bytes} B, and \d+ B was asked for"):
            assert cache.load(path, read_budget(budget)) is None


def test_a_share_of_a_peak_that_the_schedule_refutes_is_not_believed(tmp_path: Path, solves: list[object]) -> None:
    first = compiled_with_cache(tmp_path, budget="400%").plan.budget_bytes
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    peak_bytes = data["graph"]["keep_everything_peak_bytes"] * 3 // 10
    data["graph"]["keep_everything_peak_bytes"] = peak_bytes
    path.write_text(json.dumps(data | {"budget_bytes": 4 * peak_bytes}))
    with pytest.warns(UserWarning, match="a peak without recomputation of .*, but its tensors alone take"):
        assert compiled_with_cache(tmp_path, budget="400%").plan.budget_bytes == first
    assert len(solves) == 2


def test_a_folder_that_cannot_be_made_is_refused_before_work(tmp_path: Path, solves: list[object]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"plans cannot be stored in .*file"):
        compiled_with_cache(tmp_path / "file")
    assert solves == []


def test_processes_share_a_cache_folder(tmp_path: Path) -> None:
    said, cache = tmp_path / "fingerprint", tmp_path / "cache"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run_apart, write_fingerprint, cache, said)
        here = compiled_with_cache(cache).plan
    other.result()
    assert said.read_text() == here.graph.fingerprint
    (path,) = cache.iterdir()
    assert path.suffix == ".json"


def write_fingerprint(cache: Path, file: Path) -> None:
    """Plan with a cache, and write the fingerprint of the graph that was planned."""
    with raise_warnings(UserWarning):
        file.write_text(compiled_with_cache(cache).plan.graph.fingerprint)
