"""Nodes of a joint graph as calls: targets and arguments.

A view is a call that is repeated at every reader, so that no name but the base's holds the storage, and freeing means deleting
one name. That costs Python time for each reader; ``planner.native`` makes each view once.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from planner.capture.frontend.eager_ops import get_callable
from planner.capture.program.program import Argument, Call, Path, Statement
from planner.capture.rewrites.batch_norms import build_without_statistics, find_ignored_inputs
from planner.capture.rewrites.hook_calls import HOOK
from planner.capture.rewrites.layouts import allocate_with_strides, copy_with_strides, find_in_place_random_op, read_strides
from planner.capture.rewrites.reproducible_random import find_function_with_generator
from planner.capture.source_lines import format_node
from planner.graphs.errors import TraceError


class References:
    """A converter of nodes to calls.

    Args:
        values: the value of each visited node.
        layouts: strides of inputs, by node that should read them so, beside those that are recorded.
    """

    def __init__(
        self,
        values: Mapping[fx.Node, Argument] = MappingProxyType({}),
        layouts: Mapping[fx.Node, Mapping[fx.Node, Sequence[int]]] = MappingProxyType({}),
    ) -> None:
        self.values, self._layouts = dict(values), layouts

    def view(self, node: fx.Node) -> Argument:
        """Return the call that makes a view, or the base if the view is the same."""
        base = node.args[0]
        if node.target is torch.ops.aten.detach.default:
            return self._build_value(base)  # nothing is recorded when a program runs
        if node.target is torch.ops.aten.t.default and isinstance(base, fx.Node) and base.target is torch.ops.aten.t.default:
            return self._build_value(base.args[0])
        return self.call(node)

    def call(self, node: fx.Node) -> Call:
        """Return the call of `node`."""
        # An ignored input may be freed when the op is executed; only static ones cannot.
        gone = {arg for arg in find_ignored_inputs(node) if arg.op != "placeholder"}
        strides = self._read_strides(node)
        args = [None if isinstance(arg, fx.Node) and arg in gone else self._build_value(arg, strides) for arg in node.args]
        kwargs = {key: self._build_value(value, strides) for key, value in node.kwargs.items()}
        target = get_callable(node.target)
        if HOOK in node.meta:
            target, args = node.meta[HOOK], args[:2]
        if drawn := find_in_place_random_op(node):
            target, args[0] = drawn[0], Call(allocate_with_strides, (args[0], tuple(drawn[1])))
        return Call(target, tuple(args), kwargs)

    def build_again(self, node: fx.Node, outputs: Sequence[tuple[int, Path]]) -> Statement | None:
        """Return the statement that makes the `outputs` of `node` without what it writes or ignores; None if that is ``call``."""
        if not find_ignored_inputs(node):
            return None
        target, args, gone = build_without_statistics(node)
        strides = self._read_strides(node)
        kwargs = {key: self._build_value(value, strides) for key, value in node.kwargs.items()}
        call = Call(target, tuple(self._build_value(arg, strides) for arg in args), kwargs)
        return Statement(call, tuple((tensor, path) for tensor, path in outputs if path not in gone))

    def _read_strides(self, node: fx.Node) -> Mapping[fx.Node, Sequence[int]]:
        return {**read_strides(node), **self._layouts.get(node, {})}

    def build_with_generator(self, node: fx.Node, generator: torch.Generator) -> Call:
        """Return the call of `node` that draws from a user's generator."""
        if (drawing := self.build_redraw(node, generator)) is None:
            raise TraceError(f"{format_node(node)} gives {node.target} a generator, which it does not take")
        return drawing

    def build_redraw(self, node: fx.Node, generator: torch.Generator) -> Call | None:
        """Return the call of `node` with a generator argument; None if its kernel takes none."""
        if (target := find_function_with_generator(node)) is None:
            return None
        call = self.call(node)
        return Call(call.target if find_in_place_random_op(node) else target, call.args, {**call.kwargs, "generator": generator})

    def _build_value(self, arg: object, strides: Mapping[fx.Node, Sequence[int]] = MappingProxyType({})) -> Argument:
        match arg:
            case fx.Node() if arg in strides:
                return Call(copy_with_strides, (self.values[arg], tuple(strides[arg])))
            case fx.Node():
                return self.values[arg]
            case list() | tuple():
                return [self._build_value(each, strides) for each in arg]
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise TraceError(f"the step depends on the size {arg}, which is not known before it runs: shapes must be static")
        return arg


def is_laid_out(value: Any) -> bool:
    """Return True if `value` is an argument that is copied to another layout for the op that reads it."""
    return isinstance(value, Call) and (value.target is copy_with_strides or any(map(is_laid_out, value.args)))
