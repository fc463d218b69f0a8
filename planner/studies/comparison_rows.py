"""Rows of a comparison: one for each method at each budget, stored in a CSV as soon as it is known."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from planner.graphs.errors import OutputError
from planner.graphs.ir import Graph
from planner.graphs.units import format_bytes, format_seconds
from planner.settings.counted_memory import CountedMemory
from planner.solvers.registry import SOLVERS
from planner.solvers.result import Status, compute_gap
from planner.studies.rows import FIRST, KeptRows, declare_column, declare_key, declare_text, declare_value

OPTIMUM = "windows"  # the method whose bound holds for all
PEAK_OF = "peak of "  # prefix of budgets that are the measured peak of another method

Key: TypeAlias = tuple[str, str, str]


_MEMORY = "memory"  # in the settings of rows whose budgets do not count allocated bytes


def record_memory(memory: CountedMemory) -> dict[str, object]:
    """Return the entry of the settings of rows for the memory that budgets count; empty for allocated bytes."""
    return {} if memory is CountedMemory.ALLOCATED else {_MEMORY: str(memory)}


class RunBy(StrEnum):
    """The executor of a method's step."""

    SIMULATOR = "simulator"  # not run: its schedule was simulated
    EXECUTOR = "executor"  # its schedule was replayed with real tensors
    TORCH = "torch"  # PyTorch implements the method itself


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One method at one budget."""

    model: str = declare_column("the graph's name", place=FIRST)
    fingerprint: str = declare_column("the graph's", place=FIRST)
    run_by: str = declare_key("simulator (not run: its schedule was judged), executor (its schedule was replayed), or torch")
    method: str = declare_key("a name in planner.solvers.registry or, of what PyTorch runs, in planner.studies.baselines")
    budget: str = declare_key(
        "as it was asked for; `peak of ...` for what another method was measured to take; empty for what has none"
    )
    budget_bytes: int | None = declare_value("static bytes included")
    status: str = declare_column("as in planner.solvers.result; error if the method failed, ran for what PyTorch runs")
    reason: str = declare_text(
        "where nothing was found or nothing ran, why, as in planner.solvers.result; empty where it is not known"
    )
    settings: str = declare_text("that the schedule was found with, those that the method chose itself included, as JSON")
    time_s: float | None = declare_value("of the schedule, by simulation, as peak_bytes")
    peak_bytes: int | None = declare_value()
    bound_s: float | None = declare_value("what the method proves")
    base_s: float = declare_column("of the step without recomputation, by simulation, as base_peak_bytes")
    base_peak_bytes: int = declare_column()
    seconds: float | None = declare_value("that the method took to find its schedule")
    measured_s: float | None = declare_value("median of a forward and backward pass")
    eager_s: float | None = declare_value("the same of plain PyTorch, in turn with it")
    measured_ratio: float | None = declare_value("median of the multiples of plain PyTorch's time in the same turn")
    measured_peak_bytes: int | None = declare_value("of tensors and workspaces (CUDA: allocated), static bytes included")
    reserved_bytes: int | None = declare_value(
        "what PyTorch's allocator reserves on CUDA: as measured, or by its model, as the budget counts it, if nothing was run"
    )
    measured_host_bytes: int | None = declare_value(
        "most on the host of what was copied there; unknown where nothing can be copied"
    )
    exactness: str = declare_text("of loss and gradients, as in planner.studies.measured")
    gradient_error: float | None = declare_value("Euclidean distance from eager's gradients, over their length")
    repeats: int | None = declare_value("steps timed")
    tolerance: float = declare_column("that the method was given, as time_limit_s")
    time_limit_s: float = declare_column()
    seed: int = declare_column("of weights, batch, and methods that draw at random")
    message: str = declare_text("why there is no schedule, or why it does not run")
    commit: str = declare_column()
    machine: str = declare_column()
    versions: str = declare_column()

    @property
    def key(self) -> Key:
        """The unique key of the row."""
        return self.run_by, self.method, self.budget

    @property
    def name(self) -> str:
        """The name of the step, among those that are run."""
        return self.method if self.run_by == RunBy.TORCH else f"{self.method} at {self.budget}"

    @property
    def ran(self) -> bool:
        """True if the step was run, and its peak measured."""
        return self.measured_peak_bytes is not None

    @property
    def memory(self) -> CountedMemory:
        """Kind of memory that the budget counts."""
        return CountedMemory(json.loads(self.settings or "{}").get(_MEMORY, CountedMemory.ALLOCATED))

    @property
    def counted_bytes(self) -> int | None:
        """Bytes that the schedule needs of the memory that the budget counts; None without one."""
        return self.peak_bytes if self.memory is CountedMemory.ALLOCATED else self.reserved_bytes

    @property
    def measured_memory(self) -> str:
        """The measured peak as text, with the peak on the host."""
        host = f", {format_bytes(self.measured_host_bytes)} on the host" if self.measured_host_bytes else ""
        return f"{format_bytes(self.measured_peak_bytes or 0)}{host}"

    @property
    def overhead(self) -> float | None:
        """The overhead of the schedule, as a fraction of the step without recomputation."""
        return None if self.time_s is None else compute_gap(self.time_s, self.base_s)


def open_rows(
    folder: Path,
    graph: Graph,
    recorded: Mapping[str, object] | None = None,
    order: Callable[[ComparisonRow], Any] | None = None,
) -> KeptRows[ComparisonRow]:
    """Return the rows in ``rows.csv`` of `folder`, all of one graph and one profile.

    Args:
        recorded: settings of its options, and of what budgets count, which are among the settings of every row.
        order: sort key of rows; None: in the order of addition.

    Raises:
        OutputError: the CSV is of another graph, other options, other memory, or another version.
    """
    kept = KeptRows(folder / "rows.csv", ComparisonRow, order)
    if any(row.fingerprint != graph.fingerprint for row in kept):
        raise OutputError(f"{kept.path} holds rows of another graph: choose another folder, or delete it")
    given = {_MEMORY: str(CountedMemory.ALLOCATED), **(recorded or {})}
    for row in kept:
        settings = {_MEMORY: str(row.memory), **json.loads(row.settings or "{}")}
        if given != (others := {name: settings.get(name) for name in given}):
            raise OutputError(
                f"{kept.path} holds rows made with {others}, not {given}: ask for the same, or choose another folder"
            )
    return kept


def find_missing(kept: KeptRows[ComparisonRow], keys: Iterable[Key], base_s: float) -> list[Key]:
    """Return those of `keys` without rows; `base_s` is the time of the step without recomputation.

    Raises:
        OutputError: rows are missing, and the existing ones have other op times: the ops were measured again.
    """
    found = [key for key in keys if key not in kept]
    if found and (others := {row.base_s for row in kept} - {base_s}):
        raise OutputError(
            f"{kept.path} holds rows of a step that takes {format_seconds(others.pop())} without recomputation, and here it "
            f"takes {format_seconds(base_s)}: its ops were measured again, for no graph.json is beside it; choose "
            "another folder, or delete it"
        )
    return found


def select_simulated(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows of all methods at the same budgets by simulation; if there are none, those of replayed schedules."""
    at_budgets = [row for row in rows if row.run_by != RunBy.TORCH and not row.budget.startswith(PEAK_OF)]
    return [row for row in at_budgets if row.run_by == RunBy.SIMULATOR] or at_budgets


def list_methods(rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the methods in `rows`: the registry's in its order, then others."""
    there = dict.fromkeys(row.method for row in rows)
    return [name for name in SOLVERS if name in there] + [name for name in there if name not in SOLVERS]


def bound_of(rows: Sequence[ComparisonRow], budget_bytes: int) -> float | None:
    """Return the best proved bound on the step's time at `budget_bytes`: one found at a larger budget holds too."""
    proofs = [row for row in rows if row.method == OPTIMUM and row.budget_bytes and row.budget_bytes >= budget_bytes]
    bounds = [row.bound_s for row in proofs if row.bound_s is not None]
    return max(bounds, default=None)


def format_bound(rows: Sequence[ComparisonRow], budget_bytes: int) -> str:
    """Return the bound on the overhead at `budget_bytes`; "infeasible" where it is proved that no schedule fits."""
    if any(row.method == OPTIMUM and row.budget_bytes == budget_bytes and row.status == Status.INFEASIBLE for row in rows):
        return "infeasible"
    bound_s = bound_of(rows, budget_bytes)
    return "none" if bound_s is None else f"{bound_s / rows[0].base_s - 1:z.2%}"
