"""What a comparison knows: a row for each method at each budget, kept in a CSV as soon as it is known."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from graphs.errors import OutputError
from graphs.ir import Graph
from graphs.units import format_bytes, format_seconds
from planner.studies import rows as tables
from solvers.registry import SOLVERS
from solvers.result import relative_gap

OPTIMUM = "windows"  # the method whose bound holds for all
PEAK_OF = "peak of "  # begins the budget that is what another method was measured to take

Key: TypeAlias = tuple[str, str, str]


class RunBy(StrEnum):
    """What a method's step was run by."""

    SIMULATOR = "simulator"  # not run: its schedule was judged
    EXECUTOR = "executor"  # its schedule was replayed with real tensors
    TORCH = "torch"  # PyTorch has the method itself


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one budget; what is unknown is None.

    Attributes:
        model: the graph's name.
        fingerprint: the graph's.
        run_by: one of ``RunBy``.
        method: a name in ``solvers.registry`` or, of what PyTorch runs, in ``planner.studies.baselines``.
        budget: as it was asked for; ``peak of ...`` for what another method was measured to take; empty for
            what PyTorch runs, which is given none.
        budget_bytes: static bytes included.
        status: as in ``solvers.result.Status``; ``error`` if the method failed, ``ran`` for what PyTorch runs.
        reason: where nothing was found or nothing ran, why, as in ``solvers.result.Reason``; empty where it is not known.
        settings: that the schedule was found with, those that the method chose itself included, as JSON.
        time_s, peak_bytes: of the schedule, by simulation.
        bound_s: what the method proves.
        base_s, base_peak_bytes: of the step without recomputation, by simulation.
        seconds: that the method took to find its schedule.
        measured_s: median of a forward and backward pass.
        eager_s: the same of plain PyTorch, in turn with it.
        measured_ratio: median of the multiples of plain PyTorch's time in the same turn.
        measured_peak_bytes: of tensors and workspaces (CUDA: allocated), static bytes included.
        reserved_bytes: what the CUDA allocator held.
        measured_host_bytes: most on the host of what was copied there; None where the graph was given no copies.
        exactness: of loss and gradients, as in ``planner.studies.measured.Exactness``.
        gradient_error: Euclidean distance from eager's gradients, over their length.
        repeats: steps timed.
        tolerance, time_limit_s: that the method was given.
        seed: of weights, batch, and methods that draw at random.
        message: why there is no schedule, or why it does not run.
        commit, machine, versions: what it was made with and on.
    """

    model: str
    fingerprint: str
    run_by: str
    method: str
    budget: str
    budget_bytes: int | None
    status: str
    reason: str
    settings: str
    time_s: float | None
    peak_bytes: int | None
    bound_s: float | None
    base_s: float
    base_peak_bytes: int
    seconds: float | None
    measured_s: float | None
    eager_s: float | None
    measured_ratio: float | None
    measured_peak_bytes: int | None
    reserved_bytes: int | None
    measured_host_bytes: int | None
    exactness: str
    gradient_error: float | None
    repeats: int | None
    tolerance: float
    time_limit_s: float
    seed: int
    message: str
    commit: str
    machine: str
    versions: str

    @property
    def key(self) -> Key:
        """What no other row has."""
        return self.run_by, self.method, self.budget

    @property
    def measured_memory(self) -> str:
        """The measured peak as text, with what was on the host."""
        host = f", {format_bytes(self.measured_host_bytes)} on the host" if self.measured_host_bytes else ""
        return f"{format_bytes(self.measured_peak_bytes or 0)}{host}"

    @property
    def overhead(self) -> float | None:
        """Of the schedule, as a part of the step without recomputation."""
        return None if self.time_s is None else relative_gap(self.time_s, self.base_s)


COLUMNS = tuple(field.name for field in fields(Row))


class KeptRows:
    """The rows in ``rows.csv`` of a folder, all of one graph and one profile. The file is whole after every row.

    Args:
        folder: where it is.
        graph: that they are of.
        recorded: of the choices that it was given, which are among the settings of every row.

    Raises:
        OutputError: the CSV is of another graph or other choices, or of another make.
    """

    def __init__(self, folder: Path, graph: Graph, recorded: Mapping[str, object] | None = None) -> None:
        self._path = folder / "rows.csv"
        self._rows = {row.key: row for row in read_rows(self._path)}
        if any(row.fingerprint != graph.fingerprint for row in self._rows.values()):
            raise OutputError(f"{self._path} holds rows of another graph: choose another folder, or delete it")
        given = dict(recorded or {})
        for row in self._rows.values():
            settings = json.loads(row.settings or "{}")
            if given != (others := {name: settings.get(name) for name in given}):
                raise OutputError(
                    f"{self._path} holds rows made with {others}, not {given}: ask for the same, or choose another folder"
                )
        self._base_s = graph.time_s

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of `keys` that there are no rows of.

        Raises:
            OutputError: there are some, and the rows that are there are of other times of the ops: the ops were measured again.
        """
        found = [key for key in keys if key not in self._rows]
        if found and (others := {row.base_s for row in self._rows.values()} - {self._base_s}):
            raise OutputError(
                f"{self._path} holds rows of a step that takes {format_seconds(others.pop())} without recomputation, and here it "
                f"takes {format_seconds(self._base_s)}: its ops were measured again, for no graph.json is beside it; choose "
                "another folder, or delete it"
            )
        return found

    @property
    def rows(self) -> list[Row]:
        """All of them."""
        return list(self._rows.values())

    def arrange(self, keys: Sequence[Key]) -> None:
        """Put the rows of `keys` in this order, behind all others."""
        arranged = {key: self._rows[key] for key in keys if key in self._rows}
        self._rows = {key: row for key, row in self._rows.items() if key not in arranged} | arranged
        if self._rows:
            write_rows(self._path, self.rows)

    def add(self, *rows: Row) -> None:
        """Keep `rows`, all or none."""
        self._rows |= {row.key: row for row in rows}
        write_rows(self._path, self.rows)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV; none where there is no file.

    Raises:
        OutputError: it is no such CSV.
    """
    return tables.read_rows(path, Row)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the CSV, whole or not at all."""
    tables.write_csv(path, COLUMNS, map(asdict, rows))


def simulated(rows: Sequence[Row]) -> list[Row]:
    """The rows of all methods at the same budgets, by simulation; of schedules that were replayed where there are no others."""
    at_budgets = [row for row in rows if row.run_by != RunBy.TORCH and not row.budget.startswith(PEAK_OF)]
    return [row for row in at_budgets if row.run_by == RunBy.SIMULATOR] or at_budgets


def methods_of(rows: Sequence[Row]) -> list[str]:
    """The methods in `rows`: the registry's in its order, then others."""
    there = dict.fromkeys(row.method for row in rows)
    return [name for name in SOLVERS if name in there] + [name for name in there if name not in SOLVERS]


def bound_of(rows: Sequence[Row], budget_bytes: int) -> float | None:
    """The best proved bound on the step's time at `budget_bytes`: one found at a larger budget holds too."""
    proofs = [row for row in rows if row.method == OPTIMUM and row.budget_bytes and row.budget_bytes >= budget_bytes]
    bounds = [row.bound_s for row in proofs if row.bound_s is not None]
    return max(bounds, default=None)
