"""Hooks on gradients that Dynamo does not follow: full backward hooks of modules, and hooks of tensors that record.

``h.register_hook(lambda gradient: gradient * 2)`` is a part of the graph. Where the hook changes Python objects or needs values,
Dynamo fails, and the capture begins again; the backward pass then calls the hook itself, at its place, by an op of the joint
graph (``rewrites.hook_calls``). What autograd and ``nn.Module`` do around hooks happens while AOTAutograd traces.

A hook that is made in the step (a lambda) is made again for each call (``rebuilt_values``). Memory that hooks allocate is not
counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, fx, nn
from torch.utils.hooks import BackwardHook

from planner.capture.frontend.later_values import LaterValues
from planner.capture.frontend.rebuilt_values import Find, build_finder
from planner.capture.guards.names import Scope
from planner.capture.rewrites.hook_calls import CALL_HOOK, HOOK, GradientHook
from planner.capture.source_lines import GRAPH_BREAK_ADVICE, find_current_line, format_location
from planner.graphs.errors import TraceError
from planner.torch_private import capture as private
from planner.torch_private.core import list_backward_pre_hooks, list_full_backward_hooks, pytree
from planner.torch_private.patches import bind_original, wrap


@dataclass(slots=True)
class GradientHooks:
    """The hooks of one capture.

    Attributes:
        local, scope: the variables by which names are resolved, once they are known.
        registered: those of tensors.
    """

    local: Scope = field(default_factory=dict)
    scope: Scope = field(default_factory=dict)
    registered: "list[_TensorHook]" = field(default_factory=list)
    _found: list[GradientHook] = field(default_factory=list)

    def trace(self, call: Callable[..., Any], gradients: Sequence[Tensor], returned: int) -> list[Tensor]:
        """Add an op that calls ``call(gradients)`` to the graph that is traced, and return its results."""
        self._found.append(GradientHook(call))
        made: list[Tensor] = CALL_HOOK(list(gradients), returned, len(self._found) - 1)
        return made

    def attach(self, made: object, step: nn.Module, scope: Scope) -> None:
        """Give the nodes of a joint graph their hooks, which find names in `step` and `scope`; refuse Inductor's kernels."""
        if self._found and not isinstance(made, private.JointWithDescriptors):
            raise TraceError(
                "the model has hooks on gradients that change Python objects or need values, or full backward hooks of modules, "
                "which Inductor's kernels do not call: remove them, or leave out kernels='inductor'"
            )
        self.local, self.scope = {"self": step}, scope
        graph = made.graph_module.graph if isinstance(made, private.JointWithDescriptors) else fx.Graph()
        for node in graph.find_nodes(op="call_function", target=CALL_HOOK):
            node.meta[HOOK] = self._found[int(node.args[2])]

    def end(self, _: Any, output: Any) -> None:
        """Find what the registered hooks are made of, as the graph ends: a name has its last value in a hook.

        Raises:
            TraceError: a hook reads what the step computes.
        """
        for hook in self.registered:
            if hook.output is output and output.graph.find_nodes(op="call_function", target=hook.register):  # not removed again
                try:
                    hook.find = build_finder(hook.output, hook.variable)
                except TraceError as error:
                    raise TraceError(
                        f"{hook.where} registers a hook that changes Python objects or needs values, and that reads or changes "
                        f"{error}: let it read what exists before the step; or {GRAPH_BREAK_ADVICE}"
                    ) from error
            hook.output = hook.variable = None


@dataclass(slots=True, eq=False)
class _TensorHook:
    """A hook of a tensor of the step.

    Attributes:
        output, variable: the graph of the frame, and the variable of the hook, until the graph ends.
        where: the line that registers it.
        find: returns the hook.
    """

    hooks: GradientHooks
    output: Any
    variable: Any
    where: str
    find: Find | None = None

    def register(self, tensor: Tensor) -> Tensor:
        """Register the hook, while AOTAutograd traces."""
        tensor.register_hook(self._trace)
        return tensor

    def _trace(self, gradient: Tensor) -> Tensor:
        return self.hooks.trace(self._call, [gradient], 1)[0]

    def _call(self, gradients: Sequence[Tensor]) -> list[Tensor] | None:
        assert self.find is not None
        changed = self.find(self.hooks.local, self.hooks.scope)(*gradients)
        return None if changed is None else [changed]


@dataclass(frozen=True, slots=True, eq=False)
class _ModuleHooks:
    """The full backward hooks of a module."""

    hooks: GradientHooks
    module: nn.Module

    def build(self) -> BackwardHook:
        """Return what ``nn.Module`` puts around a call, while AOTAutograd traces."""
        around = [
            (partial(self._trace, list_hooks),) if list_hooks(self.module) else ()
            for list_hooks in (list_full_backward_hooks, list_backward_pre_hooks)
        ]
        return BackwardHook(self.module, *around)

    def _trace(self, list_hooks: Any, _: nn.Module, *gradients: Any) -> tuple[Tensor | None, ...] | None:
        leaves, structure = pytree.tree_flatten(gradients)
        returned = sum(gradient is not None for gradient in gradients[0])
        call = partial(self._call, list_hooks, [leaf is None for leaf in leaves], structure)
        made = iter(self.hooks.trace(call, [leaf for leaf in leaves if leaf is not None], returned))
        return tuple(None if gradient is None else next(made) for gradient in gradients[0]) if returned else None

    def _call(self, list_hooks: Any, missing: Sequence[bool], structure: Any, given: Sequence[Tensor]) -> list[Tensor]:
        tensors = iter(given)
        changed, *others = pytree.tree_unflatten([None if each else next(tensors) for each in missing], structure)
        for hook in list_hooks(self.module):
            found = hook(self.module, changed, *others)
            changed = changed if found is None else found
        return [gradient for gradient in changed if gradient is not None]


@contextmanager
def call_gradient_hooks(later: LaterValues) -> Iterator[GradientHooks]:
    """Let the backward pass call hooks on gradients that Dynamo does not follow."""
    hooks = GradientHooks()
    create = staticmethod(bind_original(private.BackwardHookVariable.create, partial(_create, hooks)))
    register = private.find_tensor_method("register_hook")
    with wrap(*register, partial(_follow_or_call, later, hooks)), patch.object(private.BackwardHookVariable, "create", create):
        yield hooks


def _create(hooks: GradientHooks, create: Any, tx: Any, module: Any, *given: Any) -> Any:
    if module.source is None:
        return create(tx, module, *given)
    proxy = tx.output.create_proxy("call_function", _ModuleHooks(hooks, module.value).build, (), {})
    proxy.node.meta["example_value"] = BackwardHook(None, (), ())
    return private.BackwardHookVariable(proxy, module, *given)


def _follow_or_call(later: LaterValues, hooks: GradientHooks, follow: Any, tensor: Any, tx: Any, hook: Any) -> Any:
    location = tx.f_code, tx.instruction_pointer
    if tensor.source is not None or location not in later.called:
        # Nothing in a hook is known after the forward pass, or left out.
        with later.refuse(), private.dynamo_config.patch(ignore_logger_methods=set()):
            try:
                return follow(tensor, tx, hook)
            except Exception:
                if tensor.source is not None:
                    raise
        later.call_at(location)
    if isinstance(hook, private.GetAttrVariable):  # a method of a container, whose present items do not matter
        later.read_owner_later(hook.obj.source)
    made = _TensorHook(hooks, tx.output, hook, format_location(find_current_line()))
    hooks.registered.append(made)
    proxy = tensor.as_proxy()
    tensor.proxy = proxy.tracer.create_proxy("call_function", made.register, (proxy,), {})
    tensor.proxy.node.meta["example_value"] = proxy.node.meta["example_value"]
    tensor.synchronize_attributes(tx)
    return private.RemovableHandleVariable(mutation_type=private.ValueMutationNew(), idx=tensor.proxy.node)
