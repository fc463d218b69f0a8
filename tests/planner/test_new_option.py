"""What a new option takes: one file and its registration, and everything knows it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.capture import options
from planner.capture.options import OPTIONS, apply_options, register
from planner.capture.workload.models import Workload
from planner.graphs.errors import PlannerError, UsageError
from planner.graphs.io.formats import read_graph, write_graph
from planner.graphs.ir import Graph
from planner.graphs.options.option import GraphOption
from planner.graphs.options.surroundings import Surroundings
from planner.graphs.options.transfers import OptionBuilder
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.measure import run_plan
from planner.plans.document import write_plan
from planner.plans.plan import read_plan
from planner.plans.plan_check import check_plan
from tests.support import bfloat16_option
from tests.support.bfloat16_option import BFLOAT16
from tests.support.cli import call

ROOT = Path(__file__).parents[2]
SOURCES = [path for floor in ("graphs", "solvers", "planner") for path in (ROOT / floor).rglob("*.py")]
REGISTRY = ROOT / "planner" / "capture" / "options" / "__init__.py"
FIRST_IMPORT = "from planner.capture.options.chunks import CHUNKS\n"


@pytest.fixture
def _registered() -> Iterator[None]:
    register(BFLOAT16)
    yield
    del options._registered[BFLOAT16.name]


def workload() -> Workload:
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    return Workload(
        nn.Sequential(*layers, nn.Linear(64, 5)), nn.CrossEntropyLoss(), (torch.randn(256, 64), torch.arange(256) % 5)
    )


@pytest.mark.usefixtures("_registered")
def test_it_is_found_solved_written_judged_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, loss_fn, batch = workload()
    graph = planner.trace(model, loss_fn, batch, passes=1, options=["bfloat16"])
    assert {op.target for op in graph.ops if op.optional} == {"bfloat16.keep", "bfloat16.restore"}
    write_graph(graph, tmp_path / "graph.json")
    assert read_graph(tmp_path / "graph.json") == graph

    # Whatever the casts take on this machine, they are worth it here.
    graph = replace(graph, ops=tuple(replace(op, time_s=1e-6 if op.optional else 1e-3) for op in graph.ops))
    recomputing = planner.solve(graph, "60%", work_limit=20.0)
    plan = planner.solve(graph, "60%", options=["bfloat16"], work_limit=20.0)
    assert plan.time_s < recomputing.time_s and not recomputing.differs
    held = apply_options(graph, ["bfloat16"])
    assert simulate(held, plan.schedule).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    assert plan.differs and all("kept in bfloat16" in said for said in plan.differs)
    check_plan(held, plan)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan

    report = run_plan.run(plan, model, loss_fn, batch, repeats=1)
    assert report.measured_peak_bytes == plan.peak_bytes
    assert BFLOAT16.description in call(capsys, "options").out


@pytest.mark.usefixtures("_registered")
def test_it_trains() -> None:
    model, loss_fn, batch = workload()
    reference, *_ = workload()
    step = planner.compile(model, loss_fn, batch, budget="60%", options=["bfloat16"], passes=1)
    step(*batch).backward()
    loss_fn(reference(batch[0]), batch[1]).backward()
    for ours, eager in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad, rtol=0.05, atol=1e-3)


def _with_faster_ops(graph: Graph, _surroundings: Surroundings) -> Graph:
    builder = OptionBuilder(graph)
    for op in graph.program:
        faster = replace(op, name=f"{op.name}_fast", target="fast", time_s=op.time_s / 2, optional=True, replaces=(op.id,))
        builder.add_op(replace(faster, overwrites=(), workspace_bytes=op.workspace_bytes + 1_000_000))
    return builder.build_graph()


FAST = GraphOption(name="fast", description="ops may be faster", accepts=lambda graph, surroundings: "", apply=_with_faster_ops)


def test_an_option_of_the_device_alone_needs_no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(options._registered, FAST.name, FAST)
    graph = draw_training_step(3, 12)
    alone, offloading = (planner.solve(graph, "75%", options=named, work_limit=2.0) for named in (["fast"], ["fast", "offload"]))
    assert alone.time_s < planner.solve(graph, "75%", work_limit=2.0).time_s
    assert offloading.time_s <= alone.time_s * 1.01
    assert "link" not in alone.settings and "link" in offloading.settings
    assert planner.solve(graph, "100%", options=["fast"], solver="monet", time_limit_s=20).time_s < graph.time_s
    with pytest.raises(PlannerError, match="the solver 'dtr' recomputes only"):
        planner.solve(graph, "75%", options=["fast"], solver="dtr")
    with pytest.raises(UsageError, match="the option 'offload' needs to know the link to the host"):
        apply_options(graph, ["fast", "offload"])


@pytest.mark.usefixtures("_registered")
def test_names_are_given_once() -> None:
    with pytest.raises(UsageError, match="there is an option 'bfloat16' already"):
        register(BFLOAT16)


def test_it_is_unknown_without_its_line() -> None:
    with pytest.raises(UsageError, match="there is no option 'bfloat16' of a graph"):
        planner.trace(*workload(), passes=1, options=["bfloat16"])


USE = """
import sys
from dataclasses import replace

import planner.plans.solve
from planner.cli.main import main

assert planner.__file__.startswith(sys.argv[1]), planner.__file__
main(["options"])
assert "torch" not in sys.modules

import torch
from torch import nn

torch.manual_seed(7)
layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
batch = torch.randn(256, 64), torch.arange(256) % 5
graph = planner.trace(nn.Sequential(*layers, nn.Linear(64, 5)), nn.CrossEntropyLoss(), batch, passes=1, options=["bfloat16"])
graph = replace(graph, ops=tuple(replace(op, time_s=1e-6 if op.optional else 1e-3) for op in graph.ops))
plan = planner.solve(graph, "60%", options=["bfloat16"], work_limit=5.0)
print(*plan.differs, sep="\\n")
"""


def test_a_new_option_touches_one_file_and_the_registry(tmp_path: Path) -> None:
    """Add the option to a copy of the sources, use it there, and count the files that differ."""
    before, after = tmp_path / "before", tmp_path / "after"
    for copy in (before, after):
        shutil.copytree(ROOT / "planner", copy / "planner", ignore=shutil.ignore_patterns("__pycache__"))
    folder = REGISTRY.parent.relative_to(ROOT)
    shutil.copy(Path(bfloat16_option.__file__), after / folder / "bfloat16.py")
    text, last = REGISTRY.read_text(), "register(PLACEMENT)\n"
    assert text.count(last) == text.count(FIRST_IMPORT) == 1
    text = text.replace(FIRST_IMPORT, f"from planner.capture.options.bfloat16 import BFLOAT16\n{FIRST_IMPORT}")
    (after / folder / REGISTRY.name).write_text(text.replace(last, f"{last}register(BFLOAT16)\n"))

    environment = {**os.environ, "PYTHONPATH": str(after), "PYTHONDONTWRITEBYTECODE": "1"}
    use = [sys.executable, "-c", USE, str(after)]
    used = subprocess.run(use, cwd=after, env=environment, capture_output=True, text=True, check=False)
    assert used.returncode == 0, used.stderr
    assert BFLOAT16.description in used.stdout and "kept in bfloat16" in used.stdout.splitlines()[-1]

    compare = ["git", "diff", "--no-index", "--stat=200", before.name, after.name]
    stat = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=False).stdout.splitlines()
    added = len(Path(bfloat16_option.__file__).read_text().splitlines())
    changed = {line.split("|")[0].rsplit("/", 1)[-1].strip(): line.split("|")[1].split()[0] for line in stat[:-1]}
    assert changed == {REGISTRY.name: "2", "bfloat16.py": str(added)}  # the import, and the registration
    assert stat[-1] == f" 2 files changed, {added + 2} insertions(+)"


@pytest.mark.parametrize("name", ["chunks", "pack", "kernels", "in-place"])
def test_options_that_are_found_in_a_step_are_named_by_the_registry_alone(name: str) -> None:
    module = f"planner.capture.options.{name.replace('-', '_')}"
    home = ROOT / module.replace(".", "/")
    pattern = re.compile(rf"""\b{re.escape(module)}\b|== "{name}"|"{name}" in """)
    elsewhere = {path for path in SOURCES if not path.is_relative_to(home) and pattern.search(path.read_text())}
    assert elsewhere == {REGISTRY}
    assert name in OPTIONS
