"""Training on a CUDA device that eager PyTorch's step does not fit: the process may have only the budget.

PyTorch's allocator is capped at a share of what eager PyTorch reserves (``torch.cuda.set_per_process_memory_fraction``) before
anything is planned. Deterministic kernels are asked for, so that losses and parameters have to be those of eager PyTorch without
a cap to the last bit.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import planner
from benchmarks.command import add_names
from benchmarks.gpu.plans import MODELS
from planner.capture.signature import call
from planner.capture.step import TrainingStep
from planner.graphs.errors import typed_line
from planner.graphs.units import format_bytes, format_ratio, format_seconds
from planner.measure.steps import get_loss
from planner.torch_private.core import clear_cublas_workspaces

_STEPS = 4
_MODELS = ("gpt2", "resnet50")  # the loss of a U-Net has no deterministic kernel
WAYS = ("eager", "compile", "rematerialize")


@dataclass(frozen=True, slots=True)
class Trained:
    """Some steps of training.

    Attributes:
        values: the losses, and the parameters after the last step.
        reserved_bytes: the most that PyTorch's allocator reserved, workspaces of libraries included.
        first_s: seconds until the first step ended, planning included.
        step_s: seconds of the last step.
    """

    values: tuple[torch.Tensor, ...]
    reserved_bytes: int
    first_s: float
    step_s: float


def train(name: str, way: str, budget_bytes: int | None) -> Trained:
    """Train a model in one of `WAYS`, with the allocator capped at the budget, or without a cap."""
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(1.0 if budget_bytes is None else budget_bytes / total_bytes)
    torch.manual_seed(0)
    workload = MODELS[name](device="cuda")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=1e-3, fused=True)
    torch.cuda.synchronize()
    ends = [time.perf_counter()]
    step: Callable[..., Any] = TrainingStep(workload.model, workload.loss_fn)
    if way == "compile":
        step = planner.compile(*workload, budget=budget_bytes, optimizer=optimizer, memory="reserved")
    losses = []
    with planner.rematerialize(budget_bytes) if way == "rematerialize" else nullcontext():
        for _ in range(_STEPS):
            loss = get_loss(call(step, workload.batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
    values = (*losses, *(parameter.detach().cpu() for parameter in workload.model.parameters()))
    return Trained(values, torch.cuda.max_memory_reserved(), ends[1] - ends[0], ends[-1] - ends[-2])


def check_all(names: Sequence[str], ways: Sequence[str], share: float) -> Iterator[tuple[str, bool]]:
    """Yield a line for each model and way, and whether it holds: eager PyTorch runs out of memory, the others train."""
    for name in names:
        plain = train(name, "eager", None)
        budget_bytes = int(share * plain.reserved_bytes)
        reserved = f"reserves {format_bytes(plain.reserved_bytes)}, {format_seconds(plain.step_s)} a step"
        yield f"{name}, eager without a cap: {reserved}", True
        for way in ways:
            label = f"{name}, {way}, at most {format_bytes(budget_bytes)}"
            try:
                found = train(name, way, budget_bytes)
            except Exception as error:  # noqa: BLE001  # the others are trained all the same
                yield f"{label}: {typed_line(error)[:200]}", way == "eager" and isinstance(error, torch.OutOfMemoryError)
                continue
            same = all(map(torch.equal, found.values, plain.values))
            taken = f"reserved {format_bytes(found.reserved_bytes)} ({format_ratio(found.reserved_bytes / budget_bytes)})"
            took = f"first step after {format_seconds(found.first_s)}, last {format_seconds(found.step_s)}"
            bits = "bits equal" if same else "OTHER BITS"
            yield f"{label}: {taken}; {took}; {bits}", same and way != "eager" and found.reserved_bytes <= budget_bytes


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each model and way; return 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.75, help="budget, of what eager PyTorch reserves (default: %(default)s)")
    add_names(parser, "--models", _MODELS)
    add_names(parser, "--ways", WAYS)
    options = parser.parse_args(words)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)
    failed = False
    for line, holds in check_all(options.models, options.ways, options.share):
        print(line, flush=True)
        failed |= not holds
    return int(failed)
