"""Numbers of Python that stay inputs of a captured step: it reads them each time, as eager PyTorch does.

Dynamo captures such a number as a symbol, and AOTAutograd likewise what ops take of it. The shape environment would decide
conditions on symbols by their values and simplify expressions, which rounds differently. So expressions are kept as the calls of
the user's code, and each condition that a capture has decided becomes an outcome that must stay as it was. Where a number is
needed itself (as a size, or by an op that takes no symbol), that number must stay as it was.

Before, a new value of a number took a new capture: half a second for an MLP, six seconds for a GPT-2 of four layers. Known
weaknesses: numbers are inputs with eager PyTorch's kernels only, and neither with branches on data nor with options other than
in-place.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx

from planner.capture.frontend.effects import Effect
from planner.capture.guards.names import Scope, build_accessor, make_readable
from planner.capture.program.numbers import Number, StepNumbers
from planner.capture.rewrites.outputs import list_tensors
from planner.capture.rewrites.scalar_gradients import capture_gradients_with_symbols
from planner.torch_private import capture as private
from planner.torch_private.core import DimDynamic, ShapeEnv, get_proxy_mode, track_tensor_tree
from planner.torch_private.patches import wrap

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Functions of symbols and numbers, and those that the user's code calls.
_PYTHON: dict[object, Callable[..., Any]] = {
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_not: operator.not_,
    **{vars(torch)[name]: getattr(math, name.removeprefix("_sym_")) for name in vars(torch) if name.startswith("_sym_")},
}
_COMPARISONS: dict[type[sympy.Basic], Callable[..., Any]] = {
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}
_MODULES = {"_operator", "builtins", "math"}


class NotSymbolicError(Exception):
    """Raised if a step cannot be captured with symbols for its numbers."""


class SymbolicNumbers:
    """The numbers of one capture that stay inputs.

    Args:
        names: names of the values, as Dynamo writes them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self._env: ShapeEnv | None = None
        self._count = count()  # of symbols
        self._forget()

    def _forget(self) -> None:
        """Begin again, as a capture does that is restarted."""
        self._sources: list[str] = []
        self._graph = fx.Graph()  # of the user's calls
        self._copies: dict[fx.Node, fx.Node] = {}  # by nodes of Dynamo's graph
        self._nodes: dict[sympy.Basic, fx.Node] = {}  # by expressions
        self._sized: set[fx.Node] = set()  # nodes of Dynamo's graph that need the numbers themselves
        self._decided: dict[fx.Node, object] = {}
        self._numbers: list[fx.Node] = []

    @contextmanager
    def take(self) -> Iterator[None]:
        """Make Dynamo capture the numbers as symbols."""
        create_or_wrap = partial(self._create_or_wrap, private.VariableBuilder.wrap_literal)
        # By types; Dynamo caches it.
        wraps = {**private.VariableBuilder._type_dispatch(), int: create_or_wrap, float: create_or_wrap}
        with (
            patch.object(private.VariableBuilder, "_type_dispatch", lambda *_: wraps),
            wrap(private.VariableBuilder, "wrap_literal", self._create_or_wrap),
            wrap(private.dynamo_utils, "run_node", self._run_node),
            self.follow(),
        ):
            yield

    def _create_or_wrap(self, wrap_literal: Callable[..., Any], builder: Any, value: Any) -> Any:
        is_named = type(value) in (int, float) and math.isfinite(value) and private.get_source_name(builder.source) in self.names
        return self._create_input(builder, value) if is_named else wrap_literal(builder, value)

    def _run_node(self, run: Callable[..., Any], tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        return self._run(lambda *given: run(tracer, node, *given, module), tracer.shape_env, node, args, kwargs)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Record the conditions on the numbers that are decided."""
        with wrap(ShapeEnv, "evaluate_expr", self._record_or_evaluate), capture_gradients_with_symbols():
            yield

    def _record_or_evaluate(
        self, evaluate: Callable[..., Any], env: Any, expression: sympy.Basic, hint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        symbols = expression.free_symbols
        if env is not self._env or symbols.isdisjoint(self._nodes):
            return evaluate(env, expression, hint, *args, **kwargs)
        if hint is None or not symbols <= self._nodes.keys():
            raise NotSymbolicError(f"{expression} depends on more than numbers")
        self._decide(expression, hint)
        return sympy.sympify(hint)

    def _decide(self, expression: sympy.Basic, outcome: object) -> None:
        """Record that a capture relies on the `outcome` of `expression`."""
        if type(expression) in _COMPARISONS and expression not in self._nodes:
            sides = [self._nodes.get(side, _convert_number(side)) for side in expression.args]
            if None not in sides:
                self._nodes[expression] = self._graph.call_function(_COMPARISONS[type(expression)], tuple(sides))
        if expression in self._nodes:
            self._decided[self._nodes[expression]] = outcome
        else:  # the numbers themselves
            self._decided.update((self._nodes[each], self._nodes[each].meta["hint"]) for each in expression.free_symbols)

    def settle(self, module: fx.GraphModule) -> None:
        """Replace the symbols in Dynamo's graph by numbers that AOTAutograd takes one by one."""
        graph, symbolic = module.graph, {node for node in module.graph.nodes if node in self._copies}
        if self._env is not module.meta["fake_mode"].shape_env or not symbolic:
            return
        first = next(node for node in graph.nodes if node.op != "placeholder")
        settle = partial(self._settle_argument, first, {})
        for node in list(graph.nodes):
            if node not in symbolic:
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), partial(settle, fixed=node in self._sized))
        for node in reversed(list(graph.nodes)):
            if node in symbolic and node.op != "placeholder":
                graph.erase_node(node)
            elif node in symbolic:
                node.meta["example_value"] = self._copies[node].meta["hint"]
        module.recompile()

    def _settle_argument(self, first: fx.Node, inputs: dict[fx.Node, fx.Node], arg: fx.Node, *, fixed: bool) -> Any:
        """Return the number for a symbolic node, or an input for it before the `first` node; other nodes as they are."""
        if (copy := self._copies.get(arg)) is None:
            return arg
        if fixed or isinstance(copy.meta["hint"], bool):
            self._decided[copy] = copy.meta["hint"]
            return copy.meta["hint"]
        if arg not in inputs:
            self._numbers.append(copy)
            with first.graph.inserting_before(first):
                inputs[arg] = first.graph.call_function(self._take_number, (len(self._numbers) - 1,))
        return inputs[arg]

    def finish(self, local: Scope, scope: Scope, counted: Sequence[Effect]) -> StepNumbers | None:
        """Return the numbers of the capture; None if there are none.

        Args:
            local, scope: the variables by which names are resolved.
            counted: the numbers that the step changes.

        Raises:
            NotSymbolicError: what was captured holds for other numbers than the present ones.
        """
        if not (self._numbers or self._decided or counted):
            return None
        changed = [self._nodes[effect.number] for effect in counted if effect.number is not None]
        writes = tuple((each.write, len(self._numbers) + i, each.read(local, scope)) for i, each in enumerate(counted))
        self._numbers += changed
        self._graph.output((*self._numbers, *self._decided))
        self._graph.eliminate_dead_code()
        inputs = self._graph.find_nodes(op="placeholder")
        read = [(self._sources[i], node) for i, node in enumerate(inputs) if node.users]
        for node in inputs:
            if not node.users:
                self._graph.erase_node(node)
        module = fx.GraphModule(torch.nn.Module(), self._graph)
        find = tuple(build_accessor(name) for name, _ in read)
        planned = tuple(each(local, scope) for each in find)
        results = module.forward(*planned)
        # The recorded calls must give on the present numbers what the capture has relied on, or a call was not followed.
        expected = [node.meta["hint"] for node in self._numbers]
        if [isinstance(each, float) for each in results[: len(expected)]] != [isinstance(each, float) for each in expected]:
            raise NotSymbolicError("a number has another type than its symbol")
        if [*results[len(expected) :]] != [*self._decided.values()]:
            raise NotSymbolicError("a condition has another outcome")
        names = tuple(make_readable(name, local, scope) for name, _ in read)
        free = frozenset(name for name, (_, node) in zip(names, read, strict=True) if node not in self._decided)
        return StepNumbers(names, find, planned, module.forward, len(expected), results, free, writes)

    def _create_input(self, builder: Any, value: float) -> Any:
        """Return Dynamo's variable for a number that is an input of its graph."""
        output, source = builder.tx.output, builder.source
        if output.shape_env is not self._env:
            self._env = output.shape_env
            self._forget()
        name = private.get_source_name(source)
        if name not in output.unspec_variable_map:
            builder.install_guards(private.GuardBuilder.TYPE_MATCH)
            self._sources.append(name)
            copy = self._graph.placeholder(f"number_{len(self._sources)}")
            copy.meta = {"hint": value}
            symbol = self._create_symbol(value, source)
            proxy = output.root_tracer.create_graph_input(re.sub(r"\W+", "_", name), type(symbol), symbol, source=source)
            output.root_tracer.bound_symbols[symbol.node.expr] = proxy
            options = {"pass_arg_as_tensor": False, "fake_tensor": None, "is_tensor": False, "example_strong_ref": symbol}
            proxy.node.meta["grapharg"] = private.GraphArg(source, symbol, **options)
            self._copies[proxy.node], self._nodes[symbol.node.expr] = copy, copy
            output.unspec_variable_map[name] = private.SymNodeVariable.create(builder.tx, proxy, symbol, source=source)
        return output.unspec_variable_map[name]

    def _run(self, run: Callable[..., Any], env: ShapeEnv, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Execute one node of Dynamo's graph on fake tensors and symbols."""
        given = [arg for arg in node.all_input_nodes if arg in self._copies]
        if env is not self._env or not given:
            return run(args, kwargs)
        hints = fx.node.map_aggregate((args, kwargs), lambda each: each.node.hint if isinstance(each, SYMBOLIC) else each)
        if len(given) == len(node.all_input_nodes) and (compute := _find_python_function(node)) is not None:
            value = compute(*hints[0], **hints[1])
            if isinstance(value, int | float) and math.isfinite(value):
                copy = self._graph.node_copy(node, self._copies.__getitem__)
                copy.target = compute if node.op == "call_function" else node.target
                return self._note(node, copy, value)
        # Dynamo may try an op with symbols: if sizes depend on them, the op needs the numbers, which must then stay as they
        # are.
        result = run(args, kwargs)
        if not isinstance(result, SYMBOLIC) and not any(map(_has_symbols, list_tensors(result))):
            return result
        self._sized.add(node)
        self._decided.update((self._copies[arg], self._copies[arg].meta["hint"]) for arg in given)
        return run(*hints)

    def _note(self, node: fx.Node, copy: fx.Node, value: float) -> Any:
        """Return a new symbol for what `copy` computes, as `node` of Dynamo's graph does; `value` is its present value."""
        self._copies[node], copy.meta = copy, {"hint": value}
        symbol = self._create_symbol(int(value) if isinstance(value, bool) else value)
        self._nodes[symbol.node.expr] = copy
        if not isinstance(value, bool):
            return symbol
        condition = symbol != 0
        self._nodes[condition.node.expr] = copy
        return condition

    def _create_symbol(self, value: float, source: Any = None) -> Any:
        """Return a new symbol whose value is `value`."""
        assert self._env is not None
        source = source or private.ConstantSource(f"number_{next(self._count)}")
        symbol = self._env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        create = self._env.create_symfloatnode if isinstance(value, float) else self._env.create_symintnode
        return create(symbol, hint=value, source=source)

    def _take_number(self, index: int) -> Any:
        """Return a symbol for a number that ops take; AOTAutograd's graph, if it is being made, gets a node for it."""
        copy = self._numbers[index]
        symbol = self._create_symbol(copy.meta["hint"])
        self._nodes[symbol.node.expr] = copy
        if (mode := get_proxy_mode()) is not None:
            proxy = mode.tracer.create_proxy("call_function", Number, (index, copy.meta["hint"]), {})
            track_tensor_tree(symbol, proxy, constant=None, tracer=mode.tracer)
        return symbol


def _find_python_function(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function of numbers that the user's code calls in `node`; None if there is none."""
    if isinstance(name := node.target, str):
        return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)
    found = _PYTHON.get(node.target, node.target)
    return found if callable(found) and getattr(found, "__module__", "") in _MODULES else None


def _convert_number(value: sympy.Basic) -> float | None:
    """Return a number of sympy as Python's; None for other expressions."""
    if not value.is_number or not value.is_real:
        return None
    return int(value) if value.is_Integer else float(value)


def _has_symbols(value: torch.Tensor) -> bool:
    return any(isinstance(each, torch.SymInt) for each in (*value.shape, *value.stride(), value.storage_offset()))
