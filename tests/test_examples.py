"""What users copy: scripts, which are short and train, and the examples in docstrings of the public functions and classes."""

import doctest
import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from examples.tiny_planner import CHAIN, Op, judge, main, solve
from planner.graphs.ir import Graph
from planner.graphs.synthetic.draft import Draft
from planner.native.library import library_path
from planner.plans.solve import solve as planner_solve

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("train_*.py"))
ON_TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")  # torchrun, at a port that is free
NEEDS = {"train_huggingface": "transformers", "train_accelerate": "accelerate"}
QUICK = ("train_own_model",)
WITHOUT_PLAN = ("train_torch_compile", "train_checkpoint", "train_eager")  # to print: one for each graph, or none


@pytest.mark.parametrize(
    "script",
    [script if script.stem in QUICK else pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS],
    ids=lambda script: script.stem,
)
def test_an_example_trains(script: Path, tmp_path: Path) -> None:
    if (needed := NEEDS.get(script.stem)) is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    cache = tmp_path / ".cache" / "remat-planner"
    cache.mkdir(parents=True)
    (cache / library_path().name).symlink_to(library_path())  # which is compiled once for all tests
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    launcher = ON_TWO if script.stem in ("train_ddp", "train_fsdp2") else ()
    half_way = ("-m", "tests.support.budgets") if script.stem != "train_eager" else ()  # its budget is an amount
    run = [sys.executable, *launcher, *half_way, str(script), "--steps", "6"]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", ended.stdout)]
    assert losses[-1] < losses[0]
    if script.stem == "train_own_model":
        assert list(cache.glob("*.json"))
    if script.stem not in WITHOUT_PLAN:
        assert re.search(r"^budget .*, peak .* predicted, .* measured", ended.stdout, re.MULTILINE)


def test_examples_are_short() -> None:
    assert [script.name for script in SCRIPTS if len(script.read_text().splitlines()) >= 60] == []


def as_graph(ops: list[Op]) -> Graph:
    draft = Draft()
    for op in ops:
        draft.add_op(op.name, op.reads, [op.size_bytes], time_s=op.time_s)
    return draft.build_graph(kept=[len(ops) - 1])


def random_step(seed: int) -> list[Op]:
    draw = random.Random(seed)
    ops: list[Op] = []
    for i in range(draw.randint(5, 9)):
        reads = tuple(sorted(draw.sample(range(i), min(i, draw.randint(1, 2)))))
        ops.append(Op(f"op{i}", reads, draw.randint(1, 5), draw.randint(1, 4)))
    return ops


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param(CHAIN, id="chain"),
        *(pytest.param(random_step(seed), id=str(seed)) for seed in range(5)),
        *(pytest.param(random_step(seed), id=str(seed), marks=pytest.mark.slow) for seed in range(5, 15)),
    ],
)
def test_the_tiny_planner_finds_the_optimum_of_the_planner(ops: list[Op]) -> None:
    in_order = list(range(len(ops)))
    keep_everything_s, peak_bytes, _ = judge(ops, in_order)
    least_bytes = max(sum(ops[j].size_bytes for j in {*op.reads, i}) for i, op in enumerate(ops))
    for budget_bytes in range(least_bytes, peak_bytes + 1):
        plan = planner_solve(as_graph(ops), f"{budget_bytes}B", tolerance=0, reorder=False)
        solution = solve(ops, budget_bytes)
        time_s, used_bytes, _ = judge(ops, solution[0])
        assert used_bytes <= budget_bytes
        assert time_s == pytest.approx(plan.time_s)
        assert solution[1] == pytest.approx(plan.time_s)
    assert time_s == keep_everything_s


def test_the_tiny_planner_says_that_nothing_fits() -> None:
    assert solve(CHAIN, 2) is None


def test_the_tiny_judge_refuses_to_read_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="op f3 reads f2, which is not in memory"):
        judge(CHAIN, [0, 2])


def test_the_tiny_planner_prints_its_schedule(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tiny_planner.py"])
    main()
    printed = capsys.readouterr().out
    assert printed.count("*") == 1 + 3  # the head, and three recomputed ops
    assert printed in (ROOT / "docs" / "how-it-works.md").read_text()
    assert "4 of 4 bytes, 15 s; no schedule within them takes less than 15 s" in printed


def test_the_tiny_planner_is_short_and_imports_nothing_of_ours() -> None:
    source = (EXAMPLES / "tiny_planner.py").read_text()
    lines = len(source.splitlines())
    assert lines <= 150
    assert f"in {lines} lines" in (ROOT / "docs" / "how-it-works.md").read_text()
    assert not re.search(r"^(from|import) (planner|solvers|graphs)", source, re.MULTILINE)


PUBLIC = [name for name in planner.__all__ if name != "__version__"]
X, Y = torch.ones(16, 32), torch.ones(16, 8)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return planner.trace(network(), nn.functional.mse_loss, (X, Y))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(name: str, graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    public, model, loss_fn, plan = getattr(planner, name), network(), nn.functional.mse_loss, planner.solve(graph, "100%")
    given = {"planner": planner, "model": model, "loss_fn": loss_fn, "x": X, "y": Y, "graph": graph, "plan": plan}
    given["graph_peak_bytes"] = plan.graph.keep_everything_peak_bytes
    if name == "OutOfMemoryError":
        given["step"] = planner.compile(model, loss_fn, (X, Y), budget="1GB")
    names = {**vars(sys.modules[public.__module__]), **given}
    (example,) = [found for found in doctest.DocTestFinder(recurse=False).find(public, name, globs=names) if found.examples]
    said: list[str] = []
    ended = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert ended.failed == 0, "".join(said)
