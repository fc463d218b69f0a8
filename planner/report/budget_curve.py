"""Reader of the trade-off curve that ``planner curve -o`` wrote."""

import csv
import os
from dataclasses import dataclass
from pathlib import Path

from graphs.errors import FormatError


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The known overhead and bound at one budget.

    Attributes:
        budget_bytes: the budget.
        overhead: overhead of the best schedule; None if none is known.
        bound_overhead: lower bound on the overhead; None if unknown.
        options: the graph options it was solved with, "" for none.
    """

    budget_bytes: int
    overhead: float | None
    bound_overhead: float | None
    options: str


def read_curve(path: str | os.PathLike[str]) -> tuple[CurvePoint, ...]:
    """Return the points in the file `path`, in order of budget.

    Raises:
        FormatError: it is no curve.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            points = [_point(row) for row in csv.DictReader(file)]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise FormatError(f"{path} is not a curve that planner curve -o wrote: {type(error).__name__} {error}") from error
    if not points:
        raise FormatError(f"{path} holds no points of a curve: planner curve model.json -o curve.csv writes one")
    return tuple(sorted(points, key=lambda point: (point.options, point.budget_bytes)))


def _point(row: dict[str, str]) -> CurvePoint:
    overhead, bound = (float(row[name]) if row[name] else None for name in ("overhead", "bound_overhead"))
    return CurvePoint(int(row["budget_bytes"]), overhead, bound, row.get("options") or "")
