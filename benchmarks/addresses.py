"""Addresses of buffers in one arena: ``make bench-addresses`` writes results/addresses/.

Public instances, where they are at hand, each in the arena that it was published with (or in the smallest), and plans of models
on the roofline of an H200 at several budgets: the smallest arena of the search, beside the best of best fit in four orders, and
the bytes that are in use at once, which no arena can be below.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.command import build_parser, carry_out, limit_threads
from benchmarks.solves import build_graph
from benchmarks.zoo_models import MODELS
from planner.graphs.addresses import Buffer, buffers_of
from planner.graphs.io.buffers import read_buffers
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import summarize
from planner.settings.budget import read_budget
from planner.solvers.addresses.greedy import ORDERS, construct_offsets
from planner.solvers.addresses.instance import split_into_instances
from planner.solvers.addresses.solve import solve
from planner.solvers.clock import WallClock
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_value
from planner.studies.solves import solve_allocated
from planner.studies.tables import Column, share_column

INSTANCES = Path(__file__).parents[1] / ".." / "shared" / "instances" / "addresses"
PUBLIC = "public"
BUDGETS = ("100%", "80%", "60%", "50%", "40%")
PLAN_LIMIT_S = 20.0
LIMIT_S = 120.0
SEEDS = 3  # of the search, for public instances


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRow(Made):
    """The arena of the buffers of a public instance or of a plan."""

    name: str = declare_key("a public instance, or a model")
    budget: str = declare_key("of the plan, as a share of the peak; empty for public instances")
    seed: int = declare_key("of the search")
    buffers: int = declare_column("how many there are")
    capacity_bytes: int | None = declare_value(
        "arena that a public instance was published with; otherwise the smallest is wanted"
    )
    live_bytes: int = declare_column("most in use at once")
    best_fit_bytes: int = declare_column("smallest arena of best fit in four orders")
    arena_bytes: int | None = declare_value("found by the search")
    bound_bytes: int = declare_column("below which there is no arena")
    status: str = declare_column()
    seconds: float = declare_column("of the search")


def compute_best_fit_bytes(buffers: Sequence[Buffer]) -> int:
    """Return the smallest arena of best fit in decreasing order of size, lifetime and area, and by start."""
    heights = [
        [instance.compute_height_bytes(offsets) for offsets in islice(construct_offsets(instance, WallClock()), len(ORDERS))]
        for instance in split_into_instances(buffers)
    ]
    return min(map(max, zip(*heights, strict=True)), default=0)


def solve_addresses(
    name: str,
    buffers: Sequence[Buffer],
    capacity_bytes: int | None = None,
    *,
    budget: str = "",
    seed: int = 0,
    limit_s: float = LIMIT_S,
) -> AddressRow:
    """Return the row of `buffers`."""
    result = solve(buffers, capacity_bytes, time_limit_s=limit_s, seed=seed)
    return AddressRow(
        name=name,
        budget=budget,
        seed=seed,
        buffers=len(buffers),
        capacity_bytes=capacity_bytes,
        live_bytes=max(instance.bound_bytes for instance in split_into_instances(buffers)),
        best_fit_bytes=compute_best_fit_bytes(buffers),
        arena_bytes=result.height_bytes,
        **select_attributes(result, "bound_bytes", "status", "seconds"),
        **collect_provenance(),
    )


def solve_instance(path: Path) -> Iterator[AddressRow]:
    """Yield a row for each seed of a public instance; a number before the ending of its name is the capacity."""
    name, _, capacity = path.stem.partition(".")
    for seed in range(SEEDS):
        yield solve_addresses(name, read_buffers(path).buffers, int(capacity) if capacity else None, seed=seed)


def solve_plans(model: str) -> Iterator[AddressRow]:
    """Yield a row for a plan of `model` at each budget that one is found for."""
    graph = build_graph(MODELS[model])
    peak_bytes = summarize(graph).keep_everything_peak_bytes
    for budget in BUDGETS:
        schedule = solve_allocated(
            graph, read_budget(budget).resolve(peak_bytes), WallClock(PLAN_LIMIT_S), tolerance=0.01
        ).schedule
        if schedule is not None:
            yield solve_addresses(model, buffers_of(graph, schedule), budget=budget, limit_s=PLAN_LIMIT_S)


TABLE = (
    Column("buffers of", "name"),
    *("budget", "seed"),
    Column("number", "buffers"),
    share_column("best fit", "best_fit_bytes", "live_bytes", "{:.4f}"),
    share_column("search", "arena_bytes", "live_bytes", "{:.4f}"),
    share_column("bound", "bound_bytes", "live_bytes", "{:.4f}"),
    "status",
    Column("seconds", form="{:.2f}"),
)


def run(case: Path | str, known: Sequence[AddressRow]) -> Iterator[AddressRow]:
    """Yield the rows of a public instance, given by its file, or of a model, given by its name."""
    return solve_instance(case) if isinstance(case, Path) else solve_plans(case)


def main(words: Sequence[str] | None = None) -> int:
    """Solve the missing cases; write rows and table."""
    arguments = build_parser(__doc__, AddressRow, models=(PUBLIC, *MODELS), out="results/addresses").parse_args(words)
    limit_threads()
    files = sorted(INSTANCES.glob("*.csv")) if PUBLIC in arguments.models else []
    if PUBLIC in arguments.models and not files:
        print(f"the public instances are not here and are left out: no {INSTANCES}")
    cases: dict[tuple[str, ...], Path | str] = {(path.stem.partition(".")[0],): path for path in files}
    cases |= {(model,): model for model in arguments.models if model != PUBLIC}
    study = Study(AddressRow, run, pages={"table.md": TABLE})
    return carry_out(study, arguments, cases)
