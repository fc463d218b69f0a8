"""Memory in use outside of one graph of a compiled model while a step runs; each storage is counted once, by identity.

Graphs without a plan count too. Before, a piece that no gradient flows through kept its input uncounted, and a network for
differential equations exceeded its budget by the bytes of its batch.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.rewrites.outputs import list_tensors
from planner.capture.rewrites.sparse_products import list_strided_parts
from planner.graphs.ir import Graph
from planner.graphs.schedule import Schedule, count_kept_bytes
from planner.graphs.simulate import simulate
from planner.graphs.walks import walk
from planner.torch_private.capture import TangentAOTInput, boxed_nop, is_backward_node
from planner.torch_private.core import disable_current_modes
from planner.train.backend.planned_graph import is_plan

# Bytes by the identity of a storage.
Storages = dict[int, int]


class UnplannedGraph:
    """A graph that runs op by op, as AOTAutograd's ``aot_eager`` does.

    Sizes are those of fake tensors. Kernels' own memory, values inside of branches, and sizes that depend on data are not known.

    Attributes:
        forward, backward: compilers of its passes, for AOTAutograd.
        peak_bytes: the most bytes that its passes take at once beside its inputs, as far as they are compiled.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._kept_bytes = 0

    def forward(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Return the forward pass."""
        self.peak_bytes, self._kept_bytes = pass_bytes(module.graph)
        return boxed_nop(module, examples)

    def backward(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Return the backward pass."""
        placeholders = module.graph.find_nodes(op="placeholder")
        tangents = [node for node in placeholders if isinstance(node.meta.get("desc"), TangentAOTInput)]
        backward_bytes = pass_bytes(module.graph)[0] + sum(_collect_known_sizes(*tangents).values())
        self.peak_bytes = max(self.peak_bytes, self._kept_bytes + backward_bytes)
        return boxed_nop(module, examples)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Code that Dynamo leaves out.

    Attributes:
        peak_bytes: about the most that it takes.
    """

    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PassStorages:
    """The storages that one forward pass of a graph uses.

    Attributes:
        inputs: storages that it read: parameters, buffers, inputs.
        trained: storages of `inputs` that will have a ``grad`` and are not outputs of another graph.
        held: storages that autograd held for ops outside of graphs, that graphs without a plan have read or made before, or of
            the model that is called.
        made: storages of its results, without its inputs.
        unplanned: its graph, if that runs without a plan; or the code behind the last graph, if Dynamo has left it out.
        followed_by: the passes of graphs without a plan between this one and the next planned one.
        identities: references that keep the ids of storages from being reused.
    """

    inputs: Storages
    trained: Storages
    held: Storages
    made: Storages = field(default_factory=dict)
    unplanned: UnplannedGraph | LeftOut | None = None
    followed_by: list["PassStorages"] = field(default_factory=list)
    identities: list[StorageWeakRef] = field(default_factory=list)

    @classmethod
    def of(
        cls, inputs: Iterable[object], unplanned: UnplannedGraph | None = None, outside: Collection[Any] = ()
    ) -> "PassStorages":
        """Return the storages that are known before the pass; what autograd holds behind the nodes `outside` does not count."""
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        trained = [t for t in tensors if t.requires_grad and t.grad_fn is None]
        with disable_current_modes():  # an alias that autograd makes of a saved output is not part of the capture
            behind = _iterate_nodes_behind([t.grad_fn for t in tensors if t.grad_fn is not None], outside)
            held = [tensor for node in behind for tensor in _list_saved(node)]
        return cls(
            collect_storages(tensors),
            collect_storages(trained),
            collect_storages(held),
            unplanned=unplanned,
            identities=[StorageWeakRef(t.untyped_storage()) for t in (*tensors, *held)],
        )

    def add_outputs(self, outputs: Iterable[object]) -> None:
        """Add the outputs of the pass."""
        tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
        self.made.update({s: size for s, size in collect_storages(tensors).items() if s not in self.inputs})
        self.identities.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)

    def shrink(self, excess_bytes: int) -> "PassStorages":
        """Return the pass of code that Dynamo has left out with `excess_bytes` less."""
        assert isinstance(self.unplanned, LeftOut)
        return replace(self, unplanned=LeftOut(max(0, self.unplanned.peak_bytes - excess_bytes)))

    def hold(self, other: "PassStorages") -> None:
        """Add the inputs and outputs of a pass without a plan that are still in memory."""
        alive = {identity.cdata for identity in other.identities if not identity.expired()}
        self.held.update({s: size for s, size in (other.inputs | other.made).items() if s in alive})
        self.identities.extend(other.identities)


def pass_bytes(graph: fx.Graph) -> tuple[int, int]:
    """Return the most bytes that the values of `graph` take at once beside its inputs, and the bytes of its outputs."""
    nodes = list(graph.nodes)
    inputs = {storage for node in graph.find_nodes(op="placeholder") for storage in _collect_known_sizes(node)}
    used = [_collect_known_sizes(node, *node.all_input_nodes) for node in nodes]
    last_use = {storage: i for i, found in enumerate(used) for storage in found}
    live: Storages = {}
    peak_bytes = 0
    for i, found in enumerate(used[:-1]):
        live |= {storage: size_bytes for storage, size_bytes in found.items() if storage not in inputs}
        peak_bytes = max(peak_bytes, sum(live.values()))
        for storage in found:
            if last_use[storage] == i:
                live.pop(storage, None)
    return peak_bytes, sum(live.values())


def _collect_known_sizes(*nodes: fx.Node) -> Storages:
    """Return the storages of the values of `nodes` whose sizes are known."""
    values = (value for node in nodes for value in list_tensors(node.meta.get("val")))
    return collect_storages(v for v in values if v.layout is torch.strided and all(isinstance(size, int) for size in v.shape))


def find_unread(model: Iterable[torch.Tensor], runs: Sequence[PassStorages]) -> PassStorages | None:
    """Return a pass that reads the tensors of `model` that none of `runs` reads; None if there are none."""
    read = _unite(run.inputs for run in _list_all_passes(runs))
    found = [t for t in model if t.untyped_storage()._cdata not in read]
    return PassStorages.of(found) if found else None


def collect_storages(tensors: Iterable[torch.Tensor]) -> Storages:
    """Return the storages of `tensors` with their allocated bytes."""
    found: Storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = compute_allocated_bytes(storage.nbytes(), tensor.device)
    return found


def compute_bytes_of_others(runs: Sequence[PassStorages], index: int, kept_bytes: Sequence[int]) -> int:
    """Return the peak memory, in bytes, outside a graph's own plan while it runs forward or backward.

    Args:
        runs: the forward passes of a step, in order.
        index: index of the forward pass in question.
        kept_bytes: for each earlier run, the bytes that its plan keeps between the passes, without static memory.
    """
    own = runs[index].inputs
    passes = _list_all_passes(runs)
    made = _unite(run.made for run in passes)
    static = _unite(s for run in passes for s in (run.inputs, run.held))
    there = sum(size for s, size in static.items() if s not in own and s not in made)
    # Tensors made by an earlier graph and read by this one would be counted twice.
    earlier = _unite(run.made for run in runs[:index])
    there += sum(kept_bytes[:index]) - sum(size for s, size in earlier.items() if s in own)
    # Backward: later graphs have made gradients of parameters and of earlier graphs' outputs.
    following = _list_all_passes(runs[index:])[1:]
    grads = _unite(run.trained for run in following)
    later, read = (_unite(run.inputs for run in some) for some in (following, passes))
    waiting = sum(size for s, size in earlier.items() if s in later or s not in read)
    return there + waiting + sum(size for s, size in grads.items() if s not in made)


def compute_peak_bytes(plans: Sequence[tuple[Graph, Schedule]], runs: Sequence[PassStorages]) -> int:
    """Return the peak of the allocated bytes in a step whose planned graphs follow these schedules."""
    kept = [count_kept_bytes(*plan) for plan in plans]
    peaks = [simulate(*plan).peak_bytes + compute_bytes_of_others(runs, i, kept) for i, plan in enumerate(plans)]
    return max(*peaks, compute_peak_of_unplanned(runs, kept))


def compute_peak_of_unplanned(runs: Sequence[PassStorages], kept_bytes: Sequence[int]) -> int:
    """Return the peak memory, in bytes, of a step while its graphs without a plan run; 0 if there are none."""
    peak_bytes = 0
    passes = _list_all_passes(runs)
    made = _unite(run.made for run in passes)
    static = _unite(s for run in passes for s in (run.inputs, run.held))
    there = sum(size for s, size in static.items() if s not in made)
    for i, run in enumerate(runs):
        for j, here in enumerate(run.followed_by):
            assert here.unplanned is not None
            earlier = _unite(before.made for before in run.followed_by[:j])
            following = [*run.followed_by[j + 1 :], *_list_all_passes(runs[i + 1 :])]
            grads = _unite(after.trained for after in following)
            beside = sum(kept_bytes[: i + 1]) + sum((earlier | grads).values())
            peak_bytes = max(peak_bytes, there + beside + here.unplanned.peak_bytes)
    return peak_bytes


def count_bytes_beside_requests(runs: Sequence[PassStorages]) -> int:
    """Return the bytes in use in a step that its graphs have not requested.

    These are inputs that no graph has made, tensors that autograd holds for other ops, and gradients of results that no graph
    reads.
    """
    read, made = _unite(run.inputs for run in _list_all_passes(runs)), _unite(run.made for run in runs)
    return sum(list_sizes_beside_requests(runs)) + sum(size for s, size in made.items() if s not in read)


def list_sizes_beside_requests(runs: Sequence[PassStorages]) -> list[int]:
    """Return the bytes of each storage that graphs of a step read but have not made, or that autograd holds for other ops."""
    passes = _list_all_passes(runs)
    made = _unite(run.made for run in passes)
    there = _unite(s for run in passes for s in (run.inputs, run.held))
    return [size for s, size in there.items() if s not in made]


def _list_all_passes(runs: Iterable[PassStorages]) -> list[PassStorages]:
    """Return `runs` with the passes of graphs without a plan, in their order."""
    return [each for run in runs for each in (run, *run.followed_by)]


def _unite(parts: Iterable[Mapping[int, int]]) -> Storages:
    found: Storages = {}
    for part in parts:
        found.update(part)
    return found


def find_left_out(
    runs: Sequence[PassStorages], nodes: Iterable[Any], outside: Collection[Any], add: Callable[[PassStorages], None]
) -> PassStorages | None:
    """Return the pass of what Dynamo has left out between `runs` and the results that `nodes` made; None if it keeps nothing.

    What the backward pass of a custom Function saves again, as a handwritten checkpoint does, is given to `add` when it has run.
    """
    passes = _list_all_passes(runs)
    counted = _unite(s for run in passes for s in (run.inputs, run.held, run.made))
    behind = list(_iterate_nodes_behind(nodes, outside))
    for node in behind:
        if hasattr(node, "_forward_cls") and not is_backward_node(node):
            _Recomputation(counted, add).watch(node)
    others = _unite(run.trained for run in passes)
    trained = collect_storages(node.variable for node in behind if hasattr(node, "variable"))
    trained = {s: size for s, size in trained.items() if s not in others}
    return _build_left_out(counted, trained, collect_storages(tensor for node in behind for tensor in _list_saved(node)))


def _build_left_out(counted: Storages, trained: Storages, held: Storages) -> PassStorages | None:
    """Return the pass of what Dynamo has left out, which keeps what is `held`; None if it keeps nothing that is not `counted`.

    Its peak is about what it keeps, the gradients of its parameters, and two more tensors while these are computed.
    """
    kept = [size for s, size in held.items() if s not in counted and s not in trained]
    peak_bytes = sum(kept) + 2 * max(kept, default=0) + sum(trained.values())
    return PassStorages(trained, trained, {}, unplanned=LeftOut(peak_bytes)) if kept else None


@dataclass(slots=True)
class _Recomputation:
    """What a node of autograd saves in its backward pass, for a backward pass in it.

    Attributes:
        counted: storages that count already.
        add: takes the pass of it.
    """

    counted: Storages
    add: Callable[[PassStorages], None]
    trained: Storages = field(default_factory=dict)
    held: Storages = field(default_factory=dict)

    def watch(self, node: Any) -> None:
        """Watch the backward pass of `node`."""
        hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
        node.register_prehook(lambda _: hooks.__enter__())
        node.register_hook(lambda _, incoming: self._end(hooks, incoming))

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        (self.trained if tensor.is_leaf and tensor.requires_grad else self.held).update(collect_storages([tensor]))
        return tensor

    def _end(self, hooks: saved_tensors_hooks, incoming: Sequence[torch.Tensor | None]) -> None:
        hooks.__exit__()
        if self.held:
            # Kernels make them dense.
            self.held.update({each.untyped_storage()._cdata: each.nbytes for each in incoming if each is not None})
        if (found := _build_left_out(self.counted, self.trained, self.held)) is not None:
            self.add(found)


def shrink_left_out(runs: Sequence[PassStorages], excess_bytes: int) -> int:
    """Count `excess_bytes` less for what Dynamo has left out of `runs`; return what it takes, 0 if it takes nothing."""
    found_bytes = 0
    for run in runs:
        for i, each in enumerate(run.followed_by):
            if isinstance(each.unplanned, LeftOut):
                found_bytes = max(found_bytes, each.unplanned.peak_bytes)
                run.followed_by[i] = each.shrink(excess_bytes)
    return found_bytes


def _iterate_nodes_behind(nodes: Iterable[Any], outside: Collection[Any] = ()) -> Iterator[Any]:
    """Yield the autograd nodes behind `nodes`, and these, until one of `outside`."""
    allowed = partial(filter, lambda node: node is not None and node not in outside)
    return walk(allowed(nodes), lambda node: allowed(following for following, _ in node.next_functions))


def _list_saved(node: Any) -> list[torch.Tensor]:
    """Return the saved tensors of an autograd node; none of a planned graph's."""
    saved = list(_iterate_saved(node))
    return [] if any(map(is_plan, saved)) else saved


def _iterate_saved(node: Any) -> Iterator[torch.Tensor]:
    for name in dir(node):
        if name.startswith("_saved_") or name in ("saved_tensors", "_tensors_no_vc_check"):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue  # freed by a backward pass
            values = value if isinstance(value, list | tuple) else (value,)
            yield from (part for v in values if isinstance(v, torch.Tensor) for part in list_strided_parts(v))
