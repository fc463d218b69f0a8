"""Requests to the rules of chunked ops, and their answers: which arguments are read by rows, and the form of the results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Any

from torch import fx

from planner.capture.options.chunks.rows import NotByRowsError, RowDimensions


class Total(Enum):
    """A result that is summed over all rows."""

    SUM = auto()
    PRODUCT = auto()  # a product of matrices that contracts the rows
    COUNT = auto()  # of rows, or of unit weights: exact in any order


Made = RowDimensions | Total


@dataclass(frozen=True, slots=True)
class ByRows:
    """An op that is computed by rows.

    Attributes:
        reads: positions of rows, by argument; other arguments are read whole.
        makes: form of each item of the value, or of the single tensor.
        mean: the first item is a mean, whose weight is the second one: the chunks make the sum.
        elements: number of elements of all rows that the result is divided by; the chunks do not divide. 0 without division.
        reduction: position of the argument that selects division; None if the op always divides.
    """

    reads: Mapping[fx.Node, RowDimensions]
    makes: tuple[Made, ...]
    mean: bool = False
    elements: int = 0
    reduction: int | None = None


@dataclass(frozen=True, slots=True)
class OpByRows:
    """An op with the known positions of rows in its arguments.

    Attributes:
        known: positions of rows, by argument.
        inside: arguments that are made by rows: they have the rows nowhere else.
    """

    node: fx.Node
    rows: int
    known: Mapping[fx.Node, RowDimensions]
    inside: frozenset[fx.Node]
    found: dict[fx.Node, RowDimensions] = field(default_factory=dict)

    def get_arg(self, position: int) -> Any:
        """Return the argument at `position`; None if it is omitted."""
        return self.node.args[position] if position < len(self.node.args) else None

    def get_shape(self, arg: fx.Node) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return tuple(arg.meta["val"].shape)

    def get_rows(self, *args: object) -> RowDimensions:
        """Return the position of the rows in the first of `args` where it is known; raise NotByRowsError if it is for none."""
        for arg in args:
            if isinstance(arg, fx.Node) and arg in self.known:
                return self.known[arg]
        raise NotByRowsError

    def require(self, arg: object, rows: RowDimensions) -> None:
        """Require that `arg` is read with the rows at this position; raise NotByRowsError if it cannot be."""
        if not isinstance(arg, fx.Node) or self.known.get(arg, rows) != rows or self.found.setdefault(arg, rows) != rows:
            raise NotByRowsError
        if rows.last >= len(self.get_shape(arg)) or prod(rows.list_sizes(self.get_shape(arg))) % self.rows:
            raise NotByRowsError

    def require_whole(self, *args: object) -> None:
        """Require that `args` are read whole."""
        if any(isinstance(arg, fx.Node) and arg in self.inside for arg in args):
            raise NotByRowsError

    def build(self, *made: Made, mean: bool = False, elements: int = 0, reduction: int | None = None) -> ByRows:
        """Return the op with these results. Raise if it reads an argument made inside that was not requested."""
        if any(arg in self.inside and arg not in self.found for arg in self.node.all_input_nodes):
            raise NotByRowsError
        return ByRows(dict(self.found), made, mean, elements, reduction)
