"""Measured time, workspace and sizes of ops one by one, each on tensors that are made for it.

For graphs whose inputs are not at hand, or must not be written to: of the model nothing is read, nothing is changed, and
no more is in memory than one op needs. What was measured once in a process is known to all graphs after, so that blocks
that repeat, and graphs that are compiled again, cost nothing.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphs.capture.eager_ops import called
from graphs.capture.layouts import laid_out, read_strides
from graphs.capture.lower import Capture
from graphs.capture.outputs import items
from graphs.capture.program import Composed
from graphs.capture.statics import allocated_bytes
from graphs.cost.allocator import Mark, segment_peaks
from graphs.cost.devices import Device, op_time_s, workspace_bytes
from graphs.cost.made_up import Like, least_time_s
from graphs.cost.roofline import modelled_composed
from graphs.ir import Graph
from graphs.torch_private.core import disable_current_modes, no_python_dispatcher, profiler_enabled, pytree


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one op takes.

    Attributes:
        time_s: least of some executions.
        workspace_bytes: besides inputs and outputs.
        output_bytes: what the allocator hands out for each output.
        outputs: what they really are, which fake tensors do not always know; None for what is not there.
    """

    time_s: float
    workspace_bytes: int
    output_bytes: tuple[int, ...]
    outputs: tuple[Like | None, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """One op that can be executed.

    Attributes:
        target, args, kwargs: what is called, with a number for each tensor.
        tensors: by number.
        paths: where its outputs stand in its value, as in ``Call.outputs``.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Like, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, node: fx.Node, paths: tuple[str, ...], known: Mapping[fx.Node, Like]) -> "_Work":
        """The op of `node`.

        Args:
            known: inputs that are known better than by their fake values.
        """
        numbers: dict[fx.Node, _Number] = {}

        def number(arg: fx.Node) -> Any:
            value = arg.meta["val"] if "val" in arg.meta else getattr(arg.graph.owning_module, str(arg.target))
            if not isinstance(value, torch.Tensor):
                return value
            tensors.setdefault(arg, known.get(arg) or Like.of(value))
            return numbers.setdefault(arg, _Number(len(numbers)))

        tensors: dict[fx.Node, Like] = {}
        args, kwargs = fx.map_arg((node.args, node.kwargs), number)
        target, strides = called(node.target), read_strides(node)
        if strides:
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            target = _Reading(target, tuple(strides.get(leaf) if isinstance(leaf, fx.Node) else None for leaf in leaves))
        return cls(target, args, kwargs, tuple(tensors.values()), paths)

    @classmethod
    def composed(cls, composed: Composed, paths: tuple[str, ...]) -> "_Work":
        """Several operators that are called as one."""
        likes = tuple(map(Like.of, composed.fakes))
        return cls(composed, tuple(map(_Number, range(len(likes)))), {}, likes, paths)

    @property
    def key(self) -> str:
        """What its cost depends on."""
        settings = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
        return repr((str(self.target), self.args, self.kwargs, self.tensors, self.paths, settings))

    def real(self, generator: torch.Generator) -> tuple[Any, Any]:
        """Its arguments, on tensors of their own."""
        made = [tensor.make(generator) for tensor in self.tensors]
        args, kwargs = pytree.tree_map(lambda v: made[v.position] if isinstance(v, _Number) else v, (self.args, self.kwargs))
        return args, kwargs


@dataclass(frozen=True, slots=True)
class _Reading:
    """An op on copies of some of its tensors, which it is to read with other strides."""

    target: Callable[..., Any]
    strides: tuple[Sequence[int] | None, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        copies = [v if s is None else laid_out(v, s) for v, s in zip(leaves, self.strides, strict=True)]
        args, kwargs = pytree.tree_unflatten(copies, spec)
        return self.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Number:
    """Stands for a tensor among arguments."""

    position: int


_COSTS: dict[str, _Cost] = {}
_COMPOSED = "composed "  # keys of what is of one graph alone begin with it


def profile_ops(capture: Capture, device: torch.device, model: Device) -> Graph:
    """The captured graph with measured times, workspaces, and the sizes that its kernels really allocate.

    Ops that draw random numbers do not move the generator on, and writes go to tensors made for them.

    Args:
        capture: with fake values.
        device: that the graph runs on.
        model: of its times, for the ops that do not run on made-up values, which a warning names.
    """
    with _apart(device):
        costs = _costs(capture, device, model)
    graph = capture.graph
    sizes = {t.id: t.size_bytes for t in graph.tensors}
    ops = []
    for op, cost in zip(graph.ops, costs, strict=True):
        if cost is None:  # saving the generator's state starts no kernel
            ops.append(op)
            continue
        ops.append(replace(op, time_s=cost.time_s, workspace_bytes=cost.workspace_bytes))
        made = zip(capture.program.calls[op.id].outputs, cost.output_bytes, strict=True)
        sizes |= {t: size for (t, _), size in made if graph.tensors[t].producers[0] == op.id}
    tensors = tuple(replace(t, size_bytes=sizes[t.id]) for t in graph.tensors)
    provenance = {
        **graph.provenance,
        "times": "measured",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return Graph(tuple(ops), tensors, graph.kept, provenance)


def _costs(capture: Capture, device: torch.device, model: Device) -> list[_Cost | None]:
    """The cost of each op, measured where it is not known."""
    generator = torch.Generator(device).manual_seed(0)
    known: dict[fx.Node, Like] = {}
    new: dict[str, tuple[_Work, _Cost]] = {}
    modelled: dict[str, _Cost] = {}
    keys: list[str | None] = []
    for node, call in zip(capture.nodes, capture.program.calls, strict=True):
        paths = tuple(path for _, path in call.outputs)
        if call.composed is not None:
            work = _Work.composed(call.composed, paths)
            key = f"{_COMPOSED}{len(keys)}"
        elif node is not None:
            work = _Work.of(node, paths, known)
            key = work.key
        else:
            keys.append(None)
            continue
        keys.append(key)
        if key not in _COSTS and key not in new and key not in modelled:
            try:
                new[key] = (work, _run(work, generator, device))
            except Exception as error:  # noqa: BLE001 (whatever an op says of values that mean nothing)
                warnings.warn(
                    f"{work.target} cannot be measured by itself ({next(iter(str(error).splitlines()), '')}): its time is "
                    "modelled, and a workspace it may need is not in the plan; leave a margin",
                    stacklevel=2,
                )
                modelled[key] = (
                    _modelled_composed(call.composed, device, model)
                    if call.composed is not None
                    else _modelled(node, work.paths, device, model)  # type: ignore[arg-type]
                )
        if node is None:
            continue
        cost = _COSTS.get(key) or modelled.get(key) or new[key][1]
        for path, output in zip(work.paths, cost.outputs, strict=True):
            if output is not None:
                known |= dict.fromkeys(items(node, path), output)
    for (key, (_, cost)), rise in zip(new.items(), _rises([w for w, _ in new.values()], generator, device), strict=True):
        _COSTS[key] = replace(cost, workspace_bytes=max(0, rise - sum(cost.output_bytes)))
    costs = [None if key is None else modelled.get(key) or _COSTS[key] for key in keys]
    for key in new:
        if key.startswith(_COMPOSED):
            del _COSTS[key]
    return costs


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Run inside: nothing is recorded, cast or traced, and the random state is afterwards as before."""
    devices = [device] if device.type == "cuda" else []
    with (
        disable_current_modes(),
        no_python_dispatcher(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
    ):
        yield


def _run(work: _Work, generator: torch.Generator, device: torch.device) -> _Cost:
    """The cost of `work`, but for its workspace."""
    args, kwargs = work.real(generator)
    value = work.target(*args, **kwargs)
    outputs = [_pick(value, path) for path in work.paths]
    sizes = tuple(_bytes_of(output, device) for output in outputs)
    likes = tuple(Like.of(output) if isinstance(output, torch.Tensor) else None for output in outputs)
    del value, outputs
    return _Cost(least_time_s(lambda: work.target(*args, **kwargs), device), 0, sizes, likes)


def _rises(works: Sequence[_Work], generator: torch.Generator, device: torch.device) -> list[int]:
    """For each of `works` the bytes by which memory rises while it runs, outputs included."""
    if not works:
        return []

    def run(mark: Mark) -> None:
        for work in works:
            args, kwargs = work.real(generator)
            mark()
            value = work.target(*args, **kwargs)
            mark()
            del value, args, kwargs

    if device.type == "cpu" and profiler_enabled():
        warnings.warn("a profiler is running, so the workspaces of ops cannot be measured: leave a margin", stacklevel=2)
        return [0] * len(works)
    return segment_peaks(run, device)[1::2]


def _modelled(node: fx.Node, paths: Sequence[str], device: torch.device, model: Device) -> _Cost:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    value = node.meta["val"]
    call = (node.target, args, kwargs, value, model)
    sizes = tuple(_bytes_of(_pick(value, path), device) for path in paths)
    return _Cost(op_time_s(*call), workspace_bytes(*call), sizes, (None,) * len(paths))


def _modelled_composed(composed: Composed, device: torch.device, model: Device) -> _Cost:
    time_s, workspace = modelled_composed(composed, model)
    sizes = tuple(_bytes_of(value, device) for value in composed(*composed.fakes))
    return _Cost(time_s, workspace, sizes, (None,) * len(sizes))


def _pick(value: Any, path: str) -> Any:
    for index in path.replace("]", "").split("[")[1:]:
        value = value[int(index)]
    return value


def _bytes_of(value: object, device: torch.device) -> int:
    on_device = isinstance(value, torch.Tensor) and value.device.type == device.type
    return allocated_bytes(value.untyped_storage().nbytes(), device) if on_device else 0  # type: ignore[attr-defined]
