"""Steps in an arena beside the same steps without, and beside eager PyTorch: ``make bench-arena`` writes results/arena/.

The three take turns in a process with one thread, and the pages that the system gives them are counted (minor faults). Each row
comes twice: with the C library as it is, which returns large blocks to the system when they are freed, and set to keep them
(MALLOC_TOP_PAD_ and others), which no planned step needs and any process could. Ratios are medians within a turn.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import torch

import planner
from benchmarks.arena_case import MODELS, ArenaRow, measured
from benchmarks.command import Setting, benchmark
from graphs.units import format_bytes
from planner import options
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, stream
from planner.studies.rows import listed, missing_keys
from planner.studies.tables import Column, markdown, share_column

BUDGETS = ("100%", "70%", "50%")
USUAL, KEPT = "as it is", "keeps memory"
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    USUAL: {},
    KEPT: {"MALLOC_TOP_PAD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}
_LIMIT_S = 600.0
_SOLVE_S = 10.0


def measure(name: str, known: Sequence[ArenaRow], *, repeats: int) -> Iterator[ArenaRow]:
    """Yield the rows of a model that are not `known`, each measured in a process of its own."""
    missing = missing_keys(product(BUDGETS, _VARIABLES), known, "budget", "library")
    if not missing:
        return
    torch.manual_seed(0)
    graph = planner.trace(*MODELS[name]())
    plans = {budget: planner.solve(graph, budget, arena=True, time_limit_s=_SOLVE_S) for budget in dict(missing)}
    for budget, library in missing:
        variables = {**ALONE, **_VARIABLES[library]}
        yield from stream(measured, name, budget, library, plans[budget], repeats, variables=variables, limit_s=_LIMIT_S)


TABLE = (
    *("model", "budget"),
    Column("C library", "library"),
    Column("peak", "peak_bytes", format_bytes),
    share_column("arena", "arena_bytes", "peak_bytes", "{:.4f}x"),
    Column("outside", "counted_bytes", format_bytes),
    Column("bits", "identical", lambda same: "identical" if same else "DIFFERENT"),
    Column("eager step", "eager_s"),
    Column("plan", "plan_ratio"),
    Column("plan in an arena", "arena_ratio"),
    Column("page faults: eager", "eager_faults", "{:,}"),
    Column("plan", "plan_faults", "{:,}"),
    Column("arena", "arena_faults", "{:,}"),
)


STUDY = Study(
    ArenaRow,
    measure,
    whole=False,
    order=listed(model=MODELS, budget=BUDGETS, library=_VARIABLES),
    pages={"table.md": partial(markdown, columns=TABLE)},
)
main = benchmark(STUDY, __doc__, models=MODELS, out="results/arena", repeats=Setting(20, "steps timed of each", options.count))


if __name__ == "__main__":
    sys.exit(main())
