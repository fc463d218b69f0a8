"""A model that is trained for some steps, to compare results and memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.storages import LiveStorages
from benchmarks.training_loop import generate_batches
from planner.capture.signature import Batch, call, list_leaves
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.measure.steps import Step, StepOutcome, get_loss, measure_memory, turn_times
from planner.torch_private.core import list_parts

SEED = 0
STEPS = 3
_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Runner:
    """A model of its own with a way to run its steps."""

    workload: Workload
    step: Step

    @classmethod
    def of_eager(cls, workload: Workload) -> "Runner":
        """Return the runner of a model in eager PyTorch."""
        return cls(workload, build_whole_step(workload))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of the model and of its loss function."""
        return list(build_whole_step(self.workload).parameters())

    def train(self, like: Batch) -> StepOutcome:
        """Train for some steps on different batches and return all results."""
        whole = build_whole_step(self.workload)
        optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=_RATE)
        torch.manual_seed(SEED)
        left: dict[str, torch.Tensor | None] = {}
        for i, batch in enumerate(generate_batches(like, STEPS, seed=SEED)):
            optimizer.zero_grad()
            loss = get_loss(call(self._forward, batch))
            loss.backward()
            left[f"loss of step {i}"] = _copy(loss)
            for name, parameter in whole.named_parameters():
                left[f"gradient of {name} in step {i}"] = None if parameter.grad is None else _copy(parameter.grad)
            optimizer.step()
        left |= {f"parameter {name}": _copy(p) for name, p in whole.named_parameters()}
        left |= {f"buffer {name}": _copy(b) for name, b in whole.named_buffers()}
        left["random state"] = torch.get_rng_state()
        return StepOutcome(left)

    def copy_state(self) -> list[torch.Tensor]:
        """Return copies of all parameters and buffers."""
        return [tensor.detach().clone() for tensor in self._list_state()]

    def restore(self, state: list[torch.Tensor]) -> None:
        """Restore parameters and buffers to `state`, and remove gradients."""
        self._clear()
        with torch.no_grad():
            for tensor, before in zip(self._list_state(), state, strict=True):
                tensor.copy_(before)

    def measure_storages_bytes(self, batch: Batch) -> int:
        """Return the most bytes in storages at once in a forward and backward pass."""
        self._clear()
        with LiveStorages(self._list_static(batch)) as storages:
            returned = call(self._forward, batch)  # held, as a training loop holds it
            get_loss(returned).backward()
        return storages.peak_bytes

    def measure_peak_bytes(self, batch: Batch) -> int:
        """Return the peak including the memory of kernels, by the allocator's events."""
        self._clear()
        static_bytes = self.count_static_bytes(batch)
        return measure_memory(self._forward, batch, static_bytes=static_bytes, device=torch.device("cpu")).peak_bytes

    def count_static_bytes(self, batch: Batch) -> int:
        """Return the bytes of parameters, buffers and `batch`."""
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._list_static(batch)}.values())

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        """Return what the step returns, after the model's ``update_between`` the passes, which takes its leaves."""
        returned = self.step(*inputs, **named)
        if hasattr(self.workload.model, "update_between"):
            self.workload.model.update_between(list_leaves(returned))
        return returned

    def _list_state(self) -> list[torch.Tensor]:
        whole = build_whole_step(self.workload)
        return [*whole.parameters(), *whole.buffers()]

    def _list_static(self, batch: Batch) -> list[torch.Tensor]:
        inputs = [leaf for leaf in list_leaves(batch) if isinstance(leaf, torch.Tensor)]
        return [part for tensor in (*self._list_state(), *inputs) for part in list_parts(tensor)]

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy outside of PyTorch's memory, which no budget counts: results would take more of it in each step."""
    tensor = tensor.detach()
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    held = bytearray(tensor.reshape(-1).view(torch.uint8).numpy())
    return torch.frombuffer(held, dtype=tensor.dtype).view(tensor.shape)


def build_fresh(make: Callable[[], Workload]) -> Workload:
    """Return the model that `make` builds and its batch, the same every time."""
    torch.manual_seed(SEED)
    return make()


def take_turns(runners: Mapping[str, Runner], batch: Batch, *, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of forward and backward passes of each runner; see ``turn_times``."""
    parameters = [parameter for runner in runners.values() for parameter in runner.parameters]
    return turn_times({name: runner.step for name, runner in runners.items()}, batch, parameters=parameters, repeats=repeats)


def build_whole_step(workload: Workload) -> TrainingStep:
    """Return the training step of the model and its loss function as a module."""
    return TrainingStep(workload.model, workload.loss_fn)
