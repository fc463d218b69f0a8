"""What a training step really takes: peak memory, time, and whether its results are the same."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from graphs.profile_memory import cpu_allocations
from graphs.trace_signature import Batch, as_leaves, call, leaves
from planner.machine import machine

# step(*batch) or step(**batch) -> loss, a tuple that begins with the loss, or a dict with a "loss"
Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one forward and backward pass.

    Attributes:
        peak_bytes: most in use at once (CUDA: allocated), static bytes included.
        reserved_bytes: most held by the CUDA allocator; None on the CPU.
        timeline: (seconds, bytes) after each event of the CPU allocator; empty on CUDA.
    """

    peak_bytes: int
    reserved_bytes: int | None
    timeline: tuple[tuple[float, int], ...]


def measure_memory(step: Step, batch: Batch, *, static_bytes: int, device: torch.device) -> Memory:
    """Run `step` forward and backward once and follow the allocator: tensors and workspaces.

    Args:
        static_bytes: of parameters, buffers, inputs and optimizer state, which are there before.
    """
    batch = as_leaves(batch)

    def run(_: object = None) -> None:
        returned = call(step, batch)  # held, as a training loop holds it
        loss_of(returned).backward()

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        peak = static_bytes + torch.cuda.max_memory_allocated(device) - before
        return Memory(peak, torch.cuda.max_memory_reserved(device), ())
    events = cpu_allocations(run)
    level, timeline = static_bytes, []
    for event in events:
        level += event.size_bytes or 0
        timeline.append(((event.time_ns - events[0].time_ns) / 1e9, level))
    return Memory(max((level for _, level in timeline), default=static_bytes), None, tuple(timeline))


def median_times(
    steps: Mapping[str, Step], batch: Batch, *, parameters: Sequence[nn.Parameter], repeats: int
) -> dict[str, float]:
    """Median seconds of each step; see ``turn_times``."""
    times = turn_times(steps, batch, parameters=parameters, repeats=repeats)
    return {name: median(values) for name, values in times.items()}


def turn_times(
    steps: Mapping[str, Step], batch: Batch, *, parameters: Sequence[nn.Parameter], repeats: int
) -> dict[str, list[float]]:
    """Seconds of a forward and backward pass of each step, turn by turn; the steps take turns, after one turn to warm up."""
    device, batch = parameters[0].device, as_leaves(batch)
    inputs = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            for tensor in (*parameters, *inputs):
                tensor.grad = None
            synchronize(device)
            start = time.perf_counter()
            loss_of(call(step, batch)).backward()
            synchronize(device)
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a training step leaves behind, by name: loss, gradients, buffers, random state."""

    values: Mapping[str, torch.Tensor | None]

    def differences(self, other: "Outcome") -> tuple[str, ...]:
        """Names of what is not equal to the last bit."""
        return tuple(name for name, value in self.values.items() if not _equal(value, other.values.get(name)))


def outcome(step: Step, model: nn.Module, batch: Batch, *, seed: int) -> Outcome:
    """Run `step` forward and backward from the random state `seed`; `model` and `batch` are afterwards as they were."""
    with unchanged(model, batch):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = None
        batch = as_leaves(batch)
        loss = loss_of(call(step, batch))
        loss.backward()
        values: dict[str, torch.Tensor | None] = {"loss": loss.detach().clone()}
        inputs = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        values |= {f"gradient of an input, {number}": _copy(leaf.grad) for number, leaf in enumerate(inputs)}
        values |= {f"gradient of {name}": _copy(p.grad) for name, p in model.named_parameters()}
        values |= {f"buffer {name}": _copy(b) for name, b in model.named_buffers()}
        values["random state"] = torch.get_rng_state()
        if loss.device.type == "cuda":
            values["CUDA random state"] = torch.cuda.get_rng_state(loss.device)
        return Outcome(values)


@contextmanager
def unchanged(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Afterwards the buffers and gradients of `model`, the batch and the random state are as before."""
    inputs = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    written = [(tensor, tensor.detach().clone(), tensor._version) for tensor in (*model.buffers(), *inputs)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        with torch.no_grad():
            for tensor, before, version in written:
                if tensor._version != version:  # a write, even of what is there, would spoil a backward pass of the caller's
                    tensor.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def loss_of(returned: Any) -> torch.Tensor:
    """The loss among what a step returns."""
    loss: torch.Tensor
    match returned:
        case tuple():
            loss = returned[0]
        case Mapping():
            loss = returned["loss"]
        case _:
            loss = returned
    return loss


def synchronize(device: torch.device) -> None:
    """Wait for what was begun on `device`: on CUDA a call returns before its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """What is measured on: the GPU and its machine, or the machine and how many of its threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}; {machine()}"
    threads = torch.get_num_threads()
    return f"{machine()}, {threads} thread{'s' if threads > 1 else ''}"


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # NaN is the same as NaN: a diverged step is still the same step.
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
