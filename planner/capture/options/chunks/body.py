"""The ops of a stretch on some of its rows, as a function, and the call of it on one part after another.

Results are written to their places, and sums accumulated by the product's own kernel where it has such a form: added up by a
second op they would take another tensor of that size. Sums of half precision are accumulated in float32. Bits that are equal once
are equal by chance, so a sum over chunks always counts as rounded.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.frontend.eager_ops import get_callable
from planner.capture.options.additions import get_value
from planner.capture.options.chunks.op_by_rows import ByRows, Made, Total
from planner.capture.options.chunks.rows import RowDimensions, is_flat, is_view, take_slice
from planner.capture.options.chunks.rules import CONSTANTS, MEANS
from planner.capture.options.chunks.stretches import Stretch
from planner.capture.program.program import Path

aten = torch.ops.aten

# Variants of products that write to an output, and that accumulate into it.
_INTO: Mapping[Any, Any] = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out, aten.bmm.default: aten.bmm.out}
_ONTO: Mapping[Any, Any] = {aten.mm.default: aten.addmm.out, aten.bmm.default: aten.baddbmm.out}
# Position of the argument with the shape of the result.
_SHAPED: Mapping[Any, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    **dict.fromkeys(CONSTANTS, 1),
}
_SUM = 2  # of ``reduction``
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CombinedResult:
    """A combined result of the chunks.

    Attributes:
        node, path: position in the program, as in ``Statement.outputs``.
        made: positions of its rows, or a total.
        mean: True if it is a mean, whose weight is the next result.
        elements: number of elements of the mean; 0 otherwise.
    """

    node: fx.Node
    path: Path
    made: Made
    mean: bool = False
    elements: int = 0

    @property
    def value(self) -> torch.Tensor:
        """The fake value."""
        found: torch.Tensor = get_value(self.node, self.path)
        return found

    def make(self, like: torch.Tensor) -> torch.Tensor:
        """Return an output tensor, zeroed for totals; sums of half-precision numbers use float32."""
        value = self.value
        dtype = torch.float32 if self.made is Total.SUM and value.dtype in _HALF else value.dtype
        room = like.new_empty_strided(value.shape, value.stride(), dtype=dtype)
        return room.zero_() if isinstance(self.made, Total) else room


@dataclass(frozen=True, slots=True)
class Given:
    """An input of the chunks.

    Attributes:
        node: a node outside of the stretch.
        rows: positions of the rows that are split into chunks; None if each chunk reads the whole.
    """

    node: fx.Node
    rows: RowDimensions | None


class Body:
    """The ops of a stretch, for some of its rows.

    Attributes:
        results: their outputs that are read elsewhere.
    """

    def __init__(self, stretch: Stretch, nodes: Sequence[fx.Node], results: Sequence[CombinedResult]) -> None:
        """Initialize with `nodes`: ops of `stretch`, and the recomputed ops of the one before."""
        self.nodes, self.results = tuple(nodes), tuple(results)
        self._stretch, self._inside = stretch, frozenset(nodes)
        self.given = tuple(dict.fromkeys(self._iterate_reads()))

    def _call(self, node: fx.Node) -> ByRows | None:
        stretch = self._stretch
        return stretch.calls.get(node) or (stretch.before.calls.get(node) if stretch.before else None)

    def _get_reads(self, node: fx.Node) -> Mapping[fx.Node, RowDimensions]:
        call = self._call(node)
        assert call is not None
        return call.reads

    def _iterate_reads(self) -> Iterator[Given]:
        for node in self.nodes:
            for arg in node.all_input_nodes:
                if not self._is_inside(arg):
                    yield Given(arg, self._get_reads(node).get(arg))

    def _is_inside(self, node: fx.Node) -> bool:
        while node not in self._inside and is_view(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node in self._inside

    def of(self, count: int) -> Callable[..., Any]:
        """Return a function that computes `count` rows: its arguments are `given` and the outputs, which it writes."""
        graph = fx.Graph()
        given = {read: graph.placeholder(f"given_{i}") for i, read in enumerate(self.given)}
        rooms = {(r.node, r.path): graph.placeholder(f"room_{i}") for i, r in enumerate(self.results)}
        made: dict[fx.Node, fx.Node] = {}
        get_value = partial(self._make_value, graph, count, given, made)
        for node in self.nodes:
            reads = self._get_reads(node)
            results = [r for r in self.results if r.node is node]
            first = results[0] if results else None
            if first is not None and node.target in (_INTO if isinstance(first.made, RowDimensions) else _ONTO):
                made[node] = self._emit_product(graph, node, first, rooms[node, ()], partial(get_value, reads=reads))
                continue
            made[node] = self._emit_op(graph, node, count, partial(get_value, reads=reads))
            for result in results:
                item = made[node]
                if result.path:
                    item = graph.call_function(operator.getitem, (item, result.path[0]))
                write = aten.copy_.default if isinstance(result.made, RowDimensions) else aten.add_.Tensor
                graph.call_function(write, (rooms[node, result.path], item))
        graph.output(())
        return fx.GraphModule(torch.nn.Module(), graph).forward

    def _make_value(
        self,
        graph: fx.Graph,
        count: int,
        given: Mapping[Given, fx.Node],
        made: dict[fx.Node, fx.Node],
        arg: fx.Node,
        reads: Mapping[fx.Node, RowDimensions] = MappingProxyType({}),
    ) -> fx.Node:
        """Return the node for an argument: a `given` one, or one that is `made` for it."""
        if arg not in made:
            if not self._is_inside(arg):
                return given[Given(arg, reads.get(arg))]
            made[arg] = self._emit_op(graph, arg, count, partial(self._make_value, graph, count, given, made))
        return made[arg]

    def _emit_op(self, graph: fx.Graph, node: fx.Node, count: int, value: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Return the node for `node` on `count` rows."""
        args, named, target = list(node.args), dict(node.kwargs), MEANS.get(node.target, get_callable(node.target))
        call = self._call(node)
        if call is not None and (position := call.reduction) is not None and args[position : position + 1] != [0]:
            if position < len(args):
                args[position] = _SUM
            else:
                named["reduction"] = _SUM
        if node.target in _SHAPED:
            place = self._stretch.place(node)
            assert place is not None
            args[_SHAPED[node.target]] = place.compute_chunk_shape(node.meta["val"].shape, count, self._stretch.rows)
        given, also = fx.map_arg((tuple(args), named), value)
        made = graph.call_function(target, given, also)
        divided = call is not None and call.elements and isinstance(call.makes[0], RowDimensions)
        return graph.call_function(aten.div.Scalar, (made, call.elements)) if call is not None and divided else made

    def _emit_product(
        self, graph: fx.Graph, node: fx.Node, result: CombinedResult, room: fx.Node, value: Callable[[fx.Node], fx.Node]
    ) -> fx.Node:
        """Return the node for the product `node`, written to its output or accumulated there."""
        args, named = fx.map_arg((node.args, node.kwargs), value)
        if isinstance(result.made, RowDimensions):
            return graph.call_function(_INTO[node.target], args, {**named, "out": room})
        return graph.call_function(_ONTO[node.target], (room, *args), {"out": room})


class InChunks:
    """A stretch computed in chunks of rows.

    Attributes:
        given: inputs, in order.
        results: outputs, in order.
    """

    def __init__(self, rows: int, size: int, body: Body) -> None:
        """Initialize for `rows` rows, of which `size` are computed at a time."""
        self.given, self.results = body.given, body.results
        self._rows, self._size = rows, size
        self._bodies = {count: body.of(count) for count in {size, rows % size} - {0}}
        self._like = next(i for i, read in enumerate(body.given) if read.rows is not None)

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results; additional memory is that of one chunk."""
        made = [result.make(given[self._like]) for result in self.results]
        places = [result.made if isinstance(result.made, RowDimensions) else None for result in self.results]
        for begin in range(0, self._rows, self._size):
            count = min(self._size, self._rows - begin)
            parts = [self._take_part(value, read.rows, begin, count) for value, read in zip(given, self.given, strict=True)]
            rooms = [self._take_part(value, rows, begin, count) for value, rows in zip(made, places, strict=True)]
            self._bodies[count](*parts, *rooms)
        for position, result in enumerate(self.results):
            if result.mean:
                made[position].div_(made[position + 1])
            elif result.elements and isinstance(result.made, Total):
                made[position].div_(result.elements)
        return tuple(value.to(result.value.dtype) for value, result in zip(made, self.results, strict=True))

    def list_rounding(self, equal: Sequence[bool]) -> list[bool]:
        """Return for each result True if it may be rounded differently; see ``Comparable``.

        Sums over chunks always may: bits that are equal once are equal by chance.
        """
        rows = (isinstance(result.made, RowDimensions) and same for result, same in zip(self.results, equal, strict=True))
        return [not (result.made is Total.COUNT or same) for result, same in zip(self.results, rows, strict=True)]

    def _take_part(self, value: torch.Tensor, rows: RowDimensions | None, begin: int, count: int) -> torch.Tensor:
        if rows is None:
            return value
        each = prod(rows.list_sizes(value.shape)) // self._rows
        return take_slice(value, rows, begin * each, count * each)


def is_sliced(result: CombinedResult) -> bool:
    """Return True if parts of the rows of `result` are views that can be written."""
    return not isinstance(result.made, RowDimensions) or is_flat(result.value, result.made)
