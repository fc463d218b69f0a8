"""Recomputing, offloading, and both in one program: ``make bench-offload`` writes results/offload/.

Steps are traced with fake tensors, timed by the roofline of an H200 and copied at 50 GB/s in each direction. Each solve has a
tolerance of 0.1% and 60 s.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.common import PROVENANCE, command_line, provenance, write
from graphs.errors import InfeasibleError, LimitError
from graphs.ir import Graph
from graphs.units import format_bytes, format_ratio
from planner.models.tracing import Tracing
from planner.models.workload import parse_spec
from planner.report.tables import as_markdown
from planner.solving import budget_in_bytes, solve, summarize

# What is traced, and budgets of its peak.
MODELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gpt2-medium": ("zoo:gpt2,layers=24,width=1024,heads=16,batch=8,seq=1024,dtype=bfloat16", ("60%", "50%")),
    "resnet50": ("zoo:resnet50,batch=256", ("60%", "40%")),
    "llama-16": ("zoo:llama,layers=16,width=2048,seq=16384", ("60%", "40%")),
}
METHODS = ("recompute only", "offload only", "both")
LINK = "50GB/s"
HOST = "256GB"
LIMIT_S = 60.0
TOLERANCE = 1e-3
COLUMNS = (
    *("model", "budget", "method", "status", "overhead", "bound", "gap", "seconds"),
    *("base_s", "peak_bytes", "budget_bytes", "host_bytes", "recomputed", "copied", "link", *PROVENANCE),
)


def once_each(graph: Graph) -> Graph:
    """`graph` where no op may run again."""
    return replace(graph, ops=tuple(replace(op, recomputable=False) for op in graph.ops))


def compare(name: str, graph: Graph, budgets: Sequence[str], *, limit_s: float = LIMIT_S) -> Iterator[dict[str, object]]:
    """The rows of one model."""
    about = provenance()
    peak_bytes = summarize(graph).store_all_peak_bytes
    for budget in budgets:
        for method in METHODS:
            offered = method != METHODS[0]
            row: dict[str, object] = dict.fromkeys(COLUMNS)
            row |= {"model": name, "budget": budget, "method": method, "base_s": graph.time_s, "link": LINK, **about}
            row["budget_bytes"] = budget_in_bytes(budget, peak_bytes)
            try:
                plan = solve(
                    once_each(graph) if method == METHODS[1] else graph,
                    budget,
                    options=["offload"] if offered else [],
                    link=LINK if offered else None,
                    host_budget=HOST if offered else None,
                    tolerance=TOLERANCE,
                    time_limit_s=limit_s,
                )
            except (InfeasibleError, LimitError) as error:
                yield row | {"status": "infeasible" if isinstance(error, InfeasibleError) else "limit"}
                continue
            bound = None if plan.bound_s is None else plan.bound_s / plan.graph.time_s - 1
            yield row | {
                "status": plan.status,
                "overhead": plan.overhead,
                "bound": bound,
                "gap": plan.gap,
                "seconds": plan.seconds,
                "peak_bytes": plan.peak_bytes,
                "host_bytes": sum(plan.pool_peaks_bytes.values()),
                "recomputed": plan.recomputed,
                "copied": plan.copied,
            }


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Overhead of each method over the step that keeps everything, its bound and gap, and what is on the host."""
    cells = [("model", "budget", "method", "overhead", "bound", "gap", "on the host", "seconds")]
    for row in rows:
        overhead, bound, gap, seconds, host = (row.get(key) for key in ("overhead", "bound", "gap", "seconds", "host_bytes"))
        cells.append(
            (
                *(str(row[key]) for key in ("model", "budget", "method")),
                format_ratio(overhead) if isinstance(overhead, float) else str(row["status"]),
                format_ratio(bound) if isinstance(bound, float) else "",
                format_ratio(gap) if isinstance(gap, float) else "",
                format_bytes(host) if isinstance(host, int) and host else "",
                f"{seconds:.0f}" if isinstance(seconds, float) else "",
            )
        )
    return as_markdown(cells)


def main(words: Sequence[str] | None = None) -> None:
    """Solve, and write rows and table, after each row anew."""
    arguments = command_line(__doc__, models=MODELS, out="results/offload").parse_args(words)
    rows: list[dict[str, object]] = []
    for name in arguments.models:
        spec, budgets = MODELS[name]
        for row in compare(name, Tracing(roofline="h200").graph(parse_spec(spec)), budgets):
            rows.append(row)
            write(arguments.out, COLUMNS, rows, table(rows))


if __name__ == "__main__":
    main()
