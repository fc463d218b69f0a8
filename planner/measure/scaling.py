"""Prediction of graphs at other sizes than those captured: amounts as polynomials in the varying sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph

Sizes = tuple[int, ...]
Floats = NDArray[np.float64]

_POINTS = (2, 3)  # per varying size: for linear amounts, and for those quadratic in a length, as in attention
_LEAST = 2  # frameworks treat a size of 1 specially


def list_sample_sizes(size: int) -> tuple[int, ...]:
    """Return three sizes to capture at: `size` and two smaller ones; raise GraphError if it is below 4."""
    low = max(_LEAST, size // 4)
    points = (size, round((size * low) ** 0.5), low)
    if size < 2 * _LEAST:
        raise GraphError(
            f"a size that varies is {size} in the batch planned for: must be at least {2 * _LEAST} to predict others"
        )
    return points


@dataclass(frozen=True)
class GraphFit:
    """A fit to graphs of the same ops at several sizes, which predicts graphs at other sizes.

    With n varying sizes, an amount is a sum of products of their powers: up to the first if there are two of each size, up to
    the square if there are three. Bytes of tensors are interpolated exactly. Times and workspaces are measured, and would
    oscillate: their coefficients are not negative, and a workspace is raised above all that were measured. An op may overwrite an
    input if it may at all sizes.

    Attributes:
        graphs: graphs by their sizes; two or three of each size in all combinations.

    Raises:
        GraphError: the graphs do not have the same ops and tensors, or are not at such sizes.
    """

    graphs: Mapping[Sizes, Graph]

    def __post_init__(self) -> None:
        axes = [sorted(set(axis)) for axis in zip(*self.graphs, strict=True)]
        counts = {len(axis) for axis in axes}
        if len(counts) != 1 or counts.isdisjoint(_POINTS) or set(product(*axes)) != set(self.graphs):
            raise GraphError(f"graphs at {list(self.graphs)} make no grid of two or three of each size")
        first, *others = self.graphs.values()
        for sizes, graph in zip(list(self.graphs)[1:], others, strict=True):
            if not has_same_ops(first, graph):
                raise GraphError(f"the step has different ops at sizes {sizes} and at {next(iter(self.graphs))}")

    def build_graph(self, sizes: Sizes) -> Graph:
        """Return the graph at `sizes`. Bytes are integers; nothing is negative. Shapes are those of the first graph."""
        at = self._compute_powers([sizes])[0]
        first = next(iter(self.graphs.values()))
        tensor_bytes = np.rint(at @ self._tensors).astype(np.int64)
        workspaces, times = np.ceil(self._workspaces @ [*at, 1.0]).astype(np.int64), self._times @ at
        tensors = tuple(replace(t, size_bytes=max(0, int(size))) for t, size in zip(first.tensors, tensor_bytes, strict=True))
        ops = tuple(
            replace(op, workspace_bytes=int(workspace), time_s=float(time_s), overwrites=pairs, requests=())
            for op, workspace, time_s, pairs in zip(first.ops, workspaces, times, self._overwrites, strict=True)
        )
        fitted_at = [list(known) for known in self.graphs]
        provenance = first.provenance.record(fitted_at_sizes=fitted_at, fitted_to_sizes=list(sizes))
        return Graph(ops, tensors, first.kept, provenance)

    def _compute_powers(self, sizes: Sequence[Sizes]) -> Floats:
        """Return the products of powers for each of `sizes`, relative to the first sizes: numbers near 1 lose no bytes."""
        relative = np.asarray(sizes, dtype=np.float64) / np.asarray(next(iter(self.graphs)))
        exponents = list(product(range(self._points), repeat=relative.shape[1]))
        return np.stack([np.prod(relative ** np.asarray(e), axis=1) for e in exponents], axis=1)

    @property
    def _points(self) -> int:
        """The number of values of each size."""
        return len({sizes[0] for sizes in self.graphs})

    @cached_property
    def _captured_powers(self) -> Floats:
        """The products of powers at the captured sizes."""
        return self._compute_powers(list(self.graphs))

    @cached_property
    def _tensors(self) -> Floats:
        """Coefficients of the bytes of each tensor, in columns."""
        amounts = np.array([[t.size_bytes for t in graph.tensors] for graph in self.graphs.values()], dtype=np.float64)
        return np.linalg.solve(self._captured_powers, amounts).astype(np.float64)

    @cached_property
    def _overwrites(self) -> list[tuple[tuple[int, int], ...]]:
        """``Op.overwrites`` that hold at all sizes, by op."""
        same = zip(*(graph.ops for graph in self.graphs.values()), strict=True)
        return [tuple(p for p in ops[0].overwrites if all(p in op.overwrites for op in ops)) for ops in same]

    @cached_property
    def _times(self) -> Floats:
        """Coefficients of the seconds of each op, in rows."""
        amounts = np.array([[op.time_s for op in graph.ops] for graph in self.graphs.values()])
        return np.array([nnls(self._captured_powers, amount)[0] for amount in amounts.T])

    @cached_property
    def _workspaces(self) -> Floats:
        """Coefficients of the workspace of each op, in rows, the last one a constant."""
        amounts = np.array([[op.workspace_bytes for op in graph.ops] for graph in self.graphs.values()], dtype=np.float64)
        rows = []
        for amount in amounts.T:
            coefficients = nnls(self._captured_powers, amount)[0]
            rows.append([*coefficients, max(0.0, (amount - self._captured_powers @ coefficients).max())])
        return np.array(rows)


def has_same_ops(one: Graph, other: Graph) -> bool:
    """Return True if two graphs differ only in sizes, times, names and overwriting."""
    return _get_structure(one) == _get_structure(other)


def _get_structure(graph: Graph) -> object:
    ops = [(op.target, op.inputs, op.outputs, op.mutates, op.phase, op.recomputable, op.random, op.replaces) for op in graph.ops]
    return ops, [(t.producers, t.kind) for t in graph.tensors], graph.kept
