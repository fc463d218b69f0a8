"""Measurements of a training step: peak memory, time, and whether its results are identical.

Steps take turns, and ratios are taken within a turn: other processes disturb both steps of a turn alike. Known weakness: on a
busy machine a ratio still varies by some percent, so its spread is returned with it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite, sqrt
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from planner.capture.frontend.preserved_state import UndoWrites, has_same_values, preserve_training_state
from planner.capture.signature import Batch, call, detach_batch, list_leaves, split_arguments
from planner.graphs.walks import walk
from planner.measure.machine import describe_machine
from planner.plans.eager import Difference
from planner.runtime.allocator import measure_memory_rise
from planner.runtime.arena_allocator import keep_idle_pages
from planner.runtime.libraries import warm_up_libraries
from planner.torch_private.core import enter_autocast_anew, get_local_tensor, pytree

# step(*batch) or step(**batch) -> loss, a tuple that begins with the loss, or a dict with a "loss"
Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one forward and backward pass.

    Attributes:
        peak_bytes: peak in use (CUDA: as asked for), static memory included, without library workspaces.
        reserved_bytes: peak of the CUDA allocator's reserved memory; None on the CPU.
        timeline: (seconds, bytes) after each event of the CPU allocator; empty on CUDA.
        library_bytes: workspaces of libraries on the device (``planner.runtime.libraries``); 0 on the CPU.
    """

    peak_bytes: int
    reserved_bytes: int | None
    timeline: tuple[tuple[float, int], ...]
    library_bytes: int = 0


def measure_memory(step: "Step | Isolated", batch: Batch, *, static_bytes: int, device: torch.device) -> MemoryUse:
    """Run `step` forward and backward once, and record the allocator: tensors and workspaces."""
    batch = detach_batch(batch)
    held: list[object] = []
    library_bytes = warm_up_libraries(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    rise = measure_memory_rise(
        lambda: held.append(run_both(step, batch)), device
    )  # what it returns is held, as in a training loop
    reserved_bytes = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    timeline = tuple((seconds, static_bytes + level) for seconds, level in rise.timeline)
    return MemoryUse(static_bytes + rise.peak_bytes, reserved_bytes, timeline, library_bytes)


def measure_median_times(
    steps: "Mapping[str, Step] | Mapping[str, Isolated]", batch: Batch, *, parameters: Sequence[nn.Parameter], repeats: int
) -> dict[str, float]:
    """Return the median seconds of each step; see ``turn_times``."""
    times = turn_times(steps, batch, parameters=parameters, repeats=repeats)
    return {name: median(values) for name, values in times.items()}


def turn_times(
    steps: "Mapping[str, Step] | Mapping[str, Isolated]",
    batch: Batch,
    *,
    parameters: Sequence[nn.Parameter],
    repeats: int,
    warm_up: bool = True,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each step, in turns after one that may `warm_up`; `prepare` is called before each."""
    device, batch = parameters[0].device, detach_batch(batch)
    inputs = [leaf for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor)]
    times: dict[str, list[float]] = {name: [] for name in steps}
    with keep_idle_pages():
        for turn in range(-warm_up, repeats):
            for name, step in steps.items():
                for tensor in (*parameters, *inputs):
                    tensor.grad = None
                prepare()
                wait_for_device(device)
                start = time.perf_counter()
                run_both(step, batch)
                wait_for_device(device)
                if turn >= 0:
                    times[name].append(time.perf_counter() - start)
    return times


def compute_ratio(planned_s: Sequence[float], plain_s: Sequence[float]) -> tuple[float, float]:
    """Return the median ratio of two steps that took turns, and its spread: half of the interquartile range.

    Ratios are taken per turn, since other processes disturb both steps of a turn alike.
    """
    ratios = [planned / plain for planned, plain in zip(planned_s, plain_s, strict=True)]
    lower, _, upper = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (0.0, 0.0, 0.0)
    return median(ratios), (upper - lower) / 2


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """All results of a training step by name: loss, gradients, buffers, random state."""

    values: Mapping[str, torch.Tensor | None]

    def list_differences(self, other: "StepOutcome") -> tuple[str, ...]:
        """Return the names of results that are not bit-identical; what `other` does not return, as it logs it later, is none."""
        return tuple(name for name, value in self.values.items() if not _are_equal(value, other.values.get(name, value)))

    def compute_gradient_error(self, other: "StepOutcome") -> float:
        """Return the norm of the difference of all gradients from those of `other`, relative to the norm of these gradients."""
        squared = [0.0, 0.0]
        for name, wanted in self.values.items():
            given = other.values.get(name)
            if name.startswith("gradient of ") and wanted is not None and given is not None:
                wanted, given = (x.to_dense() if x.layout is not torch.strided else x for x in (wanted, given))
                for i, value in enumerate((wanted.double() - given.double(), wanted)):
                    squared[i] += float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2
        return sqrt(squared[0] / squared[1]) if squared[1] else 0.0

    def compute_difference(self, name: str, other: "StepOutcome") -> Difference:
        """Return the difference of `other` from this outcome in the result `name`, without sizes if it cannot be measured."""
        wanted, given = self.values[name], other.values.get(name)
        name = name.replace(" model.", " ", 1)  # as in the user's code
        if wanted is None or given is None or wanted.shape != given.shape or name.endswith("random state"):
            return Difference(name)
        wanted, given = (x.to_dense() if x.layout is not torch.strided else x for x in (wanted, given))
        exact = torch.complex128 if wanted.is_complex() else torch.float64
        wanted, given = wanted.to(exact), given.to(exact)
        max_abs, largest = (wanted - given).abs().max().item(), wanted.abs().max().item()
        if not isfinite(max_abs):
            return Difference(name)
        return Difference(name, max_abs, max_abs / largest if largest and isfinite(largest) else None)


def measure_outcome(
    step: Step,
    model: nn.Module,
    batch: Batch,
    *,
    seed: int | None = None,
    written: Iterable[torch.Tensor] = (),
    undone: UndoWrites | None = None,
) -> StepOutcome:
    """Run `step` forward and backward and return its outcome; `model` and `batch` are restored.

    Args:
        seed: seed of the random state; None for the current state.
        written: as in ``planner.capture.frontend.preserved_state.preserve_training_state``.
        undone: mode that finds written tensors if they are unknown.
    """
    with preserve_training_state(step if isinstance(step, nn.Module) else model, batch, written=written), undone or nullcontext():
        if seed is not None:
            torch.manual_seed(seed)
        returned, gradients = Isolated(step, model, batch).run()
        loss = get_loss(returned)
        values: dict[str, torch.Tensor | None] = {"loss": _copy(loss)}
        values |= {name: _copy(leaf) for name, leaf in _iterate_results(returned, "result") if leaf is not loss}
        values |= {f"gradient of {name}": _copy(g) for name, g in gradients.items()}
        values |= {f"buffer {name}": _copy(b) for name, b in model.named_buffers()}
        values["random state"] = torch.get_rng_state()
        if loss.device.type == "cuda":
            values["CUDA random state"] = torch.cuda.get_rng_state(loss.device)
        return StepOutcome(values)


class Isolated:
    """A step whose backward pass ends at the parameters and inputs: it sets no ``grad`` and runs nothing beyond.

    Optimizers in the backward pass, and the producers of inputs that require gradients, are thus not run.
    """

    def __init__(self, step: Step, model: nn.Module, batch: Batch) -> None:
        """Initialize for `step`, which trains `model`, and calls with `batch`."""
        self._step = step
        self._args, self._kwargs = split_arguments(detach_batch(batch))
        given = enumerate(pytree.tree_leaves((self._args, self._kwargs)))
        inputs = {f"input {i}": leaf for i, leaf in given if isinstance(leaf, torch.Tensor)}
        self._known = {name: t for name, t in (*model.named_parameters(), *inputs.items()) if t.requires_grad}
        self._ends: tuple[list[torch.Tensor], bool] | None = None

    def run(self) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """Return the step's result, and the gradients of parameters and inputs; None for those without gradient."""
        with torch.enable_grad():  # a step of another size may be planned while it is evaluated
            return self._run()

    def _run(self) -> tuple[Any, dict[str, torch.Tensor | None]]:
        # New containers: a step may pop items from them.
        args, kwargs = pytree.tree_map(lambda leaf: leaf, (self._args, self._kwargs))
        with enter_autocast_anew():
            returned = self._step(*args, **kwargs)
        loss = get_loss(returned)
        if self._ends is None:
            reached, nested = _find_ends(loss)
            ends = {id(tensor) for tensor in reached}
            # A nested pass ends at parameters that the outer graph does not reach, FSDP2's hooks at shards behind whole ones.
            nested |= any(get_local_tensor(t) is not t and id(t) not in ends for t in self._known.values())
            if nested:
                reached = list({id(tensor): tensor for tensor in (*reached, *self._known.values())}.values())
            self._ends = reached, nested
        reached, nested = self._ends
        with torch.autocast(loss.device.type, enabled=False):  # training loops call backward() outside
            if nested:
                for tensor in reached:
                    tensor.grad = None
                loss.backward()
                gradients = [tensor.grad for tensor in reached]
                for tensor in reached:
                    tensor.grad = None
            else:
                gradients = list(torch.autograd.grad(loss, reached, allow_unused=True))
        named = {id(tensor): name for name, tensor in self._known.items()}
        found: dict[str, torch.Tensor | None] = dict.fromkeys(self._known)
        for tensor, gradient in zip(reached, gradients, strict=True):
            if id(tensor) in named:  # others were made by the step itself, and nothing else refers to them
                found[named[id(tensor)]] = gradient
        return returned, found


def run_both(step: "Step | Isolated", batch: Batch) -> object:
    """Run one forward and backward pass; return an object that keeps all results alive."""
    if isinstance(step, Isolated):
        return step.run()
    with enter_autocast_anew():
        returned = call(step, batch)
    loss = get_loss(returned)
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()
    return returned


def _find_ends(loss: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """Return the tensors where the backward pass ends, and True if it runs nested backward passes.

    Reentrant checkpoints (``use_reentrant=True``) do; they do not support ``autograd.grad``.
    """
    known = partial(filter, None)
    nodes: list[Any] = [*walk(known([loss.grad_fn]), lambda node: known(following for following, _ in node.next_functions))]
    reached = {id(node.variable): node.variable for node in nodes if hasattr(node, "variable")}
    return list(reached.values()), any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def get_loss(returned: Any) -> torch.Tensor:
    """Return the loss from the result of a step."""
    loss: torch.Tensor
    match returned:
        case tuple():
            loss = returned[0]
        case Mapping():
            loss = returned["loss"]
        case _:
            loss = returned
    return loss


def wait_for_device(device: torch.device) -> None:
    """Wait for the work launched on `device`; CUDA calls return before their work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_device(device: torch.device) -> str:
    """Return the name of the measured device: the GPU and its machine, or the machine and its number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; {describe_machine()}"
    threads = torch.get_num_threads()
    return f"{describe_machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _iterate_results(returned: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a step returns, by keys where it returns mappings: others may miss some of them."""
    if isinstance(returned, Mapping):
        for key, value in returned.items():
            yield from _iterate_results(value, f"{name} {key}")
    elif isinstance(returned, torch.Tensor):
        yield name, returned
    else:
        leaves = enumerate(pytree.tree_leaves(returned))
        yield from ((f"{name} {i}", leaf) for i, leaf in leaves if isinstance(leaf, torch.Tensor))


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of `value`, or of its shard, on the host, since the other step may need all of the device."""
    return None if value is None else get_local_tensor(value.detach()).to("cpu", copy=True)


def _are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else has_same_values(a, b)
