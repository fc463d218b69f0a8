"""Make the public instances, with what is known of each: ``python -m benchmarks.instances.make``, in about ten minutes."""

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.solve_suites import ZOO
from graphs.ir import Graph
from graphs.schedule import Compute, Schedule
from graphs.synthetic.random_graphs import random_training_step
from graphs.synthetic.small import training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from planner.settings import TraceSettings
from planner.solving import order_for, summarize
from planner.workload.tracing import Tracing
from planner.workload.workload import parse_spec
from solvers.clock import WallClock
from solvers.least import least_budget
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Status
from solvers.tolerance import Tolerance

FOLDER = Path(__file__).parent
SHARES = (0.75, 0.5, 0.25, 0.1)  # of the way from the least budget that is known to do to the peak
_LEAST_LIMIT_S = 10.0
TRACED = ("gpt2-12", "llama-32", "vit-l", "resnet50", "resnet152", "unet", "mobilenet_v2", "densenet121")
SYNTHETIC: Mapping[str, Callable[[], Graph]] = {
    "chain-50": partial(training_chain, 50),
    "transformer-6": partial(transformer, TransformerSize(layers=6)),
    "random-1-40": partial(random_training_step, 1, 40),
    "random-2-80": partial(random_training_step, 2, 80),
    "random-3-200": partial(random_training_step, 3, 200),
}


def graphs(names: Sequence[str]) -> Iterator[tuple[str, Graph]]:
    """The graphs by name, in the order of ops that they are solved in."""
    for name in names:
        graph = SYNTHETIC[name]() if name in SYNTHETIC else Tracing(TraceSettings(roofline="h200")).graph(parse_spec(ZOO[name]))
        yield name, order_for(graph, "windows", reorder=True).graph


def as_steps(schedule: Schedule) -> list[int]:
    """A schedule as a solution: op numbers, and ~tensor where one is freed."""
    return [step.op if isinstance(step, Compute) else ~step.tensor for step in schedule.steps]


def as_instance(name: str, graph: Graph, known: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What a file holds, as README.md describes it."""
    ops = []
    for op in graph.ops:
        said: dict[str, object] = {"name": op.name, "inputs": op.inputs, "outputs": op.outputs, "time_s": op.time_s}
        said |= {"workspace_bytes": op.workspace_bytes, "phase": str(op.phase)}
        said |= {"mutates": op.mutates} if op.mutates else {}
        said |= {} if op.recomputable else {"recomputable": False}
        ops.append(said | ({"random": True} if op.random else {}))
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


def solved(graph: Graph, *, limit_s: float) -> list[dict[str, object]]:
    """What is known at each budget: the best schedule, its time, and a bound on all in this order of first executions."""
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    least_bytes = least_budget(graph, clock=WallClock(_LEAST_LIMIT_S)).found_bytes
    known = []
    for share in SHARES:
        budget_bytes = least_bytes + round(share * (peak_bytes - least_bytes))
        result = get_solver("windows")(Request(graph, budget_bytes, Tolerance.of(1e-4), WallClock(limit_s)))
        assert result.schedule is not None and result.time_s is not None and result.bound_s is not None
        known.append(
            {
                "budget_bytes": budget_bytes,
                "time_s": result.time_s,
                "bound_s": min(result.bound_s, result.time_s),
                "proved": result.status is Status.OPTIMAL,
                "steps": as_steps(result.schedule),
            }
        )
    return known


def write(path: Path, instance: Mapping[str, object]) -> None:
    """Write a file; the same instance is the same bytes."""
    text = json.dumps(instance, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main(words: Sequence[str] | None = None) -> int:
    """Make what is not there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=",".join((*TRACED, *SYNTHETIC)), help="with commas (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: beside this file)")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each budget (default: %(default)s)")
    options = parser.parse_args(words)
    wanted = [name for name in options.names.split(",") if not (options.out / f"{name}.json.gz").exists()]
    for name, graph in graphs(wanted):
        known = solved(graph, limit_s=options.time_limit)
        write(options.out / f"{name}.json.gz", as_instance(name, graph, known))
        gaps = ", ".join(f"{float(str(k['time_s'])) / float(str(k['bound_s'])) - 1:.3%}" for k in known)
        print(f"{name}: {len(graph.ops)} ops, gaps {gaps}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
