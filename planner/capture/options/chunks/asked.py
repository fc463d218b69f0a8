"""What is asked of an op, and what it answers: which of its arguments it reads row by row, and what it makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Any

from torch import fx

from planner.capture.options.chunks.rows import NotByRowsError, Rows


class Total(Enum):
    """A result that is added up over all rows."""

    SUM = auto()
    PRODUCT = auto()  # a product of matrices that contracts the rows
    COUNT = auto()  # of rows, or of weights 1: exact in any order


Made = Rows | Total


@dataclass(frozen=True, slots=True)
class ByRows:
    """An op row by row.

    Attributes:
        reads: for each argument that has the rows, where; what is not there is read whole.
        makes: for each item of the value, what it is; of a value that is one tensor, for that.
        mean: the first item is the mean that the second one is the weight of: the chunks make the sum.
        elements: what is made is divided by so many, those of all rows: the chunks make it undivided; 0 for not divided.
        reduction: position of the argument that says whether it is divided; None where the op itself does.
    """

    reads: Mapping[fx.Node, Rows]
    makes: tuple[Made, ...]
    mean: bool = False
    elements: int = 0
    reduction: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """An op, of which some arguments are known to have the rows.

    Attributes:
        node: the op.
        rows: how many there are.
        known: where the rows are in arguments.
        inside: those that are made row by row: they have the rows nowhere else.
    """

    node: fx.Node
    rows: int
    known: Mapping[fx.Node, Rows]
    inside: frozenset[fx.Node]
    found: dict[fx.Node, Rows] = field(default_factory=dict)

    def arg(self, position: int) -> Any:
        """The argument at `position`, None where it is left out."""
        return self.node.args[position] if position < len(self.node.args) else None

    def shape(self, arg: fx.Node) -> tuple[int, ...]:
        """Of an argument."""
        return tuple(arg.meta["val"].shape)

    def at(self, *args: object) -> Rows:
        """Where the rows are in the first of `args` that is known to have them.

        Raises:
            NotByRowsError: none is.
        """
        for arg in args:
            if isinstance(arg, fx.Node) and arg in self.known:
                return self.known[arg]
        raise NotByRowsError

    def want(self, arg: object, rows: Rows) -> None:
        """`arg` is to be read with the rows there.

        Raises:
            NotByRowsError: it has them elsewhere, or is none that has.
        """
        if not isinstance(arg, fx.Node) or self.known.get(arg, rows) != rows or self.found.setdefault(arg, rows) != rows:
            raise NotByRowsError
        if rows.last >= len(self.shape(arg)) or prod(rows.sizes(self.shape(arg))) % self.rows:
            raise NotByRowsError

    def want_whole(self, *args: object) -> None:
        """`args` are to be read whole."""
        if any(isinstance(arg, fx.Node) and arg in self.inside for arg in args):
            raise NotByRowsError

    def makes(self, *made: Made, mean: bool = False, elements: int = 0, reduction: int | None = None) -> ByRows:
        """The op with these results. Arguments inside that were not asked for are read by rows, which the rule did not expect."""
        if any(arg in self.inside and arg not in self.found for arg in self.node.all_input_nodes):
            raise NotByRowsError
        return ByRows(dict(self.found), made, mean, elements, reduction)
