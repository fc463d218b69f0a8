"""Memory that PyTorch reserves for plans on a CUDA device: ``make bench-reserved`` writes results/reserved/.

Plans of models on the roofline of an H200 at five budgets of allocated bytes: the memory that PyTorch's caching allocator
reserves in three steps of training, by a model of it, with default settings, with expandable segments, and with a private pool
of one segment for each step; the least capacity of a device at which the steps run; and the arena of planned addresses. Then
plans whose budget counts what is reserved, in both ways and for steps in an arena, at the same shares of what eager PyTorch
reserves. What counting reserved memory costs is the overhead of a plan in an arena, less that of a plan whose tensors may take as
many bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from benchmarks.command import Main
from benchmarks.solves import build_graph
from benchmarks.zoo_models import MODELS
from planner.graphs.addresses import buffers_of
from planner.graphs.allocators.caching import EXPANDABLE, CachingAllocator
from planner.graphs.allocators.training import Training, compute_outside_pool_bytes, least_capacity_bytes, play, usage_of
from planner.graphs.errors import BudgetError, LimitError
from planner.graphs.ir import Graph
from planner.memory.reserved import build_training
from planner.plans.plan import Plan
from planner.plans.select_attributes import select_attributes
from planner.plans.solve import solve
from planner.settings.counted_memory import CountedMemory
from planner.solvers.addresses.solve import solve as solve_addresses
from planner.studies.experiment import Study
from planner.studies.rows import (
    Made,
    collect_provenance,
    declare_column,
    declare_key,
    declare_text,
    declare_value,
    find_missing_keys,
)
from planner.studies.tables import Column, share_column

ARENA = "reserved, in an arena"
COUNTS = (*map(str, (CountedMemory.ALLOCATED, CountedMemory.RESERVED, CountedMemory.RESERVED_EXPANDABLE)), ARENA)
BUDGETS = ("100%", "80%", "60%", "50%", "40%")
PLAN_LIMIT_S = 20.0
ARENA_LIMIT_S = 10.0
TOLERANCE = 0.001
_GRAIN_BYTES = 2 * 2**20  # of what the driver gives


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedRow(Made):
    """Memory that is reserved for the plan of a model at one budget."""

    model: str = declare_key()
    counts: str = declare_key(
        "memory that the budget counts: allocated, or reserved with default settings, with expandable segments, or in an arena"
    )
    budget: str = declare_key("of the plan, as a share of what eager PyTorch needs of that memory")
    budget_bytes: int | None = declare_value()
    peak_bytes: int | None = declare_value("predicted by the judge")
    static_bytes: int = declare_column("of it throughout the step")
    overhead: float | None = declare_value("of the step time, predicted")
    gap: float | None = declare_value("proved")
    allocated_overhead: float | None = declare_value(
        "in an arena: of a plan whose tensors may take as many bytes as this one's budget leaves beside workspaces of libraries"
    )
    in_use_bytes: int | None = declare_value(
        "most in use at once, rounded to blocks, with workspaces of libraries and what the optimizer holds"
    )
    library_bytes: int | None = declare_value("of workspaces of libraries")
    reserved_bytes: int | None = declare_value("by the default allocator, in an arena if the plan is for one")
    expandable_bytes: int | None = declare_value("with expandable segments")
    pool_bytes: int | None = declare_value("where each step takes its memory from a pool with one segment of the least size")
    least_device_bytes: int | None = declare_value("least capacity of a device at which the steps run, with default settings")
    arena_bytes: int | None = declare_value("planned addresses of the step in one arena, aligned to 512 bytes, and static memory")
    bound_bytes: int | None = declare_value("below which there is no arena, with static memory")
    status: str = declare_text("of the addresses, or why there is no plan")


def plan_row(model: str, graph: Graph, counts: str, budget: str) -> ReservedRow:
    """Return the row of a plan, or of the reason why there is none."""
    row = partial(ReservedRow, model=model, counts=counts, budget=budget, static_bytes=graph.static_bytes, **collect_provenance())
    arena = counts == ARENA
    memory = CountedMemory.RESERVED if arena else counts
    find_plan = partial(solve, graph, time_limit_s=PLAN_LIMIT_S, tolerance=TOLERANCE)
    try:
        plan = find_plan(budget, memory=memory, arena=arena)
    except (BudgetError, LimitError) as error:
        return row(status=f"{type(error).__name__}: {error}")
    measured = row(**_measure(graph, plan))
    if not arena:
        return measured
    allocated = find_plan(plan.budget_bytes - (measured.library_bytes or 0), memory=CountedMemory.ALLOCATED)
    return replace(measured, allocated_overhead=allocated.overhead)


def _measure(graph: Graph, plan: Plan) -> dict[str, object]:
    training = build_training(graph, plan.schedule)
    usage = usage_of(training)
    addresses = solve_addresses(buffers_of(graph, plan.schedule, alignment=512), time_limit_s=ARENA_LIMIT_S)
    return {
        **select_attributes(plan, "budget_bytes", "peak_bytes", "overhead", "gap"),
        "in_use_bytes": usage.allocated_bytes,
        "library_bytes": sum(training.libraries),
        "reserved_bytes": usage.reserved_bytes if plan.arena_bytes is None else plan.reserved_bytes,
        "expandable_bytes": usage_of(training, EXPANDABLE).reserved_bytes,
        "pool_bytes": compute_reserved_with_pool_bytes(training),
        "least_device_bytes": least_capacity_bytes(training),
        "arena_bytes": graph.static_bytes + addresses.height_bytes,
        "bound_bytes": graph.static_bytes + addresses.bound_bytes,
        "status": str(addresses.status),
    }


def compute_reserved_with_pool_bytes(training: Training) -> int:
    """Return the bytes that PyTorch reserves if all steps use a private pool with one segment for large blocks.

    The pool is as with ``torch.cuda.MemPool``: a segment of the least sufficient size is reserved in advance. Static memory, the
    workspaces of libraries and the optimizer's memory are outside the pool.
    """
    inside = Training((), training.buffers, moments=training.moments)
    usage = usage_of(inside)
    low, high = 0, -(-usage.reserved_bytes // _GRAIN_BYTES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_one_segment(inside, middle * _GRAIN_BYTES) else (middle, high)
    allocator = _make_primed(high * _GRAIN_BYTES)
    return compute_outside_pool_bytes(training) + play(inside, allocator).reserved_bytes


def _make_primed(size_bytes: int) -> CachingAllocator:
    """Return an allocator with a free segment of `size_bytes`."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(size_bytes))
    return allocator


def _fits_one_segment(training: Training, size_bytes: int) -> bool:
    allocator = _make_primed(size_bytes)
    play(training, allocator)
    return sum(not segment.small for segment in allocator.segments.values()) == 1


def run(model: str, known: Sequence[ReservedRow]) -> Iterator[ReservedRow]:
    """Yield the rows of a model that are not `known`."""
    graph = build_graph(MODELS[model], optimizer="adamw")
    for counts, budget in find_missing_keys(product(COUNTS, BUDGETS), known, "counts", "budget"):
        yield plan_row(model, graph, counts, budget)


def _format_overrun(row: ReservedRow) -> str | None:
    """Return the reserved bytes over the budget, with the allocator settings that the budget is for; None if unknown."""
    reserved_bytes = row.expandable_bytes if row.counts == CountedMemory.RESERVED_EXPANDABLE else row.reserved_bytes
    return f"{reserved_bytes / row.budget_bytes:.3f}" if reserved_bytes and row.budget_bytes else None


TABLE = (
    *("model", "counts", "budget"),
    Column("budget", "budget_bytes"),
    Column("peak", "peak_bytes"),
    Column("in use", "in_use_bytes"),
    share_column("reserved", "reserved_bytes", "in_use_bytes", "{:.3f}"),
    share_column("expandable", "expandable_bytes", "in_use_bytes", "{:.3f}"),
    share_column("pool", "pool_bytes", "in_use_bytes", "{:.3f}"),
    share_column("least device", "least_device_bytes", "in_use_bytes", "{:.3f}"),
    share_column("arena of peak", "arena_bytes", "peak_bytes", "{:.3f}"),
    Column("of budget", _format_overrun),
    *("overhead", "gap"),
    Column("of as many bytes allocated", "allocated_overhead"),
    Column("addresses", "status"),
)
STUDY = Study(ReservedRow, run, whole=False, pages={"table.md": TABLE})
main = Main(STUDY, MODELS)
