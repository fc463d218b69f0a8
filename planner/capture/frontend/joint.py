"""The joint graph of a training step: Dynamo captures the forward pass, AOTAutograd adds the backward pass.

Dynamo's capture of a full graph and ``aot_export_joint_with_descriptors`` were chosen by trying others:
``aot_export_module(trace_joint=True)`` takes four times as long, ``torch.export.experimental`` fails on tied weights, and
``make_fx`` on the buffers of batch norms. A step is captured in attempts, cheapest first: as in eager PyTorch, then with the
module that asked told that it is compiled, then with the values of the batch. If it cannot be captured, or reads what its first
call sets, the first call is made. This took the place of a patch for one library.

Known weaknesses: each attempt is a whole capture, of seconds for large models. Dynamo cannot run beside training in another
thread, so a new size of batch is waited for. Branches on data and numbers that stay inputs exclude each other.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from planner.capture.frontend.constant_tensors import is_constant
from planner.capture.frontend.dynamo_patches import (
    call_at_end,
    follow_distributions,
    follow_requires_grad_writes,
    guard_missing_attributes,
    ignore_cudnn_flags,
    keep_attributes,
    read_generic_aliases,
    read_numpy_floats,
    read_optimizers,
    write_data_in_place_where,
    write_replaced_buffers,
)
from planner.capture.frontend.eager_ops import (
    ASKING_FOR_COMPILERS,
    AskedForValuesError,
    ask_for_values,
    hide_compiling,
    keep_ops_as_eager,
)
from planner.capture.frontend.effects import (
    CountingError,
    UnsettledError,
    check_effects,
    record_effects,
    warn_of_first_call,
)
from planner.capture.frontend.failures import build_failure, get_own_message
from planner.capture.frontend.fake_execution import run_on_fakes
from planner.capture.frontend.gradient_hooks import call_gradient_hooks
from planner.capture.frontend.later_values import LaterValues, NeedsValueError, skip_metrics, take_values_later
from planner.capture.frontend.module_hooks import follow_removed_hooks
from planner.capture.frontend.preserved_state import make_first_call, preserve_state
from planner.capture.frontend.replaced_calls import replace_calls_where
from planner.capture.frontend.saved_tensors import remove_saved_tensors_hooks
from planner.capture.frontend.symbolic_numbers import SymbolicNumbers
from planner.capture.guards.branches import DataBranches, needs_values
from planner.capture.guards.data_guards import DataGuards
from planner.capture.guards.names import make_readable
from planner.capture.guards.python_guards import PythonGuards, build_guards, list_guarded_names, refuse_iterators
from planner.capture.guards.python_random import forbid_python_random
from planner.capture.guards.replaced_names import Frames, record_frames
from planner.capture.rewrites.cuda_attention import capture_attention_as_on_cuda
from planner.capture.rewrites.explicit_generators import get_explicit_generator, record_generators
from planner.capture.rewrites.outputs import EFFECTS, check_writes, drop_tangents_of_writes, find_tangents_of_writes
from planner.capture.rewrites.sparse_products import decompose_sparse_matrices, hide_sparse_buffers
from planner.capture.signature import Batch, list_leaves, split_arguments
from planner.capture.source_lines import GRAPH_BREAK_ADVICE, format_node, has_stopped_in_library
from planner.capture.step import TrainingStep
from planner.graphs.errors import TraceError, first_line
from planner.torch_private import capture as private
from planner.torch_private.core import FakeTensor, disable_current_modes, keep_in_graphs, silence_fakes

T = TypeVar("T")
# Makes a result of a module that Dynamo captured, called in its tracing context.
Make = Callable[[ExitStack, fx.GraphModule, tuple[object, ...], dict[str, object]], T]
Made = tuple[T, PythonGuards | None]
# Makes a joint graph, called as ``aot_export_joint_with_descriptors``.
Export = Callable[..., private.JointWithDescriptors]
Values = DataBranches | SymbolicNumbers  # what a capture may learn of values: one of the two
Traced = tuple[private.JointWithDescriptors, PythonGuards | None, DataBranches | None]


def capture_joint_graph(
    step: TrainingStep, batch: Batch, *, as_on_cuda: bool, numbers: Collection[str] | None = (), looks: bool = True
) -> Traced:
    """Return the joint graph of `step`, its guards, and the branches on data that it takes, if any.

    Python values that the first call of the step sets are captured as they are after it.

    Args:
        as_on_cuda: choose the kernels that CUDA would.
        numbers: names of numbers that stay inputs of the step, as Dynamo writes them; those that it counts do too. None if none
            can be an input.
        looks: let libraries look at the masks in the batch, as in eager PyTorch: the graph is then one for such masks alone.

    Raises:
        TraceError: the step cannot be captured as one graph.
    """
    settles = True
    looks = looks and not any(isinstance(leaf, FakeTensor) for leaf in list_leaves(batch))

    def trace() -> Traced:
        nonlocal settles
        with keep_ops_as_eager(), capture_attention_as_on_cuda() if as_on_cuda else nullcontext():
            attempts = _Attempts(step, batch)
            try:
                traced = attempts.capture_with_numbers(numbers) if numbers else attempts.capture_as_eager(looks=looks)
            except CountingError as counting:
                if numbers is None:
                    raise
                traced = attempts.capture_with_numbers(counting.names.union(numbers), counting)
        graph = traced[0].graph_module.graph
        if settles and traced[2] is not None and find_tangents_of_writes(graph):
            settles = False
            raise UnsettledError("parameters", [])  # a branch of the first call may initialize them
        drop_tangents_of_writes(graph)
        return traced

    return _run_until_settled(step, batch, trace)


def capture_compiled(
    step: TrainingStep, batch: Batch, make: Callable[[Export], Make[T]]
) -> tuple[T, PythonGuards | None, DataGuards | None]:
    """Return the result of `make` on `step` as ``torch.compile`` captures it, its guards, and those of its branches on data.

    Args:
        make: from a function that makes joint graphs, return one that makes the result of a captured module.

    Raises:
        TraceError: the step cannot be captured as one graph.
    """
    return _run_until_settled(step, batch, partial(_trace_compiled, step, batch, make))


def _trace_compiled(
    step: TrainingStep, batch: Batch, make: Callable[[Export], Make[T]]
) -> tuple[T, PythonGuards | None, DataGuards | None]:
    attempts = _Attempts(step, batch)
    found = attempts.try_capture(make(_export_for_inductor))
    if _needs_values(found):
        return _capture_compiled_with_branches(attempts, make)
    return *attempts.get_result(found), None


def _export_for_inductor(*args: Any, **options: Any) -> private.JointWithDescriptors:
    joint = private.aot_export_joint_with_descriptors(*args, **options)
    check_writes(joint.graph_module.graph)
    for node in joint.graph_module.graph.nodes:
        if get_explicit_generator(node) is not None:
            raise TraceError(
                f"{format_node(node)} passes a generator to an op, and "
                "Inductor's kernels use none: leave out the generator, or kernels='inductor'"
            )
    return joint


def _capture_compiled_with_branches(
    attempts: "_Attempts", make: Callable[[Export], Make[T]]
) -> tuple[T, PythonGuards | None, DataGuards | None]:
    """Do as ``capture_compiled``, with the branches that the batch takes."""
    branches = DataBranches(attempts.batch)
    conditions: list[DataGuards | None] = []

    def export(*args: Any, **options: Any) -> private.JointWithDescriptors:
        with branches.follow():
            joint = _export_for_inductor(*args, **options)
        with disable_current_modes():  # conditions are computed on the batch, and not on fake tensors
            conditions.append(branches.build_guards(joint.graph_module.graph, attempts.step, attempts.batch))
        return joint

    return *attempts.get_result(attempts.try_capture(make(export), branches), branches), conditions[-1]


def _run_until_settled(step: TrainingStep, batch: Batch, trace: Callable[[], T]) -> T:
    """Call `trace`, and return its result; restore `step` and `batch` afterwards.

    What a library does once, in the first call of a model (it installs hooks, fills caches), may be what cannot be traced. So if
    the step cannot be captured, or reads Python values that its first call sets, the first call is made, and `trace` called
    again, if that call has set what the step can reach, or the line that stopped the capture is a library's: its caches are
    elsewhere (``kl_divergence`` looks up its formula, by pairs of classes). If that fails too, what the first call has set is
    restored.

    Raises:
        TraceError: values change in the second call too; or as in `trace`.
    """
    try:
        return _run_once(step, batch, trace)
    except (UnsettledError, TraceError) as error:
        failed = error
    try:
        made = [name for effect in getattr(failed, "effects", ()) for name in effect.made]
        restore = make_first_call(step, batch, made)
    except Exception:  # noqa: BLE001  # the capture says what is wrong with the step
        restore = None
    if restore is None and isinstance(failed, TraceError) and not has_stopped_in_library(failed.__cause__ or failed):
        raise failed
    if isinstance(failed, UnsettledError):
        args, kwargs = split_arguments(batch)
        warn_of_first_call(failed.effects, {"self": step, "args": args, "kwargs": kwargs}, TrainingStep.forward.__globals__)
    with ExitStack() as stack:
        if restore is not None:
            stack.callback(restore)
        try:
            traced = _run_once(step, batch, trace)
        except UnsettledError as unsettled:
            raise TraceError(
                f"{unsettled} changes in the second step too, and the step reads it: change it outside of what is planned, from "
                f"what the step returns; or {GRAPH_BREAK_ADVICE}"
            ) from unsettled
        stack.pop_all()
    return traced


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attempts to capture a step: each knows what earlier ones have learned.

    Attributes:
        step, batch: what is captured.
        later: the values that are known after the step.
    """

    step: TrainingStep
    batch: Batch
    later: LaterValues = field(default_factory=LaterValues)

    def capture_as_eager(self, *, looks: bool) -> Traced:
        """Return the joint graph of the step, its guards, and the branches on data that were taken, if any.

        Every node carries fake values, inputs and outputs carry descriptors. A model that asks whether it is compiled is captured
        as in eager PyTorch where that needs no data; if an attempt fails, the module that asked last gets the true answer in the
        next. A capture that follows values takes longer than one without, and most models do without.
        """
        found = self._try_uncompiled(looks=looks)
        branches = DataBranches(self.batch)
        if isinstance(found, AskedForValuesError):
            with hide_compiling(ASKING_FOR_COMPILERS, branches.knows):
                found = self._try_with_branches(branches)
            if not isinstance(found, tuple | UnsettledError):
                return self.capture_as_eager(looks=False)
            return *self.get_result(found, branches), branches
        if (traced := _take_whole(found)) is not None:
            return traced
        return *self.get_result(self._try_with_branches(branches), branches), branches

    def capture_with_numbers(self, names: Collection[str], failed: TraceError | None = None) -> Traced:
        """Do as ``capture_as_eager``, without branches on data, but with numbers that stay inputs; raise `failed` if none can."""
        found = self._try_uncompiled(names)
        if (traced := _take_whole(found)) is not None:
            return traced
        assert not isinstance(found, tuple)
        raise failed or TraceError(f"the step cannot be captured with {', '.join(sorted(names))} as inputs") from found

    def try_capture(self, make: Make[T], values: Values | None = None) -> Made[T] | Exception | None:
        """Return the result or the exception of ``_trace``; another attempt may succeed."""
        names = values.names if isinstance(values, SymbolicNumbers) else ()
        self.later.begin_attempt(names, has_values=isinstance(values, DataBranches))
        try:
            return _trace(self.step, self.batch, values, make, self.later)
        except Exception as error:  # noqa: BLE001  # whatever stops it, the user gets one line
            return error

    def get_result(self, found: Made[T] | Exception | None, branches: DataBranches | None = None) -> Made[T]:
        """Return the result of an attempt, or raise its exception.

        Raises:
            TraceError: the capture failed, with the reason in one line; an exception of the user's own code is raised as it is.
        """
        assert found is not None  # with branches
        if isinstance(found, tuple):
            return found
        settles = isinstance(found, UnsettledError | CountingError)
        raise found if settles else build_failure(found, self.step, self.batch, branches)

    def _try_uncompiled(
        self, names: Collection[str] = (), *, looks: bool = False
    ) -> Made[private.JointWithDescriptors] | Exception | None:
        """Capture with modules told that they are not compiled, as far as possible; return as ``try_capture``.

        The true answer to a question helps only if the capture ends in code that it may choose, where values are missing.
        """
        informed, may_look = set(ASKING_FOR_COMPILERS), ask_for_values if looks else is_constant
        while True:
            with hide_compiling(informed, may_look) as asked:
                found = self._try_attempt(names)
            if isinstance(found, tuple | AskedForValuesError) or not asked:
                return found
            if _needs_values(found) and not names and not asked[-1].is_open:
                return found
            if found is None or isinstance(found, UnsettledError | CountingError) or get_own_message(found):
                return self._try_attempt(names)
            informed.add(asked[-1].text)

    def _try_attempt(self, names: Collection[str]) -> Made[private.JointWithDescriptors] | Exception | None:
        numbers = SymbolicNumbers(names) if names else None
        return self.try_capture(partial(_build_joint, values=numbers), numbers)

    def _try_with_branches(self, branches: DataBranches) -> Made[private.JointWithDescriptors] | Exception | None:
        return self.try_capture(partial(_build_joint, values=branches), branches)


def _needs_values(found: object) -> bool:
    """Return True if an attempt has ended because the capture had no values."""
    is_dependent = isinstance(found, Exception) and "data-dependent" in str(found).lower()
    return found is None or is_dependent or isinstance(found, NeedsValueError)


def _take_whole(found: Made[private.JointWithDescriptors] | Exception | None) -> Traced | None:
    """Return what was captured without branches on data; None if another way of capturing it may succeed.

    Raises:
        TraceError: no other way can, as the user's code or what it counts is the reason.
    """
    if isinstance(found, tuple):
        return *found, None
    if isinstance(found, UnsettledError | CountingError):
        raise found
    if found and (message := get_own_message(found)):
        raise TraceError(message) from found
    return None


def _run_once(step: TrainingStep, batch: Batch, trace: Callable[[], T]) -> T:
    with preserve_state(step, batch), silence_fakes():
        return trace()


def _build_joint(
    stack: ExitStack,
    module: fx.GraphModule,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    values: Values | None = None,
) -> private.JointWithDescriptors:
    # A training loop calls backward() outside autocast. Without the shape environment every size is a plain number.
    stack.enter_context(private.functorch_config.patch(backward_pass_autocast="off"))
    with values.follow() if values else nullcontext():
        return private.aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=True)


def _trace(step: TrainingStep, batch: Batch, values: Values | None, make: Make[T], later: LaterValues) -> Made[T] | None:
    """Return the result of `make` on `step` as Dynamo captures it, with its guards; None if it needs branches and has none.

    Args:
        values: the branches on data, or the numbers that stay inputs.
        later: the values that are known after the step.
    """
    while True:
        try:
            return _trace_with_later_values(step, batch, values, make, later)
        except (UnsettledError, CountingError):
            raise
        except Exception as error:
            if (_needs_values(error) and not later.has_values) or not later.begin_again():
                raise


def _trace_with_later_values(
    step: TrainingStep, batch: Batch, values: Values | None, make: Make[T], later: LaterValues
) -> Made[T] | None:
    """Do as ``_trace``, once."""
    args, kwargs = split_arguments(batch)
    with ExitStack() as stack:
        _enter_settings(stack)
        with ExitStack() as dynamo:
            dynamo.enter_context(forbid_python_random())
            requires_grad = dynamo.enter_context(follow_requires_grad_writes())
            write_data = write_data_in_place_where(lambda _: True, dynamo)
            replace_calls_where(lambda _: True, dynamo)
            drop_hooks = dynamo.enter_context(follow_removed_hooks())
            hooks = dynamo.enter_context(call_gradient_hooks(later))
            dynamo.enter_context(
                call_at_end(later.end, hooks.end, drop_hooks, requires_grad.end, write_replaced_buffers, write_data)
            )
            dynamo.enter_context(ignore_cudnn_flags(find_device(step, batch)))
            for follow in (
                follow_distributions,
                guard_missing_attributes,
                read_optimizers,
                read_numpy_floats,
                read_generic_aliases,
            ):
                dynamo.enter_context(follow())
            if values:
                dynamo.enter_context(values.take())
            matrices = dynamo.enter_context(decompose_sparse_matrices())
            generators = dynamo.enter_context(record_generators())
            effects = dynamo.enter_context(record_effects())
            dynamo.enter_context(take_values_later(later))
            frames = dynamo.enter_context(record_frames())
            with private.compiling_state(), private.enter_dynamo_phase("fullgraph_capture"):
                output = private.fullgraph_capture(step, args, kwargs)
        refuse_iterators(output, step)
        module = private.create_fx_graph_from_captured_output(output, step, args, kwargs)
        private.forget_compiled(output)
        matrices.add_parts(module)
        if values:
            values.settle(module)
        # Ops that ask for values can be captured only with the values of the batch: the caller tries that next.
        if not isinstance(values, DataBranches) and needs_values(module.graph):
            return None
        stack.enter_context(private.tracing(private.TracingContext(module.meta["fake_mode"])))
        stack.enter_context(remove_saved_tensors_hooks(module))
        with keep_in_graphs(EFFECTS), hide_sparse_buffers(module), keep_attributes(module), _restore_own_tensors(step):
            made = make(stack, module, args, kwargs)
        hooks.attach(made, step, output.graph_capture_output.f_globals)
        private.forget_saved_values()
        with disable_current_modes():  # guards look at real tensors
            args, kwargs = split_arguments(batch)
            local, scope = {"self": step, "args": args, "kwargs": kwargs}, output.graph_capture_output.f_globals
            with run_on_fakes(step, batch) as run, skip_metrics(step):
                others = [effect for effect in effects if effect.names.isdisjoint(later.stored)]
                counted = check_effects(others, list_guarded_names(output), run, local, scope)
            guards = _build_guards(output, frames, [*generators, *matrices.names], step, batch, later, requires_grad.aliased)
            if guards is not None and isinstance(values, SymbolicNumbers):
                guards = replace(guards, numbers=values.finish(local, scope, counted))
            return made, guards


@contextmanager
def _restore_own_tensors(step: nn.Module) -> Iterator[None]:
    """Put the tensors of modules back at the end: PyTorch leaves traced ones in a module that has several names."""
    tensors_of: list[dict[str, Any]] = [held for module in step.modules() for held in (module._parameters, module._buffers)]
    own = [dict(tensors) for tensors in tensors_of]
    try:
        yield
    finally:
        for tensors, before in zip(tensors_of, own, strict=True):
            tensors.update(before)


def _enter_settings(stack: ExitStack) -> None:
    """Enter the settings that steps are traced with."""
    stack.enter_context(torch.enable_grad())
    stack.enter_context(
        private.dynamo_config.patch(
            assume_static_by_default=True,
            automatic_dynamic_shapes=False,
            allow_rnn=True,
            ignore_logger_methods=find_logging_methods(),
            # Side effects are checked by planner.capture.frontend.effects.
            replay_side_effects=False,
            skip_nnmodule_hook_guards=False,
            **private.GRADIENT_SETTINGS,
            **private.GUARD_SETTINGS,
        )
    )


def _build_guards(
    output: private.CaptureOutput,
    frames: Frames,
    constants: Iterable[str],
    step: TrainingStep,
    batch: Batch,
    later: LaterValues,
    aliased: Collection[str],
) -> PythonGuards | None:
    """Return the guards of the capture; None if it is on a fake batch and never executed. Sharded parameters are fake too."""
    args, kwargs = split_arguments(batch)
    local = {"self": step, "args": args, "kwargs": kwargs}
    scope = output.graph_capture_output.f_globals
    if any(isinstance(value, FakeTensor) for value in (*step.buffers(), *list_leaves(batch))):
        return None
    try:
        guards = build_guards(output, frames, step, batch, constants, later.calls, aliased)
    except AssertionError as error:
        raise TraceError(
            f"the step reads a value that differs each time: {first_line(error)}; compute it outside of what is planned, and "
            "pass it with the batch as a tensor"
        ) from error
    for external in guards.external:
        if isinstance(external.value, torch.Tensor) and external.value.requires_grad and external.name not in aliased:
            name = make_readable(external.name, local, scope)
            raise TraceError(
                f"{name} requires a gradient, but is no parameter of the model, so a plan would not compute its gradient; "
                "make it a parameter of the model, or make the loss function an nn.Module that holds it"
            )
    return guards


def find_logging_methods() -> set[object]:
    """Return the methods that write to a log, including those added by libraries: they are not part of the graph."""
    levels = ("debug", "info", "warning", "error", "critical", "exception", "log")
    return {getattr(logging.Logger, name) for name in dir(logging.Logger) if name.startswith(levels)}


def find_device(model: nn.Module, batch: Batch) -> torch.device:
    """Return the one device that `model` and `batch` are on; raise TraceError if there are several, or none."""
    tensors = [*model.parameters(), *model.buffers(), *list_leaves(batch)]
    devices = {t.device for t in tensors if isinstance(t, torch.Tensor)}
    if len(devices) != 1:
        raise TraceError(f"model and batch must be on one device, found {', '.join(sorted(map(str, devices))) or 'no tensor'}")
    return devices.pop()
