"""Nodes of a joint graph as calls: targets and arguments."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graphs.errors import TraceError
from planner.capture.frontend.eager_ops import called
from planner.capture.frontend.source_lines import location, traced_line
from planner.capture.program.program import Argument, Call, Path, Statement
from planner.capture.rewrites.batch_norms import ignored_inputs, without_statistics
from planner.capture.rewrites.layouts import copy_with_strides, empty_with_strides, in_place_random_op, read_strides
from planner.capture.rewrites.reproducible_random import with_generator_argument


class References:
    """A converter of nodes to calls.

    Attributes:
        values: the value of each visited node.
    """

    def __init__(self) -> None:
        self.values: dict[fx.Node, Argument] = {}

    def view(self, node: fx.Node) -> Argument:
        """Return the call that makes a view, or the base if the view is the same."""
        base = node.args[0]
        if node.target is torch.ops.aten.detach.default:
            return self._value(base)  # nothing is recorded when a program runs
        if node.target is torch.ops.aten.t.default and isinstance(base, fx.Node) and base.target is torch.ops.aten.t.default:
            return self._value(base.args[0])
        return self.call(node)

    def call(self, node: fx.Node) -> Call:
        """Return the call of `node`."""
        # An ignored input may be freed when the op is executed; only static ones cannot.
        gone = {arg for arg in ignored_inputs(node) if arg.op != "placeholder"}
        strides = read_strides(node)
        args = [None if isinstance(arg, fx.Node) and arg in gone else self._value(arg, strides) for arg in node.args]
        kwargs = {key: self._value(value, strides) for key, value in node.kwargs.items()}
        target = called(node.target)
        if drawn := in_place_random_op(node):
            target, args[0] = drawn[0], Call(empty_with_strides, (args[0], tuple(drawn[1])))
        return Call(target, tuple(args), kwargs)

    def after_forward(self, node: fx.Node, outputs: Sequence[tuple[int, Path]]) -> Statement | None:
        """Return the statement that makes the `outputs` of `node` after the forward pass; None if that is ``call``."""
        if not ignored_inputs(node):
            return None
        target, args, gone = without_statistics(node)
        call = Call(target, tuple(map(self._value, args)), {key: self._value(value) for key, value in node.kwargs.items()})
        return Statement(call, tuple((tensor, path) for tensor, path in outputs if path not in gone))

    def with_generator_argument(self, node: fx.Node, generator: torch.Generator) -> Call:
        """Return the call of `node` that draws from a user's generator."""
        if (drawing := self.redraw(node, generator)) is None:
            raise TraceError(
                f"{location(traced_line(node.meta.get('stack_trace')))} gives {node.target} a generator, which it does not take"
            )
        return drawing

    def redraw(self, node: fx.Node, generator: torch.Generator) -> Call | None:
        """Return the call of `node` with a generator argument; None if its kernel takes none."""
        if (target := with_generator_argument(node)) is None:
            return None
        call = self.call(node)
        return Call(call.target if in_place_random_op(node) else target, call.args, {**call.kwargs, "generator": generator})

    def _value(self, arg: object, strides: Mapping[fx.Node, Sequence[int]] = MappingProxyType({})) -> Argument:
        match arg:
            case fx.Node() if arg in strides:
                return Call(copy_with_strides, (self.values[arg], tuple(strides[arg])))
            case fx.Node():
                return self.values[arg]
            case list() | tuple():
                return [self._value(each, strides) for each in arg]
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise TraceError(f"the step depends on the size {arg}, which is not known before it runs: shapes must be static")
        return arg


def is_laid_out(value: Any) -> bool:
    """Return True if `value` is an argument that is copied to another layout for the op that reads it."""
    return isinstance(value, Call) and (value.target is copy_with_strides or any(map(is_laid_out, value.args)))
