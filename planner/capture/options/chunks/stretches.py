"""Stretches of a step that can be computed by rows, between matrix products that make rows long and ops that reduce them.

A stretch begins with a product whose rows are much longer than those it reads. All readers of these long rows in the same pass
belong to it, and the readers of their long rows, until only short rows and sums over all rows are left: then no tensor of long
rows need be in memory as a whole. In the backward pass, readers of the forward pass's long rows begin a second stretch. If a
reader of long rows is not known to be by rows, there is no such stretch.

One op without a rule between the product and the sums means that there is no stretch: a part of it would still have a long tensor
in memory. The largest product is tried first, with as many rows as possible, and stretches never share ops, so a smaller one
inside is not offered as well. This has to work on any model: names of modules are not looked at.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.options.additions import iterate_made_values
from planner.capture.options.chunks.op_by_rows import ByRows, OpByRows
from planner.capture.options.chunks.rows import NotByRowsError, RowDimensions, find_rows_behind, is_view, map_through_view
from planner.capture.options.chunks.rules import CONSTANTS, find_row_form
from planner.capture.rewrites.layouts import find_in_place_random_op, read_strides
from planner.capture.rewrites.outputs import get_fake
from planner.graphs.ir import Phase

aten = torch.ops.aten

# Products of matrices, with the position of the first one.
_PRODUCTS: Mapping[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.baddbmm.default: 1}
_LONG = 1.25  # times the row length of the first product's input
# A stretch none of whose ops holds a fourth of the largest op's memory does not determine the peak.
_SHARE = 0.25


@dataclass(slots=True)
class Stretch:
    """The ops of one pass that are computed by rows.

    Attributes:
        longest: most elements of a short row.
        before: the stretch of the forward pass whose values it reads; None for one of the forward pass.
        calls: row-by-row form of each op.
    """

    rows: int
    longest: float
    before: "Stretch | None" = None
    ops: dict[int, fx.Node] = field(default_factory=dict)
    calls: dict[fx.Node, ByRows] = field(default_factory=dict)

    def place(self, node: fx.Node) -> RowDimensions | None:
        """Return the position of the rows in the value of `node`; None if it is made outside, or summed before.

        Raises:
            NotByRowsError: it is summed here, or a view changes the rows.
        """
        source, item = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, 0)
        assert isinstance(source, fx.Node) and isinstance(item, int)
        if source in self.calls:
            if not isinstance(made := self.calls[source].makes[item], RowDimensions):
                raise NotByRowsError
            return made
        if self.before is not None and source in self.before.calls:
            return made if isinstance(made := self.before.calls[source].makes[item], RowDimensions) else None
        if not is_view(node):
            return None
        base = node.args[0]
        assert isinstance(base, fx.Node)
        place = self.place(base)
        return None if place is None else map_through_view(node, place, self.rows)

    def has_long_rows(self, node: fx.Node, item: int, value: torch.Tensor) -> bool:
        """Return True if `value`, item `item` of the op `node`, has long rows."""
        return value.numel() / self.rows > self.longest and isinstance(self.calls[node].makes[item], RowDimensions)


class StretchFinder:
    """A search for stretches in a capture."""

    def __init__(self, capture: Capture) -> None:
        self.graph, self.capture = capture.graph, capture
        self._values = dict(iterate_made_values(capture))
        self.op_of = {node: op.id for op, node in zip(capture.graph.ops, capture.nodes, strict=True) if node is not None}

    def find(self) -> list[tuple[Stretch, Stretch | None]]:
        """Return the stretches of the forward pass, each with that of its backward pass, without shared ops."""
        found: list[tuple[Stretch, Stretch | None]] = []
        taken: set[int] = set()
        most = max(self._count_held(op.id) for op in self.graph.ops)
        products = [node for node, op in self.op_of.items() if node.target in _PRODUCTS]
        for node in sorted(products, key=lambda node: -get_fake(node).numel()):  # the longest rows first
            op = self.op_of[node]
            if op in taken or self.graph.ops[op].phase is not Phase.FORWARD:
                continue
            pair = self._find_from(node)
            if pair is None or max(self._count_held(p) for stretch in pair if stretch for p in stretch.ops) < _SHARE * most:
                continue
            ops = {p for stretch in pair if stretch for p in stretch.ops}
            if taken.isdisjoint(ops):
                taken |= ops
                found.append(pair)
        return sorted(found, key=lambda pair: min(pair[0].ops))

    def _count_held(self, op: int) -> int:
        """Return the bytes of `op`'s inputs and outputs that may be freed."""
        node, tensors = self.graph.ops[op], self.graph.tensors
        freed = {t for t in (*node.inputs, *node.outputs) if not tensors[t].static and t not in self.graph.kept}
        return sum(tensors[t].size_bytes for t in freed)

    def _find_from(self, node: fx.Node) -> tuple[Stretch, Stretch | None] | None:
        """Return the stretch from the product `node`, if possible with a backward pass and as many rows as possible; else
        None.
        """
        forward_only = None
        for rows, known in self._iterate_beginnings(node):
            longest = _LONG * max(get_fake(arg).numel() for arg in known) / rows
            if get_fake(node).numel() / rows <= longest:
                continue
            forward = Stretch(rows, longest)
            try:
                self._close(forward, self.op_of[node], known)
            except NotByRowsError:
                continue
            if not (begin := self._find_backward_readers(forward)):
                return forward, None
            backward = Stretch(rows, longest, forward)
            try:
                for op in begin:
                    self._close(backward, op, {})
            except NotByRowsError:
                forward_only = forward_only or (forward, None)
                continue
            return forward, backward
        return forward_only

    def _iterate_beginnings(self, node: fx.Node) -> Iterable[tuple[int, Mapping[fx.Node, RowDimensions]]]:
        """Yield the possible numbers of rows of the product `node`, and their positions in its arguments."""
        left, right = node.args[_PRODUCTS[node.target] :][:2]
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        batched = get_fake(left).dim() == 3
        if batched and get_fake(left).shape[0] == 1:
            yield get_fake(left).shape[1], {left: RowDimensions(1, 1)}
            return
        first = int(get_fake(left).shape[0])
        seen_as = [*filter(is_view, node.users), *(left.all_input_nodes if is_view(left) else ())]
        values = [value for n in seen_as if isinstance(value := n.meta.get("val"), torch.Tensor)]
        parts = {int(value.shape[0]) for value in values if value.dim() > 2}
        for rows in (first, *sorted((p for p in parts if 1 < p < first and first % p == 0), reverse=True)):
            if rows > 1:
                yield rows, {left: RowDimensions(0, 0), **({right: RowDimensions(0, 0)} if batched else {})}

    def _find_backward_readers(self, forward: Stretch) -> list[int]:
        readers = {op for t in self.find_long(forward) for op in self.graph.consumers[t]}
        return sorted(op for op in readers if self.graph.ops[op].phase is Phase.BACKWARD)

    def find_long(self, stretch: Stretch, ops: Iterable[int] | None = None) -> list[int]:
        """Return the tensors of long rows made by `ops` of `stretch`, by default all its ops."""
        found = []
        for op in stretch.ops if ops is None else ops:
            for item, t in enumerate(self.graph.ops[op].outputs):
                if stretch.has_long_rows(stretch.ops[op], item, self._values[t]):
                    found.append(t)
        return found

    def _close(self, stretch: Stretch, begin: int, known: Mapping[fx.Node, RowDimensions]) -> None:
        """Add to `stretch` the op `begin`, all readers of long rows in its pass, and products that make long rows they read."""
        phase = self.graph.ops[begin].phase
        waiting = [(begin, known)]
        while waiting:
            op, known = waiting.pop()
            if op not in stretch.ops:
                self._join(stretch, op, known)
                joined = [op, *self._join_producers(stretch, op)]
                long = self.find_long(stretch, joined)
                # Who gets a long tensor gets all of it, so that it has to be in memory as a whole.
                if not self.graph.kept.isdisjoint(long):
                    raise NotByRowsError
                waiting += [(p, {}) for t in long for p in self.graph.consumers[t] if self.graph.ops[p].phase is phase]
        self._check(stretch)

    def _join(self, stretch: Stretch, op: int, known: Mapping[fx.Node, RowDimensions]) -> None:
        node, what = self.capture.nodes[op], self.graph.ops[op]
        if (
            node is None
            or not what.recomputable
            or what.random
            or what.mutates
            or read_strides(node)
            or find_in_place_random_op(node)
        ):
            raise NotByRowsError
        places = {arg: place for arg in node.all_input_nodes if (place := stretch.place(arg)) is not None}
        call = find_row_form(OpByRows(node, stretch.rows, {**known, **places}, frozenset(places)))
        stretch.ops[op] = node
        stretch.calls[node] = call

    def _join_producers(self, stretch: Stretch, reader: int) -> list[int]:
        """Add to `stretch` the producers of the long rows that `reader` reads: products, constants, and ops read only inside."""
        joined = []
        for arg, rows in stretch.calls[stretch.ops[reader]].reads.items():
            value = arg
            while is_view(value) and isinstance(value.args[0], fx.Node):
                value = value.args[0]
            op = self.op_of.get(value)
            inside = value in stretch.calls or (stretch.before is not None and value in stretch.before.calls)
            if op is None or inside or self.graph.ops[op].phase is not self.graph.ops[reader].phase:
                continue
            if not isinstance(value.meta["val"], torch.Tensor) or get_fake(value).numel() / stretch.rows <= stretch.longest:
                continue
            if self._join_producer(stretch, op, arg, rows):
                joined += [op, *self._join_producers(stretch, op)]
        return joined

    def _join_producer(self, stretch: Stretch, op: int, arg: fx.Node, rows: RowDimensions) -> bool:
        """Add `op` to `stretch` if it makes the `rows` that are read as `arg`; return whether it does."""
        value = self.capture.nodes[op]
        assert value is not None
        if value.target in CONSTANTS and value is arg:
            stretch.ops[op], stretch.calls[value] = value, ByRows({}, (rows,))
            return True
        read_inside = all(p in stretch.ops for t in self.graph.ops[op].outputs for p in self.graph.consumers[t])
        if value.target not in _PRODUCTS and not read_inside:
            return False
        left = value.args[_PRODUCTS.get(value.target, 0)]
        if not isinstance(left, fx.Node) or not isinstance(left.meta["val"], torch.Tensor):
            return False
        try:
            self._join(stretch, op, {left: find_rows_behind(tuple(get_fake(left).shape), 1, stretch.rows)})
            if stretch.place(arg) == rows:
                return True
        except NotByRowsError:
            pass
        stretch.ops.pop(op, None)
        stretch.calls.pop(value, None)
        return False

    def _check(self, stretch: Stretch) -> None:
        """Raise NotByRowsError unless rows are read by rows, and nothing outside reads long ones, or others before the end."""
        last = max(stretch.ops)
        for op, node in stretch.ops.items():
            reads = stretch.calls[node].reads
            inside = (arg for arg in node.all_input_nodes if stretch.place(arg) is not None)
            if node.target not in CONSTANTS and any(arg not in reads for arg in inside):
                raise NotByRowsError
            long = self.find_long(stretch, [op])
            for t in self.graph.ops[op].outputs:
                readers = [p for p in self.graph.consumers[t] if p not in stretch.ops]
                readers = [p for p in readers if self.graph.ops[p].phase is self.graph.ops[op].phase]
                if any(p < last for p in readers) or (readers and t in long):
                    raise NotByRowsError
