"""Addresses of buffers in one arena: ``make bench-addresses`` writes results/addresses/.

Public instances, where they are at hand, each in the arena that it was published with (or in the smallest), and plans of models
on the roofline of an H200 at several budgets: the smallest arena of the search, beside the best of best fit in four orders, and
the bytes that are in use at once, which no arena can be below.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common import PROVENANCE, command_line, one_thread, provenance, write
from graphs.addresses import Buffer, buffers_of
from graphs.io.buffers import read_buffers
from planner.budgets import budget_in_bytes
from planner.report.tables import as_markdown
from planner.solving import summarize
from planner.workload.tracing import Tracing
from planner.workload.workload import parse_spec
from solvers.addresses.greedy import ORDERS, place
from solvers.addresses.instance import instances_of
from solvers.addresses.solve import solve
from solvers.clock import WallClock
from solvers.registry import get_solver
from solvers.request import Request
from solvers.tolerance import Tolerance

INSTANCES = Path(__file__).parents[1] / ".." / "shared" / "instances" / "addresses"
PUBLIC = "public"
MODELS = {
    "gpt2-medium": "zoo:gpt2,layers=24,width=1024,heads=16,batch=8,dropout=0,dtype=bfloat16",
    "resnet50": "zoo:resnet50,batch=128",
    "unet": "zoo:unet,batch=8",
}
BUDGETS = ("100%", "80%", "60%", "50%", "40%")
PLAN_LIMIT_S = 20.0
LIMIT_S = 120.0
SEEDS = 3  # of the search, for public instances
COLUMNS = (
    *("name", "budget", "seed", "buffers", "capacity_bytes", "live_bytes", "best_fit_bytes", "arena_bytes", "bound_bytes"),
    *("status", "seconds", *PROVENANCE),
)


def best_fit_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the smallest arena of best fit in decreasing order of size, lifetime and area, and by start."""
    heights = []
    for key in ORDERS.values():
        height = 0
        for instance in instances_of(buffers):
            order = sorted(range(len(instance.size)), key=lambda u, i=instance, key=key: key(i, u))
            height = max(height, instance.height_bytes(place(instance, order, WallClock())))
        heights.append(height)
    return min(heights)


def row(buffers: Sequence[Buffer], capacity_bytes: int | None, *, seed: int = 0, limit_s: float = LIMIT_S) -> dict[str, object]:
    """Return what is found for `buffers`."""
    result = solve(buffers, capacity_bytes, time_limit_s=limit_s, seed=seed)
    return {
        "seed": seed,
        "buffers": len(buffers),
        "capacity_bytes": capacity_bytes,
        "live_bytes": max(instance.bound_bytes for instance in instances_of(buffers)),
        "best_fit_bytes": best_fit_bytes(buffers),
        "arena_bytes": result.height_bytes,
        "bound_bytes": result.bound_bytes,
        "status": str(result.status),
        "seconds": result.seconds,
        **provenance(),
    }


def public_rows() -> Iterator[dict[str, object]]:
    """Yield the rows of the public instances; a number before the ending of a name is the capacity."""
    for path in sorted(INSTANCES.glob("*.csv")):
        name, _, capacity = path.stem.partition(".")
        for seed in range(SEEDS):
            found = row(read_buffers(path).buffers, int(capacity) if capacity else None, seed=seed)
            yield {"name": name, "budget": None, **found}


def plan_rows(name: str, budgets: Sequence[str] = BUDGETS, *, limit_s: float = PLAN_LIMIT_S) -> Iterator[dict[str, object]]:
    """Yield a row for a plan of model `name` at each budget that one is found for."""
    graph = Tracing(roofline="h200").graph(parse_spec(MODELS[name]))
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    for budget in budgets:
        request = Request(graph, budget_in_bytes(budget, peak_bytes), Tolerance.of(0.01), WallClock(limit_s))
        schedule = get_solver("windows")(request).schedule
        if schedule is not None:
            yield {"name": name, "budget": budget, **row(buffers_of(graph, schedule), None, limit_s=limit_s)}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Arenas as multiples of the bytes in use at once."""
    cells = [("buffers of", "budget", "seed", "number", "best fit", "search", "bound", "status", "seconds")]
    for found in rows:
        live = found["live_bytes"]
        assert isinstance(live, int)
        heights = (f"{int(str(found[key])) / live:.4f}" for key in ("best_fit_bytes", "arena_bytes", "bound_bytes"))
        head = (str(found[key] or "") if key == "budget" else str(found[key]) for key in ("name", "budget", "seed", "buffers"))
        cells.append((*head, *heights, str(found["status"]), f"{float(str(found['seconds'])):.2f}"))
    return as_markdown(cells)


def main(words: Sequence[str] | None = None) -> None:
    """Solve, and write rows and table, after each row anew."""
    arguments = command_line(__doc__, models=(PUBLIC, *MODELS), out="results/addresses").parse_args(words)
    one_thread()
    if PUBLIC in arguments.models and not INSTANCES.is_dir():
        print(f"the public instances are not here and are left out: no {INSTANCES}")
    rows: list[dict[str, object]] = []
    for name in arguments.models:
        for found in public_rows() if name == PUBLIC else plan_rows(name):
            rows.append(found)
            write(arguments.out, COLUMNS, rows, table(rows))


if __name__ == "__main__":
    main()
