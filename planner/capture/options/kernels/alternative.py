"""An alternative way to compute an op of the program: inputs, outputs and call.

Whether an alternative is exact is verified while profiling, on real tensors; what is neither faster nor smaller is left out by
name (``worth.py``), so that programs stay small and a step that is captured again offers the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.options.additions import get_value
from planner.capture.program.program import Path
from planner.capture.rewrites.layouts import find_in_place_random_op, read_strides
from planner.capture.rewrites.outputs import get_storage, is_same_layout
from planner.graphs.ir import Op


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that the program makes: the value of `node` at `path`, as in ``Statement.outputs``."""

    node: fx.Node
    path: Path

    @property
    def value(self) -> torch.Tensor:
        """The fake value."""
        found: torch.Tensor = get_value(self.node, self.path)
        return found


@dataclass(frozen=True, slots=True)
class Own:
    """A tensor that only optional ops make and read.

    Attributes:
        name: unique in a bundle.
        value: fake.
    """

    name: str
    value: torch.Tensor


Made = MadeTensor | Own


@dataclass(frozen=True, slots=True)
class Alternative:
    """An op to be added: a function whose results get the program's layout.

    Attributes:
        name: a word for the difference, such as ``native``.
        nodes: the ops of the program that it replaces; for a helper, the op that it is part of.
        reads: values of the program, or tensors that another op of the bundle makes.
        makes: results in the order of `compute`.
        compute: function of `reads`.
        repeatable: True if its bits are deterministic, like those of the replaced ops.
        helper: True if it only makes a part of the results, and the alternative for the op makes the rest.
        always_exact: True if its bits are those of the program, unless it is wrong.
        bundle: name shared by ops that are useful only together.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node | Own, ...]
    makes: tuple[Made, ...]
    compute: Callable[..., Sequence[torch.Tensor]]
    repeatable: bool = True
    helper: bool = False
    always_exact: bool = False
    bundle: str = ""

    def list_rounding(self, equal: Sequence[bool]) -> list[bool]:
        """Return for each result True if it is one of the program's and may be rounded differently; see ``Comparable``."""
        of_program = (isinstance(made, MadeTensor) for made in self.makes)
        return [of and not (same and self.repeatable) for of, same in zip(of_program, equal, strict=True)]

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results."""
        return tuple(_lay_out_like(value, made.value) for value, made in zip(self.compute(*given), self.makes, strict=True))


def _lay_out_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value` with the strides of `like`, in a storage of the same size."""
    if value.untyped_storage().nbytes() != like.untyped_storage().nbytes() or not is_same_layout(value, like):
        return value.new_empty_strided(like.shape, like.stride()).copy_(value)
    # The stride of a dimension with one element is arbitrary, but it influences the choice of kernels.
    return value if value.stride() == like.stride() else value.as_strided(like.shape, like.stride())


Bundle = tuple[Alternative, ...]  # alternatives that are useful only together, or a single one


class Calls:
    """The ops of a captured step, by id and by value."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._ops = {
            op.id: ReplaceableOp(node, op, tuple(MadeTensor(node, path) for _, path in call.outputs), self)
            for op, node, call in zip(capture.graph.ops, capture.nodes, capture.program.calls, strict=True)
            if node is not None
        }
        self._producers = {get_storage(result.value): op for op in self._ops.values() for result in op.results}

    def __iter__(self) -> Iterator["ReplaceableOp"]:
        return iter(self._ops.values())

    def __getitem__(self, op: int) -> "ReplaceableOp | None":
        """Return the op of this id; None for one that saves the generator's state."""
        return self._ops.get(op)

    def of(self, node: fx.Node) -> "ReplaceableOp":
        """Return the op that was captured as `node`."""
        return next(op for op in self if op.node is node)

    def find_producer(self, value: fx.Node) -> "ReplaceableOp | None":
        """Return the op that makes the memory of `value`, an argument; None if there is none."""
        made = value.meta["val"]
        return self._producers.get(get_storage(made)) if isinstance(made, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class ReplaceableOp:
    """An op of the program that alternatives are sought for."""

    node: fx.Node
    graph_op: Op
    results: tuple[MadeTensor, ...]
    calls: Calls

    def __getitem__(self, position: int) -> Any:
        """Return the argument at `position`, or its default if it is omitted."""
        if position < len(self.node.args):
            return self.node.args[position]
        argument = self.node.target._schema.arguments[position]  # type: ignore[union-attr]
        return self.node.kwargs.get(argument.name, argument.default_value)

    def get_named(self, name: str) -> Any:
        """Return the argument called `name`."""
        names = [argument.name for argument in self.node.target._schema.arguments]  # type: ignore[union-attr]
        return self[names.index(name)]

    @property
    def device(self) -> str:
        """The type of the device that it runs on."""
        return self.results[0].value.device.type

    @property
    def is_bound(self) -> bool:
        """True if the op must be executed as captured: it draws, mutates, may not be recomputed, or reads copied layouts."""
        op = self.graph_op
        return bool(
            op.random or op.mutates or not op.recomputable or read_strides(self.node) or find_in_place_random_op(self.node)
        )

    def build_alternative(self, name: str, target: Callable[..., Any], *arguments: Any, **more: Any) -> Alternative:
        """Return an alternative that calls `target` with `arguments`, values of the program among them, for all results of the
        op.

        Args:
            more: other attributes of ``Alternative``.
        """
        return Alternative(
            name, (self.node,), list_reads(arguments), self.results, make_call(target, arguments, self.results), **more
        )


def list_reads(arguments: Any) -> tuple[fx.Node, ...]:
    """Return the values of the program among `arguments`, each once."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(arguments, lambda node: found.setdefault(node))
    return tuple(found)


def make_call(
    target: Callable[..., Any], arguments: tuple[Any, ...], makes: Sequence[MadeTensor]
) -> Callable[..., list[torch.Tensor]]:
    """Return a function of the program's values in `arguments` that calls `target` and returns the results `makes`."""
    return partial(_compute, target, arguments, list_reads(arguments), [made.path[0] if made.path else None for made in makes])


def _compute(
    target: Callable[..., Any], arguments: Any, reads: Sequence[fx.Node], positions: Sequence[Any], *given: torch.Tensor
) -> list[torch.Tensor]:
    value = dict(zip(reads, given, strict=True))
    result = target(*fx.map_arg(arguments, value.__getitem__))
    return [result if position is None else result[position] for position in positions]
