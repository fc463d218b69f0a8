"""Rewrites of a joint graph that make explicit what a training step does with its outputs.

AOTAutograd's joint graph is functional: a mutated buffer is one more output, a gradient may be a view of another tensor, and a
parameter with two names may get two gradients. What PyTorch's runtime would do with these outputs becomes nodes, so that it is
planned and counted.

A write comes after the last read of the old value, of which the backward pass reads a copy, so that an op of the forward pass
that is executed late still reads what eager PyTorch reads.

Writes to trained parameters were refused before: AOTAutograd adds a gradient for what such a parameter becomes, as if a loss
depended on it. No loss does, so that gradient is removed (``drop_tangents_of_writes``).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from planner.capture.rewrites.batch_norms import find_ignored_inputs
from planner.capture.rewrites.hook_calls import CALL_HOOK
from planner.capture.rewrites.in_place_updates import list_written, update_in_place
from planner.graphs.errors import TraceError
from planner.torch_private import capture as private
from planner.torch_private.core import OpOverload, auto_functionalized, detect_fake_mode, pytree, with_effects

aten = torch.ops.aten

# Namespaces whose operators have tags that tell whether they draw random numbers.
KNOWN_NAMESPACES = {"aten", "inductor", "mkldnn", "onednn", "planner", "prims", "quantized"}

# Ops that raise an error depending on their inputs, as in eager PyTorch, and return nothing.
ASSERTIONS = (aten._assert_async.default, aten._assert_async.msg)
CHECKS = (aten._linalg_check_errors.default, *ASSERTIONS)
# Those, and ops that call Python: they run once, in program order.
EFFECTS = (*CHECKS, CALL_HOOK)


def fix_outputs(graph: fx.Graph) -> None:
    """Make mutations, the layout of gradients and dead code explicit in `graph`, and drop unnecessary copies, in place.

    Afterwards the output node lists the loss, the extra outputs and one gradient per input, each gradient a storage of its own
    with the strides that ``AccumulateGrad`` keeps without a copy.

    Raises:
        TraceError: the loss is no scalar, or no trainable parameter reaches it; or a tensor is sparse.
    """
    unwrap_checks(graph)
    check_outputs(graph)
    _drop_unnecessary_copies(graph)
    _write_back_mutations(graph, find_first_backward(graph))
    update_in_place(graph)
    _separate_gradients(graph)
    remove_dead_code(graph)


def unwrap_checks(graph: fx.Graph) -> None:
    """Replace checks that pass on tokens, which order effects, by plain calls in `graph`, in place.

    They run once and in their place, as all ops that are not recomputed, so no token is needed: inputs and outputs that are
    tokens have no value any more. Before torch 2.13 checks are plain calls anyway.
    """
    for check in CHECKS:
        for node in graph.find_nodes(op="call_function", target=check):
            node.meta.setdefault("val", None)
    effects = graph.find_nodes(op="call_function", target=with_effects)
    if not effects or any(node.args[1] not in CHECKS for node in effects):
        return
    for node in effects:
        token, check, *given = node.args
        with graph.inserting_before(node):
            plain = graph.call_function(check, tuple(given), node.kwargs)
        plain.meta = {**node.meta, "val": None}
        for item in list(node.users):
            item.replace_all_uses_with(token)
            graph.erase_node(item)
        graph.erase_node(node)
    kinds = private.ForwardTokenAOTOutput | private.BackwardTokenAOTOutput
    _set_outputs(graph, [(None if isinstance(desc, kinds) else value, desc) for value, desc in list_outputs(graph)])
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], private.ForwardTokenAOTInput | private.BackwardTokenAOTInput):
            node.meta["val"] = None


def check_outputs(graph: fx.Graph) -> None:
    """Raise TraceError if a joint graph is no training step, as ``fix_outputs``."""
    check_layouts(graph)
    _check_loss(graph)
    _check_gradients(graph)


def list_outputs(graph: fx.Graph) -> list[tuple[object, private.AOTOutput]]:
    """Return the outputs of `graph`, each with its descriptor."""
    node = graph.output_node()
    values: list[object] = list(node.args[0])  # type: ignore[arg-type]
    return list(zip(values, node.meta["desc"], strict=True))


def get_fake(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of `node`."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def get_storage(value: torch.Tensor) -> int:
    """Return the identity of the storage of a (fake) tensor."""
    identity: int = value.untyped_storage()._cdata
    return identity


def is_dense(value: torch.Tensor) -> bool:
    """Return True if the elements of `value` fill its storage, each at its own position."""
    whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return whole and bool(aten.is_non_overlapping_and_dense.default(value))


def is_same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if `a` and `b` have the same shape and order of elements."""
    return a.shape == b.shape and all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def find_operator(node: fx.Node) -> OpOverload | None:
    """Return the operator that `node` calls, also where it calls it on copies of what it writes to; None if there is none."""
    called = node.args[0] if node.target is auto_functionalized else node.target
    return called if isinstance(called, OpOverload) else None


def is_random(node: fx.Node) -> bool:
    """Return True if `node` draws from the generator."""
    called = find_operator(node)
    if called is None or torch.Tag.nondeterministic_seeded not in called.tags:
        return False
    if "scaled_dot_product" not in called.name():
        return True
    position = [argument.name for argument in called._schema.arguments].index("dropout_p")
    dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    # The CPU kernels draw nothing at 0; kernels of other devices may.
    return bool(dropout) or get_fake(node.all_input_nodes[0]).device.type != "cpu"


def _check_loss(graph: fx.Graph) -> None:
    losses = [value for value, desc in list_outputs(graph) if isinstance(desc, private.PlainAOTOutput) and desc.idx == 0]
    if not losses or not isinstance(losses[0], fx.Node):
        raise TraceError("the loss is not a tensor computed from the model: return a scalar tensor first")
    shape = tuple(get_fake(losses[0]).shape)
    if get_fake(losses[0]).numel() != 1:
        raise TraceError(f"the loss has shape {shape}, not one element: reduce it (for example with .mean()) before returning it")
    supported = private.PlainAOTOutput | private.GradAOTOutput | private.InputMutationAOTOutput
    others = [desc for value, desc in list_outputs(graph) if value is not None and not isinstance(desc, supported)]
    if any(isinstance(desc, private.ForwardTokenAOTOutput | private.BackwardTokenAOTOutput) for desc in others):
        effects = ", ".join({str(node.args[1]) for node in graph.find_nodes(op="call_function", target=with_effects)})
        raise TraceError(
            f"the step has an op whose effects no graph can hold ({effects}): call it before or after the step, on what the "
            "step returns"
        )
    if others:
        raise TraceError(f"the step returns {others[0]!r}, a kind of output that is not supported: return plain tensors")


def _check_gradients(graph: fx.Graph) -> None:
    gradients = [value for value, desc in list_outputs(graph) if isinstance(desc, private.GradAOTOutput)]
    if not gradients:
        raise TraceError("the loss does not depend on any parameter with requires_grad=True: there is nothing to train")
    if not any(isinstance(value, fx.Node) for value in gradients):
        raise TraceError("no parameter with requires_grad=True gets a gradient from the loss: there is nothing to train")


def check_layouts(graph: fx.Graph) -> None:
    """Raise TraceError if a tensor of `graph` is sparse."""
    for node in graph.nodes:
        if any(value.layout is not torch.strided for value in list_tensors(node.meta.get("val"))):
            gradients = [
                desc.grad_of for value, desc in list_outputs(graph) if value is node and isinstance(desc, private.GradAOTOutput)
            ]
            what = f"the gradient of {_name(gradients[0])}" if gradients else f"the result of {node.target}"
            raise TraceError(
                f"{what} is sparse, which cannot be planned: leave out sparse=True of nn.Embedding and the like (the gradient "
                "is then dense, for any optimizer), or make the tensor dense"
            )


def drop_tangents_of_writes(graph: fx.Graph) -> None:
    """Remove the gradients of trained parameters that a step writes to, in place; the loop gives none to what they become.

    A joint graph returns such parameters with gradients of their own, to which it adds those of what reads them.

    Raises:
        TraceError: such a gradient is more than added.
    """
    for tangent, written in find_tangents_of_writes(graph).items():
        for user in list(tangent.users):
            others = [arg for arg in user.args if arg is not tangent]
            if user.op == "output":
                _set_outputs(graph, [(None if value is tangent else value, desc) for value, desc in list_outputs(graph)])
            elif user.target is aten.add.Tensor and len(others) == 1 and isinstance(others[0], fx.Node):
                user.replace_all_uses_with(others[0])
                graph.erase_node(user)
            else:
                raise TraceError(
                    f"the step itself writes to {_name(written)}, and its gradient passes the write: do that after "
                    "optimizer.step(), under torch.no_grad(), or train with planner.checkpoint(model, budget=...)"
                )
        graph.erase_node(tangent)


def check_writes(graph: fx.Graph) -> None:
    """Raise TraceError if a step writes to trained parameters: Inductor's kernels take gradients of what these become."""
    for written in find_tangents_of_writes(graph).values():
        raise TraceError(
            f"the step itself writes to {_name(written)}, which is not planned with Inductor's kernels: leave out "
            "kernels='inductor', or do that after optimizer.step(), under torch.no_grad()"
        )


def find_tangents_of_writes(graph: fx.Graph) -> dict[fx.Node, private.AOTInput]:
    """Return the incoming gradients of inputs that a step writes to, with these inputs."""
    given = {node: node.meta["desc"] for node in graph.find_nodes(op="placeholder")}
    of = {node: desc.output for node, desc in given.items() if isinstance(desc, private.TangentAOTInput)}
    return {node: desc.mutated_input for node, desc in of.items() if isinstance(desc, private.InputMutationAOTOutput)}


def _name(desc: private.AOTInput) -> str:
    return repr(desc.target).replace("model.", "", 1) if isinstance(desc, private.ParamAOTInput) else "an input"


def find_first_backward(graph: fx.Graph) -> fx.Node:
    """Return the first node that depends on the gradient of an output: the backward pass is all nodes from there on.

    It is the output node if the backward pass computes nothing: the incoming gradients are its results.
    """
    seen = {node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["desc"], private.TangentAOTInput)}
    nodes: Iterable[fx.Node] = graph.nodes
    return next((node for node in nodes if not seen.isdisjoint(node.all_input_nodes)), graph.output_node())


def _drop_unnecessary_copies(graph: fx.Graph) -> None:
    """Make readers of a copy read the original.

    Autograd copies what its backward pass needs before an in-place operation overwrites it (``hardtanh_``); here nothing but the
    step's inputs is overwritten. A copy of a part of a storage, or in another layout, stays.
    """
    static = {get_storage(get_fake(n)) for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)}
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        copied = node.args[0]
        assert isinstance(copied, fx.Node)
        value, result = get_fake(copied), get_fake(node)
        same = value.untyped_storage().nbytes() == result.untyped_storage().nbytes() and value.stride() == result.stride()
        # Other nodes know a view of the copy, or a copy that is returned, by its storage.
        shared = any(get_storage(result) in map(get_storage, list_tensors(user.meta.get("val"))) for user in node.users)
        if same and not shared and graph.output_node() not in node.users and get_storage(value) not in static:
            node.replace_all_uses_with(copied)
            graph.erase_node(node)


def list_tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in the value of a node."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _write_back_mutations(graph: fx.Graph, boundary: fx.Node) -> None:
    """Replace each returned new value of an input by a ``copy_`` into it, after the last read of the old value."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    kept = []
    for value, desc in list_outputs(graph):
        if not isinstance(desc, private.InputMutationAOTOutput):
            kept.append((value, desc))
            continue
        assert isinstance(value, fx.Node)
        target = next(n for n in graph.find_nodes(op="placeholder") if n.meta["desc"] == desc.mutated_input)
        # Readers in the backward pass would see the new value.
        late = [user for user in target.users if position[user] >= position[boundary] and target not in find_ignored_inputs(user)]
        if late:
            _save_old_value(graph, target, late)
        readers = [user for user in _iterate_readers(target) if position.get(user, 0) < position[boundary]]
        last = max((*readers, value), key=lambda node: position.get(node, 0))
        with graph.inserting_after(last):
            write = graph.call_function(aten.copy_.default, (target, value))
        write.meta = {"val": target.meta["val"]}
        position[write] = position[last]
    _set_outputs(graph, kept)


def _save_old_value(graph: fx.Graph, target: fx.Node, late: list[fx.Node]) -> None:
    """Make the backward pass read a copy of an input that the forward pass overwrites."""
    copy = call_before(list(graph.find_nodes(op="placeholder"))[-1].next, aten.clone.default, target)
    for user in late:
        user.replace_input_with(target, copy)


def _iterate_readers(node: fx.Node) -> Iterable[fx.Node]:
    """Yield the users of `node` and of its views."""
    for user in node.users:
        yield user
        value = user.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and get_storage(value) == get_storage(get_fake(node))
            and user.target is not aten.copy_.default
        ):
            yield from _iterate_readers(user)


def _separate_gradients(graph: fx.Graph) -> None:
    """Give each gradient a storage of its own in the layout of its input, as ``AccumulateGrad`` would by cloning."""
    inputs = {node.meta["desc"]: node for node in graph.find_nodes(op="placeholder")}
    taken = {get_storage(get_fake(node)) for node in inputs.values() if isinstance(node.meta.get("val"), torch.Tensor)}
    taken |= {
        get_storage(get_fake(v))
        for v, desc in list_outputs(graph)
        if isinstance(v, fx.Node) and not isinstance(desc, private.GradAOTOutput)
    }
    fixed: list[tuple[object, private.AOTOutput]] = []
    for value, desc in list_outputs(graph):
        if isinstance(desc, private.GradAOTOutput) and isinstance(value, fx.Node):
            if desc.grad_of not in inputs:
                raise TraceError(
                    f"{_name(desc.grad_of)} is trained, and is made of other tensors, such as a quantized weight: freeze it "
                    "(requires_grad_(False)), or hold it as a plain tensor"
                )
            if get_storage(get_fake(value)) in taken or not is_layout_kept(get_fake(value), get_fake(inputs[desc.grad_of])):
                layout = choose_memory_format(get_fake(inputs[desc.grad_of]))
                value = call_before(graph.output_node(), aten.clone.default, value, memory_format=layout)
            taken.add(get_storage(get_fake(value)))
        fixed.append((value, desc))
    _set_outputs(graph, fixed)


def is_layout_kept(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    """Return True if ``AccumulateGrad`` keeps the layout: strides of the variable if it is dense, else contiguous."""
    dense = aten.is_non_overlapping_and_dense.default(variable)
    return is_same_layout(gradient, variable) if dense else gradient.is_contiguous()


def choose_memory_format(variable: torch.Tensor) -> torch.memory_format:
    """Return the memory format with which a clone has the layout of a gradient of `variable`."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(variable.dim(), torch.contiguous_format)
    return wanted if variable.is_contiguous(memory_format=wanted) else torch.contiguous_format


def call_before(place: fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a node before `place` that calls `target`, and return it with its fake value."""
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args, kwargs)
    values = [get_fake(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        node.meta = {"val": target(*values, **kwargs)}
    return node


def _set_outputs(graph: fx.Graph, pairs: list[tuple[object, private.AOTOutput]]) -> None:
    node = graph.output_node()
    node.args = ([value for value, _ in pairs],)  # type: ignore[misc]
    node.meta["desc"] = [desc for _, desc in pairs]


def remove_dead_code(graph: fx.Graph) -> None:
    """Remove nodes that no output needs, except writes, checks and random ops (which advance the generator)."""
    for node in reversed(list(graph.nodes)):
        needed = node.users or node.target in EFFECTS or list_written(node) or is_random(node)
        if node.op == "call_function" and not needed:
            graph.erase_node(node)
