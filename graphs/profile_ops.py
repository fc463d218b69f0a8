"""Measured time, workspace and sizes of ops one by one, each on tensors that are made for it.

For graphs whose inputs are not at hand, or must not be written to: of the model nothing is read, nothing is changed, and
no more is in memory than one op needs. What was measured once in a process is known to all graphs after, so that blocks
that repeat, and graphs that are compiled again, cost nothing.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from graphs.devices import Device, op_time_s, workspace_bytes
from graphs.ir import Graph
from graphs.profile_memory import Mark, segment_peaks
from graphs.trace_lower import Capture, allocated_bytes

_PASSES = 3
_LONG_S = 0.1  # an op that takes so long is timed once


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one op takes.

    Attributes:
        time_s: least of some executions.
        workspace_bytes: besides inputs and outputs.
        output_bytes: what the allocator hands out for each output.
    """

    time_s: float
    workspace_bytes: int
    output_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """One op that can be executed.

    Attributes:
        target, args, kwargs, value: what is called, and what it returns, with fake tensors.
        paths: where its outputs stand in its value, as in ``Call.outputs``.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    paths: tuple[str, ...]

    def key(self, device: torch.device) -> str:
        """What its cost depends on."""
        seen: dict[int, int] = {}

        def describe(value: object) -> object:
            if isinstance(value, torch.Tensor):
                position = seen.setdefault(id(value), len(seen))
                return (position, tuple(value.shape), value.stride(), value.dtype, value.device)
            return value

        settings = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
        return repr((self.target, tree_map(describe, (self.args, self.kwargs)), self.paths, device, settings))

    def real(self, generator: torch.Generator) -> tuple[Any, Any]:
        """Arguments of the same shapes, strides and types; whole numbers are 0, which is an index everywhere."""
        made: dict[int, torch.Tensor] = {}

        def make(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in made:
                made[id(value)] = _like(value, generator)
            return made[id(value)]

        args, kwargs = tree_map(make, (self.args, self.kwargs))
        return args, kwargs


_COSTS: dict[str, _Cost] = {}


def profile_ops(capture: Capture, device: torch.device, model: Device) -> Graph:
    """The captured graph with measured times, workspaces, and the sizes that its kernels really allocate.

    Ops that draw random numbers do not move the generator on, and writes go to tensors made for them.

    Args:
        capture: with fake values.
        device: that the graph runs on.
        model: of its times, for the ops that do not run on made-up values, which a warning names.
    """
    works = [None if node is None else _work(node, capture, op) for op, node in enumerate(capture.nodes)]
    keys = [None if work is None else work.key(device) for work in works]
    missing = {key: work for key, work in zip(keys, works, strict=True) if key is not None and work and key not in _COSTS}
    with _apart(device):
        _measure(missing, device, model)
    graph = capture.graph
    sizes = {t.id: t.size_bytes for t in graph.tensors}
    ops = []
    for op, key in zip(graph.ops, keys, strict=True):
        if key is None:  # saving the generator's state starts no kernel
            ops.append(op)
            continue
        cost = _COSTS[key]
        ops.append(replace(op, time_s=cost.time_s, workspace_bytes=cost.workspace_bytes))
        sizes |= {t: size for (t, _), size in zip(capture.program.calls[op.id].outputs, cost.output_bytes, strict=True)}
    tensors = tuple(replace(t, size_bytes=sizes[t.id]) for t in graph.tensors)
    provenance = {
        **graph.provenance,
        "times": "measured",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return Graph(tuple(ops), tensors, graph.kept, provenance)


def _work(node: fx.Node, capture: Capture, op: int) -> _Work:
    def value(arg: fx.Node) -> Any:
        return arg.meta["val"] if "val" in arg.meta else getattr(arg.graph.owning_module, str(arg.target))

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    assert callable(node.target)
    return _Work(node.target, args, kwargs, node.meta["val"], tuple(path for _, path in capture.program.calls[op].outputs))


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Run inside: nothing is recorded, cast or traced, and the random state is afterwards as before."""
    devices = [device] if device.type == "cuda" else []
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices),
    ):
        yield


def _measure(missing: dict[str, _Work], device: torch.device, model: Device) -> None:
    """Add the costs of what is `missing` to those that are known."""
    generator = torch.Generator(device).manual_seed(0)
    measured: list[tuple[str, _Work, float, tuple[int, ...]]] = []
    for key, work in missing.items():
        try:
            measured.append((key, work, *_run(work, generator, device)))
        except Exception as error:  # noqa: BLE001 (whatever an op says of values that mean nothing)
            what = next(iter(str(error).splitlines()), "")
            warnings.warn(
                f"{work.target} cannot be measured by itself ({what}): its time is modelled, and a workspace it may need is not "
                "in the plan; leave a margin",
                stacklevel=2,
            )
            _COSTS[key] = _modelled(work, device, model)
    for (key, _, time_s, sizes), workspace in zip(
        measured, _workspaces([work for _, work, _, _ in measured], generator, device), strict=True
    ):
        _COSTS[key] = _Cost(time_s, max(0, workspace - sum(sizes)), sizes)


def _run(work: _Work, generator: torch.Generator, device: torch.device) -> tuple[float, tuple[int, ...]]:
    """Seconds of `work`, and the bytes of its outputs."""
    args, kwargs = work.real(generator)
    value = work.target(*args, **kwargs)
    sizes = tuple(_bytes_of(_pick(value, path), device) for path in work.paths)
    del value
    times: list[float] = []
    while len(times) < _PASSES and sum(times) < _LONG_S:
        times.append(_time(lambda: work.target(*args, **kwargs), device))
    return min(times), sizes


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of `call`."""
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize(device)
        return first.elapsed_time(last) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _workspaces(works: Sequence[_Work], generator: torch.Generator, device: torch.device) -> list[int]:
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

    if device.type == "cpu" and torch.autograd._profiler_enabled():
        warnings.warn("a profiler is running, so the workspaces of ops cannot be measured: leave a margin", stacklevel=2)
        return [0] * len(works)
    return segment_peaks(run, device)[1::2]


def _modelled(work: _Work, device: torch.device, model: Device) -> _Cost:
    call = (work.target, work.args, work.kwargs, work.value, model)
    sizes = tuple(_bytes_of(_pick(work.value, path), device) for path in work.paths)
    return _Cost(op_time_s(*call), workspace_bytes(*call), sizes)


def _like(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A real tensor of the shape, strides and type of `fake`."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    flat = torch.zeros(extent if fake.numel() else 0, dtype=fake.dtype, device=fake.device)
    if fake.dtype.is_floating_point and fake.device == generator.device:
        # Probabilities, variances and arguments of logarithms are among them.
        flat = flat.float().uniform_(0.25, 0.75, generator=generator).to(fake.dtype)
    return flat.as_strided(fake.shape, fake.stride())


def _pick(value: Any, path: str) -> Any:
    for index in path.replace("]", "").split("[")[1:]:
        value = value[int(index)]
    return value


def _bytes_of(value: object, device: torch.device) -> int:
    on_device = isinstance(value, torch.Tensor) and value.device.type == device.type
    return allocated_bytes(value.untyped_storage().nbytes(), device) if on_device else 0  # type: ignore[attr-defined]
