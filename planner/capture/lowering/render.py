"""Ops as Python source: what a program calls, with which arguments."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from graphs.errors import TraceError
from planner.capture.frontend.eager_ops import called
from planner.capture.frontend.source_lines import location, traced_line
from planner.capture.rewrites.batch_norms import ignored_inputs
from planner.capture.rewrites.layouts import copy_with_strides, empty_with_strides, in_place_random_op, read_strides
from planner.capture.rewrites.reproducible_random import with_generator_argument

LAID_OUT = "laid_out"  # what lays an argument out anew is called so


class Renderer:
    """Writes calls of ops, and keeps what they name.

    Attributes:
        namespace: what the source names.
        expressions: for each node that has been reached, what stands for its value.
    """

    def __init__(self, namespace: dict[str, object]) -> None:
        self.namespace = namespace
        self.expressions: dict[fx.Node, str] = {}
        self._names: dict[object, str] = {}

    def view(self, node: fx.Node) -> str:
        """The call that makes a view, or the base where it is the same."""
        base = node.args[0]
        if node.target is torch.ops.aten.detach.default:
            return self._render(base)  # nothing is recorded where a program runs
        if node.target is torch.ops.aten.t.default and isinstance(base, fx.Node) and base.target is torch.ops.aten.t.default:
            return self._render(base.args[0])
        return self.call(node)

    def call(self, node: fx.Node) -> str:
        """The call of `node`."""
        # An ignored input may be gone by the time the op is executed; only the static ones cannot.
        gone = {arg for arg in ignored_inputs(node) if arg.op != "placeholder"}
        strides = read_strides(node)
        args = ["None" if isinstance(arg, fx.Node) and arg in gone else self._render(arg, strides) for arg in node.args]
        args += [f"{key}={self._render(value, strides)}" for key, value in node.kwargs.items()]
        target, name = called(node.target), str(node.target)
        if drawn := in_place_random_op(node):
            target, name, args[0] = drawn[0], str(drawn[0]), self._render_filled(args[0], drawn[1])
        return f"{self._name(target, name.replace('.', '_'))}({', '.join(args)})"

    def _render_filled(self, like: str, strides: Sequence[int]) -> str:
        return f"{self._name(empty_with_strides, 'to_be_filled')}({like}, {tuple(strides)})"

    def with_generator_argument(self, node: fx.Node, generator: torch.Generator) -> str:
        """The call of `node` that draws from a generator of the user's own."""
        drawing = self.redraw(node, self._name(generator, f"given_generator_{len(self._names)}"))
        if drawing is None:
            raise TraceError(
                f"{location(traced_line(node.meta.get('stack_trace')))} gives {node.target} a generator, which it does not take"
            )
        return drawing

    def redraw(self, node: fx.Node, generator: str = "own_generator") -> str | None:
        """The call of `node` with a generator to draw from, by its name."""
        target, drawn = with_generator_argument(node), in_place_random_op(node)
        if target is None:
            return None
        args = [self._render(arg) for arg in node.args]
        if drawn:
            target, args[0] = drawn[0], self._render_filled(args[0], drawn[1])
        args += [f"{key}={self._render(value)}" for key, value in node.kwargs.items() if key != "generator"]
        name = getattr(target, "__name__", str(target)).replace(".", "_")
        return f"{self._name(target, f'{name}_from')}({', '.join((*args, f'generator={generator}'))})"

    def _render(self, arg: object, strides: Mapping[fx.Node, Sequence[int]] = MappingProxyType({})) -> str:
        match arg:
            case fx.Node() if arg in strides:
                return f"{self._name(copy_with_strides, LAID_OUT)}({self.expressions[arg]}, {tuple(strides[arg])})"
            case fx.Node():
                return self.expressions[arg]
            case list() | tuple():
                return f"[{', '.join(self._render(item, strides) for item in arg)}]"
            case None | bool() | int() | str():
                return repr(arg)
            case float() if arg == arg and abs(arg) != float("inf"):
                return repr(arg)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise TraceError(f"the step depends on the size {arg}, which is not known before it runs: shapes must be static")
        return self._name(arg, f"const_{len(self._names)}")

    def _name(self, value: object, wanted: str) -> str:
        if value not in self._names:
            self._names[value] = wanted
            self.namespace[wanted] = value
        return self._names[value]
