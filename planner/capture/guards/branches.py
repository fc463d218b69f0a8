"""Branches on data: taken as eager PyTorch takes them on the given batch, with a guard that is checked before each step.

Dynamo represents a number that Python takes out of a tensor by a symbol. Here the symbol has a concrete value
(``guards.concrete_values``), so that a branch on it can be taken; the condition, and what computes it from inputs and buffers,
becomes a guard.

Only the side that the given batch takes is planned. A batch that takes the other one is refused, or with ``replan=True`` planned.
Known weaknesses: a branch on random numbers is refused unless all draws but 0 agree, and on CUDA checking a guard waits for the
device.
"""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import FrameSummary
from typing import Any

import sympy
import torch
from torch import fx, nn

from planner.capture.guards.assertions import (
    NOT_FINITE,
    UNLIKELY_DRAW,
    assert_length,
    find_answer_for_finite,
    find_passing_side,
    is_as_long_as_told,
    write_assertion,
)
from planner.capture.guards.concrete_values import ConcreteValues
from planner.capture.guards.data_guards import DataGuards, GuardWriter, number
from planner.capture.guards.next_steps import check_next_steps
from planner.capture.rewrites.outputs import ASSERTIONS, list_tensors
from planner.capture.signature import Batch, list_leaves
from planner.capture.source_lines import branch_refusal, find_current_line, find_traced_line
from planner.graphs.errors import TraceError
from planner.torch_private import capture as private
from planner.torch_private.core import (
    FakeTensor,
    OpOverload,
    PythonReferenceAnalysis,
    ShapeEnv,
    assert_async,
    assert_true,
    keep_in_graphs,
    sympy_interp,
)
from planner.torch_private.patches import wrap

aten = torch.ops.aten
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Functions that return a bool of tensors to Python.
_QUESTIONS = (torch.equal, torch.allclose, torch.is_nonzero)
_STATED = (
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
# The step may use no more of their results than their sizes.
_SIZED_BY_VALUES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten.index.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
)
_MARK = "remat-planner: value "
_JUMP = re.compile(r"JUMP.*_IF_(TRUE|FALSE)")


@dataclass(frozen=True, slots=True)
class BranchDecision:
    """An outcome that the capture of a step relies on.

    Attributes:
        expression: over the symbols of numbers taken out of tensors.
        outcome: its value on the given batch.
        line: the source line that needs it.
    """

    expression: sympy.Basic
    outcome: object
    line: FrameSummary | None


class DataBranches:
    """The branches of one capture, taken as on the given batch.

    Attributes:
        refusal: the message for a branch that could not be taken; None if there was none.
    """

    def __init__(self, batch: Batch) -> None:
        self._fake = any(isinstance(leaf, FakeTensor) for leaf in list_leaves(batch))
        self.refusal: str | None = None
        self._values = ConcreteValues()
        self._node: fx.Node | None = None  # the node that Dynamo executes
        self._taken: list[tuple[ShapeEnv, BranchDecision]] = []
        self._decisions: list[BranchDecision] = []
        self._symbols: list[sympy.Symbol] = []  # those of the tensors that are marked in the graph

    def knows(self, node: fx.Node) -> bool:
        """Return True if the value of a tensor in Dynamo's graph is known."""
        return self._values.get(node.meta["example_value"]) is not None

    @contextmanager
    def take(self) -> Iterator[None]:
        """Make Dynamo take branches on concrete values."""
        with ExitStack() as stack:
            stack.enter_context(wrap(private.dynamo_utils, "run_node", self._run_node))
            stack.enter_context(wrap(private.InstructionTranslatorBase, "step", self._take_or_step))
            stack.enter_context(wrap(private.OutputGraph, "remove_node", _keep_or_remove))
            stack.enter_context(wrap(ShapeEnv, "_log_real_tensor_propagation", self._record_decided))
            stack.enter_context(wrap(ShapeEnv, "_make_data_dependent_error", self._record_undecided))
            # An assertion is a branch too: its condition is checked before the step, or by an op if that is not possible.
            stack.enter_context(private.dynamo_config.patch(rewrite_assert_with_torch_assert=False))
            stack.enter_context(self._values.propagate(lambda: self._node is not None and self._node.target == "item"))
            yield

    def _run_node(self, run_node: Callable[..., Any], tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        outer, self._node = self._node, node
        try:
            return self._run(lambda *given: run_node(tracer, node, *given, module), tracer, node, args, kwargs)
        finally:
            self._node = outer

    def _take_or_step(self, step: Callable[..., bool], translator: private.InstructionTranslatorBase) -> bool:
        tensor = _find_jump(translator)
        asked = None if tensor is None else self._ask_for_outcome(translator, tensor)
        more = step(translator)
        if tensor is not None and translator.stack and translator.stack[-1] is asked:  # `a or b` is the tensor itself
            translator.stack[-1] = tensor
        return more

    def _record_decided(self, _: object, env: ShapeEnv, expression: sympy.Basic, outcome: sympy.Basic) -> None:
        self._taken.append((env, BranchDecision(expression, _convert_number(outcome), find_current_line())))

    def _record_undecided(
        self, cannot: Callable[..., Exception], env: ShapeEnv, expression: sympy.Basic, *args: Any, **kwargs: Any
    ) -> Exception:
        self.refusal = branch_refusal(find_current_line(), self._explain_unknown(expression))
        return cannot(env, expression, *args, **kwargs)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Return concrete values to ops that ask for one where AOTAutograd executes the step again; they stay in the graph."""
        self._values.restart()
        asking = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default, *_SIZED_BY_VALUES}
        with keep_in_graphs(asking), self._values.propagate(lambda: False):
            yield

    def settle(self, module: fx.GraphModule) -> None:
        """Replace the symbols in Dynamo's graph by their values, and mark the tensors that they come from."""
        graph, env = module.graph, module.meta["fake_mode"].shape_env
        self._decisions = [decision for where, decision in self._taken if where is env]
        stated = [assertion.expr for assertions in env.deferred_runtime_asserts.values() for assertion in assertions]
        # A decision is stated twice, as taken and as an assertion of the shape environment; one guard is enough.
        canonical = {_normalize(decision) for decision in self._decisions}
        checked = [BranchDecision(expression, True, None) for expression in stated]  # torch._check, and what was decided
        self._decisions += [decision for decision in checked if _normalize(decision) not in canonical]
        symbolic = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), SYMBOLIC)]
        for node in symbolic:
            if node.target == "item" and self._values.number(node.meta["example_value"]) is not None:
                with graph.inserting_before(node):
                    marker = graph.call_function(assert_async, (node.args[0], f"{_MARK}{len(self._symbols)}"))
                marker.meta = {"stack_trace": node.meta.get("stack_trace"), "example_value": None}
                (symbol,) = _get_expression(node.meta["example_value"]).free_symbols
                self._symbols.append(symbol)
        for node in list(graph.nodes):
            if node not in symbolic and any(arg in symbolic for arg in node.all_input_nodes):
                only_checks = node.op != "output" and all(arg in symbolic for arg in node.all_input_nodes)
                if only_checks and node.meta.get("example_value") is None:
                    graph.erase_node(node)  # a check of a decision
                else:
                    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._settle)
        for node in reversed(symbolic):
            if not node.users and node.target not in _QUESTIONS:
                graph.erase_node(node)
        module.recompile()

    def build_guards(self, graph: fx.Graph, step: nn.Module, batch: Batch) -> DataGuards | None:
        """Return the guards of the branches that were taken, to be checked before each step; None if there are none.

        Args:
            graph: the joint graph of AOTAutograd; ops that only ask for values are removed from it.

        Raises:
            TraceError: a condition depends on more than the batch and buffers.
        """
        writer = GuardWriter(graph)
        values: dict[sympy.Symbol, tuple[int, FrameSummary | None]] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or not isinstance(node.target, OpOverload):
                continue
            if node.target in ASSERTIONS:
                if str(node.args[-1]).startswith(_MARK):
                    self._number(writer, node, values)
                    graph.erase_node(node)
                continue  # others are executed
            if torch.Tag.data_dependent_output in node.target.tags:
                writer.expect_number(node)
            elif node.target is aten.bincount.default and is_as_long_as_told(node):
                assert_length(node)
            elif torch.Tag.dynamic_output_shape in node.target.tags:
                writer.expect_sizes(node)
            if not node.users and (_is_query(node.target) or node.target in _SIZED_BY_VALUES):
                graph.erase_node(node)
        for decision in self._decisions:
            symbols = sorted(decision.expression.free_symbols, key=str)
            if symbols and all(symbol in values for symbol in symbols):
                positions, lines = zip(*(values[symbol] for symbol in symbols), strict=True)
                of = tuple(self._values.numbers[symbol] for symbol in symbols)
                shown = () if isinstance(decision.expression, sympy.Eq) or decision.expression.is_symbol else of
                outcome = partial(_evaluate, decision.expression, symbols)
                writer.expect(decision.line or lines[0], positions, outcome, decision.outcome, shown)
        guards = writer.finish()
        if guards is None or self._fake:
            return guards
        guards = guards.confirm(step, batch)
        check_next_steps(guards, graph, step, batch)
        return guards

    def _ask_for_outcome(
        self, translator: private.InstructionTranslatorBase, tensor: private.TensorVariable
    ) -> private.VariableTracker:
        """Replace `tensor` on the stack by its number before a jump on it, or by the outcome that it must have; return that."""
        fake = tensor.as_proxy().node.meta["example_value"]
        likely = self._values.get_likely(fake)
        is_known = likely is None and self._values.get(fake) is not None
        passing = likely if likely is not None or is_known else find_passing_side(translator)
        otherwise = "raises an error on this batch" if likely is None else UNLIKELY_DRAW
        if passing is None and not is_known and (answer := find_answer_for_finite(tensor.as_proxy().node)) is not None:
            passing, otherwise = answer, NOT_FINITE
        if passing is None:
            outcome = tensor.call_method(translator, "item", [], {})
        else:
            write_assertion(translator, tensor, passing=passing, otherwise=otherwise)
            outcome = private.VariableTracker.build(translator, passing)
        translator.stack[-1] = outcome
        return outcome

    def _number(self, writer: GuardWriter, node: fx.Node, values: dict[sympy.Symbol, tuple[int, FrameSummary | None]]) -> None:
        """Add the marked tensor to the `values` of symbols, if a decision needs it."""
        marked, line = node.args[0], find_traced_line(node.meta.get("stack_trace"))
        assert isinstance(marked, fx.Node)
        symbol = self._symbols[int(str(node.args[-1]).removeprefix(_MARK))]
        if symbol not in values and any(symbol in decision.expression.free_symbols for decision in self._decisions):
            values[symbol] = writer.add_value(marked, line), line

    def _run(self, run: Callable[..., Any], tracer: Any, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Execute one node of Dynamo's graph on fake tensors, with concrete numbers where it makes tensors of them."""
        symbolic: list[Any] = []
        numbers = fx.node.map_aggregate((args, kwargs), partial(self._record_number, symbolic))  # also those in slices
        if symbolic and all(self._values.number(leaf) is not None for leaf in symbolic):
            result = run(*numbers)
            if list_tensors(result):
                return result
        result = run(args, kwargs)
        if symbolic and list_tensors(result):
            raise TraceError(branch_refusal(find_current_line(), self._explain_unknown(*(leaf.node.expr for leaf in symbolic))))
        if type(result) is bool and node.target in _QUESTIONS:
            answer = tracer.shape_env.create_unbacked_symbool()
            self._values.name(answer, result)
            return answer
        return result

    def _record_number(self, symbolic: list[Any], leaf: Any) -> Any:
        """Return the value of a symbolic number, which is added to `symbolic`; other leaves as they are."""
        if not isinstance(leaf, SYMBOLIC):
            return leaf
        symbolic.append(leaf)
        return self._values.number(leaf)

    def _settle(self, node: fx.Node) -> Any:
        """Return the concrete number of `node`; `node` itself if it is no number."""
        value = node.meta.get("example_value")
        if not isinstance(value, SYMBOLIC):
            return node
        found = self._values.number(value)
        decision = BranchDecision(_get_expression(value), found, find_traced_line(node.meta.get("stack_trace")))
        if _normalize(decision) not in map(_normalize, self._decisions):
            self._decisions.append(decision)
        return found

    def _explain_unknown(self, *expressions: sympy.Basic) -> str:
        symbols = {symbol for expression in expressions for symbol in expression.free_symbols}
        reasons = {self._values.unknown[symbol] for symbol in symbols if symbol in self._values.unknown}
        cause = " and ".join(sorted(reasons)) or "values"
        return f"{cause} (the batch has no data: plan with real tensors if it is the batch's)" if self._fake else cause


def _get_expression(symbolic: Any) -> sympy.Basic:
    """Return the original expression of a symbolic number, though its symbols may have turned out to be constants."""
    return symbolic.node._expr


def _normalize(decision: BranchDecision) -> sympy.Basic:
    """Return a decision as a condition, equal for equivalent decisions."""
    expression, outcome = decision.expression, decision.outcome
    if not isinstance(outcome, bool):
        expression = sympy.Eq(expression, outcome)
    elif not outcome:
        expression = sympy.Not(expression)
    return expression.canonical if isinstance(expression, sympy.core.relational.Relational) else expression


def needs_values(graph: fx.Graph) -> bool:
    """Return True if Dynamo's graph needs values that depend on data."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        sizes = [size for tensor in list_tensors(value) for size in tensor.shape]
        if node.target in (assert_true, assert_async) or any(isinstance(v, SYMBOLIC) for v in (value, *sizes)):
            return True
    return False


def _keep_or_remove(remove: Callable[..., None], output: private.OutputGraph, node: fx.Node) -> None:
    if node.target is not operator.getitem or not any(map(_is_mask, node.all_input_nodes[1:])):
        remove(output, node)  # Dynamo leaves out x[mask] if no more of it is used than its length


def _find_jump(translator: private.InstructionTranslatorBase) -> private.TensorVariable | None:
    """Return the tensor that the next instruction jumps on; None before other instructions."""
    position = translator.instruction_pointer
    if position is None or not _JUMP.search(translator.instructions[position].opname) or not translator.stack:
        return None
    tensor = translator.stack[-1].realize()
    return tensor if isinstance(tensor, private.TensorVariable) else None


def _is_mask(node: fx.Node) -> bool:
    """Return True if a node of Dynamo's graph is a tensor that selects where it is true."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _is_query(func: OpOverload) -> bool:
    """Return True if `func` only reads a value, or only states something about it."""
    return func in _STATED or torch.Tag.data_dependent_output in func.tags


def _convert_number(value: sympy.Basic) -> object:
    """Convert a number of sympy to Python's."""
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_integer else float(value)


def _evaluate(expression: sympy.Basic, symbols: Sequence[sympy.Symbol], *values: Any) -> object:
    """Evaluate `expression` on tensors that hold the numbers."""
    numbers = [number(value) for value in values]
    given = {s: int(n) if isinstance(n, bool) else n for s, n in zip(symbols, numbers, strict=True)}
    return sympy_interp(PythonReferenceAnalysis, given, expression)
