"""``torch.compile(model, backend="planner", options={"budget": "8GB"})``: plans each of Dynamo's graphs within the budget.

AOTAutograd builds the forward and the backward pass of each graph that Dynamo captures. The planner chooses which tensors are
saved between them, and which are recomputed (``planner.train.backend.planned_graph``). Dynamo still handles guards, graph
breaks and recompilations.

A front end of AOTAutograd and not of Dynamo alone, since what is chosen is what its two passes share: the planner takes the place
of its partitioner (``partition_fn``). Known weaknesses: gradients of gradients are an error, as a plan has the first only; what
runs between graphs has no limit (docs/limits.md); first steps keep less than they could (``shared_budget``).
"""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.frontend.dynamo_patches import call_at_end, write_data_in_place_where
from planner.capture.frontend.eager_ops import keep_dynamo_as_eager_where, keep_ops_as_eager
from planner.capture.frontend.failures import build_failure_in_backend
from planner.capture.frontend.replaced_calls import replace_calls_where
from planner.capture.frontend.saved_tensors import remove_saved_tensors_hooks
from planner.capture.guards.names import make_readable
from planner.capture.lowering.lower import Capture
from planner.capture.rewrites.outputs import CHECKS
from planner.graphs.errors import PlannerError, TraceError
from planner.graphs.ir import Graph
from planner.graphs.short_tracebacks import shorten_traceback, warn_caller
from planner.measure.smaller_batch import is_sure_to_fit
from planner.progress import Stage, Stages
from planner.settings.budget import Share
from planner.settings.devices import DEVICES, DeviceSpec, find_device, get_device
from planner.torch_private import capture as private
from planner.torch_private.core import keep_in_graphs, pytree
from planner.torch_private.identity_guards import guard_identities_where
from planner.torch_private.loop_iterators import pass_on_iterators_where
from planner.train.backend import polyfills as polyfills  # registers them with Dynamo
from planner.train.backend.joint_capture import capture_joint, rewrite_as_eager
from planner.train.backend.missing_gradients import leave_out_unread
from planner.train.backend.model_calls import CALL, call_model
from planner.train.backend.numpy_functions import warn_of_numpy
from planner.train.backend.outline import Outline
from planner.train.backend.planned_graph import PlannedGraph, get_graph_device
from planner.train.backend.returned_views import take_out_views
from planner.train.backend.settings import BackendSettings, parse_backend_options
from planner.train.backend.shared_budget import SharedBudget
from planner.train.backend.shared_sums import SharedSums
from planner.train.backend.step_memory import UnplannedGraph

_DOUBLE_BACKWARD = (
    "gradients are computed of the gradients of a model that runs by its plan, and the plan has only the first: compute them "
    "inside the model's forward pass by torch.autograd.grad or torch.func (torch.autograd.functional breaks the graph), plan the "
    "whole step with planner.compile, or train in a block of planner.rematerialize(budget=...)"
)
_NOT_PLANNED = (
    "a graph of the model runs without a plan, and keeps what {} keeps: {}. The planned graphs of the step leave room "
    "for its tensors"
)
BUDGETS: dict[int, SharedBudget] = {}  # by the id of a torch.compile call's backend object, as long as that exists


@shorten_traceback
def planner(module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, object] | None = None) -> Callable[..., Any]:
    """Compile a graph that Dynamo has captured; ``torch.compile`` calls this backend.

    Args:
        module, inputs: the captured graph and its inputs.
        options: ``budget`` (as in ``planner.compile``, for parameters, inputs, gradients and activations of all graphs of the
            model; a share is of the peak without recomputation), ``kernels`` (``eager`` or ``inductor``), ``roofline`` (model the
            times on this device; by default each op is measured where the model is), ``time_limit_s`` (per graph, 60),
            ``tolerance``, ``wait`` and ``params`` (as in ``planner.compile``; each graph is solved to 1% or for 3 s by default),
            ``arena`` (as there, one for all graphs of a step), ``check_writes``, ``options``, ``link`` and
            ``host_budget`` (as there; all graphs share the host memory), and ``memory`` (as there; the graphs of a step count
            together, by ``combine_passes``), and ``on_progress`` (as there; all graphs of a step have one summary).

    Raises:
        PlannerError: options are unknown or do not go together (``planner.settings.compatibility``), or there is no budget.
        InfeasibleError, LimitError: a graph does not fit, as in ``planner.solve``.
    """
    budget = _share_budget(parse_backend_options(options))
    if (call := CALL.get()) is not None:
        call.trains |= _may_train(module)
    warn_of_numpy(module.graph)
    add_views = take_out_views(module)
    compile_module = _compile_kernels if budget.settings.kernels == "inductor" else _compile
    compiled = compile_module(module, inputs, budget)
    return compiled if add_views is None else partial(add_views, compiled)


def _compile(module: fx.GraphModule, inputs: Sequence[Any], budget: SharedBudget) -> Callable[..., Any]:
    """Compile `module` with eager PyTorch's kernels, run by a schedule that may change between steps."""
    if (run := _run_smaller(module, inputs, budget)) is not None:
        return run
    planned: list[PlannedGraph] = []
    outline, unplanned_graph = Outline.of(module), UnplannedGraph()
    add = _build_planner(module, inputs, budget)

    def partition(
        joint: fx.GraphModule, _: object, *, num_fwd_outputs: int, **__: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        device, measure = _choose_device(joint, budget.settings.roofline), budget.settings.roofline is None
        rewrite_as_eager(joint.graph)
        unplanned = _copy_of(joint)  # capture changes the graph
        with budget.create_stages() as stages:
            try:
                with stages.run_stage(Stage.MEASURE) as stage:
                    captured = capture_joint(
                        joint,
                        device,
                        measure=measure,
                        forward_outputs=num_fwd_outputs,
                        options=budget.settings.traced_options,
                        on_op=stage.advance,
                    )
            except TraceError as error:
                warn_caller(_NOT_PLANNED.format("eager PyTorch", error))
                return private.default_partition(unplanned, (), num_fwd_outputs=num_fwd_outputs)
            graph = budget.build_graph(joint, captured, outputs=num_fwd_outputs)
            graph.outline = outline
            graph.input_names, graph.check_writes = _find_input_names(module, joint, captured), budget.settings.check_writes
            _plan(graph, add, stages)
        planned.append(graph)
        return graph.build_interface()

    def forward(inner: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        return planned[0].forward if planned else unplanned_graph.forward(inner, examples)

    def backward(inner: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        return planned[0].backward if planned else unplanned_graph.backward(inner, examples)

    compiler = private.aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=partition)
    # As in training loops, backward() is called outside of autocast. Replayed views leave out some of those before a detach():
    # `return y.relu_(), y.detach()` of a transposed tensor has other values then.
    as_eager = private.functorch_config.patch(backward_pass_autocast="off", view_replay_for_aliased_outputs=False)
    with as_eager, keep_ops_as_eager(), keep_in_graphs(CHECKS), remove_saved_tensors_hooks(module):
        try:
            compiled: Callable[..., Any] = compiler(module, inputs)
        except RuntimeError as error:
            if (failure := build_failure_in_backend(error)) is not None:
                raise failure from error
            raise
    private.forget_saved_values()
    compiled = private.refuse_double_backward(compiled, _DOUBLE_BACKWARD)
    if not planned:
        return budget.count(unplanned_graph, compiled)
    sums = SharedSums(
        [_name_placeholder(node) if _count_reads(node) > 1 else "" for node in module.graph.find_nodes(op="placeholder")]
    )
    return _drop_missing_gradients(compiled, planned, budget, sums)


def _run_smaller(module: fx.GraphModule, inputs: Sequence[Any], budget: SharedBudget) -> Callable[..., Any] | None:
    """Return the function that runs `module` by eager PyTorch; None unless it is one of a smaller batch and sure to fit.

    Dynamo has captured it by then: the same ops in the same order show that the code does the same for fewer rows.
    """
    returned = pytree.tree_leaves(module.graph.output_node().args[0])
    outputs = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in returned]
    outline = Outline.of(module)
    for graph in budget.list_alone():
        captured = graph.captured
        if (
            graph.outline is not None
            and outline.is_smaller(graph.outline)
            and is_sure_to_fit(
                captured.graph,
                captured.program,
                graph.list_static(inputs, outputs),
                budget.memory,
                budget.compute_room_beside(inputs),
            )
        ):
            return budget.run_eagerly(module, graph.device)
    return None


def _build_planner(module: fx.GraphModule, inputs: Sequence[Any], budget: SharedBudget) -> Callable[[PlannedGraph], None]:
    """Return the function that plans a graph within the budget. This reads Dynamo's state, so it must run inside Dynamo."""
    more = getattr(module, "compile_subgraph_reason", None)
    scope = private.InstructionTranslator.current_tx().f_locals.values()
    model = [t for value in scope if isinstance(value, torch.nn.Module) for t in (*value.parameters(), *value.buffers())]
    held = [*inputs, *module.parameters(), *module.buffers()]
    return lambda graph: budget.add(graph, held, model, more=more is not None and more.graph_break)


def _compile_kernels(module: fx.GraphModule, inputs: Sequence[Any], budget: SharedBudget) -> Callable[..., Any]:
    """Compile `module` with Inductor's kernels; with eager PyTorch's if one of its passes has none."""
    from planner.capture.kernels.halves import NothingCompiledError
    from planner.torch_private.inductor import compile_fx  # importing Inductor takes a second
    from planner.train.backend.kernel_capture import capture_kernels

    if not _may_train(module):
        return budget.count(UnplannedGraph(), compile_fx(module, inputs))  # type: ignore[arg-type]
    add, stages = _build_planner(module, inputs, budget), budget.create_stages()
    captured: Capture | None = None
    try:
        with stages, stages.run_stage(Stage.MEASURE, "compiling and measuring kernels"), suppress(NothingCompiledError):
            captured = capture_kernels(module, inputs, budget.settings.traced_options)
    except TraceError as error:
        warn_caller(_NOT_PLANNED.format("torch.compile", error))
        return budget.count(UnplannedGraph(), compile_fx(module, inputs))  # type: ignore[arg-type]
    if captured is None:
        return _compile(module, inputs, budget)
    kernels = captured
    planned: list[PlannedGraph] = []

    def partition(
        joint: fx.GraphModule, _: object, *, num_fwd_outputs: int, **__: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graph = budget.build_graph(joint, kernels, outputs=num_fwd_outputs)
        graph.input_names, graph.check_writes = _find_input_names(module, joint, kernels), budget.settings.check_writes
        if isinstance(budget.budget, Share):
            graph.eager = _build_eager_graph(joint, num_fwd_outputs)
        with stages:
            _plan(graph, add, stages)
        planned.append(graph)
        return graph.build_interface()

    compiler = private.aot_autograd(
        fw_compiler=lambda *_: planned[0].forward,
        bw_compiler=lambda *_: planned[0].backward,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with private.functorch_config.patch(view_replay_for_aliased_outputs=False):  # as in _compile
        return _drop_missing_gradients(compiler(module, inputs), planned, budget, SharedSums(()))


def _count_reads(node: fx.Node) -> int:
    """Return how many gradients autograd adds up for a value: ops that return the value itself, as ``x.float()``, get none."""
    value, count = node.meta.get("example_value"), 0
    for user in node.users:
        is_same = value is not None and user.meta.get("example_value") is value
        count += _count_reads(user) if is_same else pytree.tree_leaves((user.args, user.kwargs)).count(node)
    return count


def _drop_missing_gradients(
    compiled: Callable[..., Any], planned: Sequence[PlannedGraph], budget: SharedBudget, sums: SharedSums
) -> Callable[..., Any]:
    """Return `compiled` with missing gradients as autograd has them.

    Inputs that get no gradient are passed detached: autograd would call their hooks. The `sums` are watched while the `budget`
    learns.
    """
    (graph,) = planned
    without = set(graph.without_gradient)

    def run(*args: Any) -> Any:
        outputs = compiled(*(arg.detach() if i in without else arg for i, arg in enumerate(args)))
        if budget.learning:
            sums.watch(outputs)
        leave_out_unread(graph, outputs, args)
        return outputs

    return run


def _find_input_names(module: fx.GraphModule, joint: fx.GraphModule, captured: Capture) -> dict[int, str]:
    """Return the names that a joint graph's inputs have in the user's code, by tensor."""
    given = module.graph.find_nodes(op="placeholder")
    descs = {node.name: node.meta["desc"] for node in joint.graph.find_nodes(op="placeholder")}
    names: dict[int, str] = {}
    for source in captured.program.sources:
        match descs.get(source.name):
            case private.PlainAOTInput(idx=index):
                names[source.tensor] = _name_placeholder(given[index])
            case private.ParamAOTInput(target=target) | private.BufferAOTInput(target=target):
                names[source.tensor] = str(target)
    return names


def _name_placeholder(placeholder: fx.Node) -> str:
    argument = placeholder.meta.get("grapharg")
    path = placeholder.name if argument is None else make_readable(argument.source.name, {}, {})
    return re.sub(r"L\['(\w+)'\]", r"\1", path)


def _plan(graph: PlannedGraph, add: Callable[[PlannedGraph], None], stages: Stages) -> None:
    """Plan `graph` with `add`."""
    with stages.run_stage(Stage.SOLVE):
        add(graph)
    stages.finish()


def _copy_of(joint: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a joint graph with the same fake values."""
    graph = fx.Graph()
    returned = graph.graph_copy(joint.graph, {})
    graph.output(returned).meta = dict(joint.graph.output_node().meta)
    return fx.GraphModule(joint, graph)


def _build_eager_graph(joint: fx.GraphModule, forward_outputs: int) -> Graph:
    """Return a joint graph as eager PyTorch runs it, with each op measured alone, as with ``kernels="eager"``."""
    fallback = find_device(_describe_device(joint)) or get_device("h100")  # for ops that do not run on synthetic values
    joint = _copy_of(joint)
    rewrite_as_eager(joint.graph)
    return capture_joint(joint, fallback, measure=True, forward_outputs=forward_outputs).graph


def _may_train(module: fx.GraphModule) -> bool:
    """Return True if a backward pass may follow."""
    returned = pytree.tree_leaves(module.graph.output_node().args)
    values = (node.meta.get("example_value") for node in returned if isinstance(node, fx.Node))
    return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _share_budget(settings: BackendSettings) -> SharedBudget:
    """Return the budget shared by the graphs of the ``torch.compile`` call that is being compiled."""
    made_by = _find_backend(private.InstructionTranslator.current_tx())
    if id(made_by) not in BUDGETS:
        BUDGETS[id(made_by)] = SharedBudget(settings)
        weakref.finalize(made_by, BUDGETS.pop, id(made_by), None)
    return BUDGETS[id(made_by)]


def _find_backend(translator: private.InstructionTranslatorBase) -> Callable[..., Any]:
    """Return the backend object of the ``torch.compile`` call that compiles a frame; an options dict may serve several calls."""
    compiler = translator.output.compiler_fn
    assert compiler is not None
    return private.innermost_backend(compiler)


def _is_planned(translator: private.InstructionTranslatorBase) -> bool:
    """Return True if a frame is compiled for this backend."""
    return translator.output.compiler_fn is not None and _is_planner(_find_backend(translator))


def _is_planner(made_by: Callable[..., Any]) -> bool:
    """Return True if the backend object of a ``torch.compile`` call is of this backend."""
    return getattr(made_by, "compiler_fn", None) is planner


def _is_run_as_eager(translator: private.InstructionTranslatorBase) -> bool:
    """Return True if a frame is compiled for this backend with eager PyTorch's kernels."""
    if not _is_planned(translator):
        return False
    options: Mapping[str, object] = getattr(_find_backend(translator), "kwargs", {}).get("options", {})
    return options.get("kernels") != "inductor"


# Must run before Dynamo calls a backend for any frame.
keep_dynamo_as_eager_where(_is_run_as_eager, ExitStack())
replace_calls_where(_is_planned, ExitStack())
private.fix_sizes_where(_is_planned)
private.guard_empty_hooks_where(lambda compiler: _is_planner(private.innermost_backend(compiler)))
ExitStack().enter_context(call_at_end(write_data_in_place_where(_is_planned, ExitStack())))
# NumPy's random numbers are drawn by NumPy: Dynamo would take them from PyTorch's generator. It leaves out code with an LSTM.
# Where code captures nothing once, such as behind the last iteration of a loop, it would run without its graphs from then on.
private.configure_dynamo_where(
    _is_planned, use_numpy_random_stream=True, allow_rnn=True, allow_empty_graphs=True, **private.GRADIENT_SETTINGS
)
private.carry_sparse_tensors_where(_is_planned)
private.break_graphs_in_loops_where(_is_planned)
pass_on_iterators_where(_is_planned)
guard_identities_where(_is_planned)
private.follow_requires_grad_where(_is_run_as_eager)
private.leave_random_objects_where(_is_planned)
private.call_compiled_modules_by(_is_planner, call_model)


def _choose_device(joint: fx.GraphModule, roofline: str | None) -> DeviceSpec:
    """Return the device for modelled times."""
    if roofline is not None:
        return get_device(roofline)
    name = _describe_device(joint)
    if (known := find_device(name)) is not None:
        return known
    raise PlannerError(
        f"the speed of device {name!r} is not known: name a similar one with options={{'roofline': ...}}, one of "
        f"{', '.join(DEVICES)}"
    )


def _describe_device(joint: fx.GraphModule) -> str:
    where = get_graph_device(joint)
    return "cpu" if where.type == "cpu" else torch.cuda.get_device_name(where)
