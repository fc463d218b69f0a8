"""Make the public instances, with their best known solutions: ``python -m benchmarks instances.make``, in about ten minutes."""

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.command import add_names
from benchmarks.solve_suites import ZOO
from benchmarks.solves import build_graph
from planner.graphs.ir import Graph
from planner.graphs.schedule import Compute, Schedule
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.plans.solve import order_for
from planner.plans.summary import summarize
from planner.solvers.clock import WallClock
from planner.solvers.least import bracket_least_budget
from planner.solvers.result import SOLVED
from planner.studies.solves import solve_allocated

FOLDER = Path(__file__).parent
SHARES = (0.75, 0.5, 0.25, 0.1)  # budgets between the least budget that is known to be feasible (0) and the peak (1)
_LEAST_LIMIT_S = 10.0
TRACED = ("gpt2-12", "llama-32", "vit-l", "resnet50", "resnet152", "unet", "mobilenet_v2", "densenet121")
SYNTHETIC: Mapping[str, Callable[[], Graph]] = {
    "chain-50": partial(make_training_chain, 50),
    "transformer-6": partial(transformer, TransformerSize(layers=6)),
    "random-1-40": partial(draw_training_step, 1, 40),
    "random-2-80": partial(draw_training_step, 2, 80),
    "random-3-200": partial(draw_training_step, 3, 200),
}


def generate_graphs(names: Sequence[str]) -> Iterator[tuple[str, Graph]]:
    """Yield the graphs by name, with their ops in the order of the solve."""
    for name in names:
        graph = SYNTHETIC[name]() if name in SYNTHETIC else build_graph(ZOO[name])
        yield name, order_for(graph, "windows", reorder=True).graph


def encode_steps(schedule: Schedule) -> list[int]:
    """Return a schedule as a solution: op ids, and ~tensor for frees."""
    return [step.op if isinstance(step, Compute) else ~step.tensor for step in schedule.steps]


def build_document(name: str, graph: Graph, known: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the content of a file, as README.md describes it."""
    ops = []
    for op in graph.ops:
        entry: dict[str, object] = {"name": op.name, "inputs": op.inputs, "outputs": op.outputs, "time_s": op.time_s}
        entry |= {"workspace_bytes": op.workspace_bytes, "phase": str(op.phase)}
        entry |= {"mutates": op.mutates} if op.mutates else {}
        entry |= {} if op.recomputable else {"recomputable": False}
        ops.append(entry | ({"random": True} if op.random else {}))
    return {
        "format": "remat-instance",
        "version": 1,
        "name": name,
        "static_bytes": graph.static_bytes,
        "tensors": [tensor.size_bytes for tensor in graph.tensors],
        "kept": sorted(graph.kept),
        "ops": ops,
        "known": known,
    }


def solve_budgets(graph: Graph, *, limit_s: float) -> list[dict[str, object]]:
    """Return for each budget the best schedule, its time, and a lower bound on all with this order of first executions."""
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    least_bytes = bracket_least_budget(graph, clock=WallClock(_LEAST_LIMIT_S)).found_bytes
    known = []
    for share in SHARES:
        budget_bytes = least_bytes + round(share * (peak_bytes - least_bytes))
        result = solve_allocated(graph, budget_bytes, WallClock(limit_s), tolerance=1e-4)
        assert result.schedule is not None and result.time_s is not None and result.bound_s is not None
        known.append(
            {
                "budget_bytes": budget_bytes,
                "time_s": result.time_s,
                "bound_s": min(result.bound_s, result.time_s),
                "proved": result.status in SOLVED,
                "steps": encode_steps(result.schedule),
            }
        )
    return known


def write(path: Path, instance: Mapping[str, object]) -> None:
    """Write a file; the same instance gives the same bytes."""
    text = json.dumps(instance, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(words: Sequence[str] | None = None) -> int:
    """Make the missing instances."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_names(parser, "--names", (*TRACED, *SYNTHETIC))
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: that of this file)")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each budget (default: %(default)s)")
    options = parser.parse_args(words)
    wanted = [name for name in options.names if not (options.out / f"{name}.json.gz").exists()]
    for name, graph in generate_graphs(wanted):
        known = solve_budgets(graph, limit_s=options.time_limit)
        write(options.out / f"{name}.json.gz", build_document(name, graph, known))
        gaps = ", ".join(f"{float(str(k['time_s'])) / float(str(k['bound_s'])) - 1:.3%}" for k in known)
        print(f"{name}: {len(graph.ops)} ops, gaps {gaps}", flush=True)
    return 0
