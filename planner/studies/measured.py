"""Measurements of methods that run one training step, PyTorch's own and plans alike: peak memory, time and exactness."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.lowering.statics import StaticTensors
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload
from planner.graphs.errors import PlannerError, first_line, typed_line
from planner.measure import steps as measure
from planner.measure.steps import Step, StepOutcome
from planner.runtime.cuda.cuda_graph import count_hidden_pool_bytes
from planner.runtime.transfers.host_memory import HostMemory
from planner.studies.baselines import Method
from planner.studies.blocks import InapplicableError

_ROUNDINGS = 3  # of the parameters
_MARGIN = 10.0  # a method rounds at every op, not only parameters


class Exactness(StrEnum):
    """Loss and gradients of a method, compared with those of eager PyTorch."""

    IDENTICAL = "identical"  # bit-identical
    ROUNDED = "rounded"  # to at least half of the digits, or within the effect of rounding the parameters
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one method except its time; values are None if the method failed.

    Attributes:
        peak_bytes: peak of tensors and workspaces (CUDA: allocated, plus the pools of CUDA graphs), static memory included.
        reserved_bytes: reserved bytes of the CUDA allocator; None on the CPU.
        host_bytes: peak of offloaded tensors on the host; None without offloading.
        exactness: exactness of loss and gradients.
        loss_error: distance from eager's loss, over its absolute value.
        gradient_error: Euclidean distance from eager's gradients, all in one vector, over their length.
        differences: names of all that is not equal to eager's to the last bit, buffers and random state included.
        error: the reason why the method does not run on this model and machine.
        applies: False if the method is not for such a model.
    """

    method: str
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    exactness: Exactness | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    differences: tuple[str, ...] = ()
    error: str | None = None
    applies: bool = True


class Benchmark:
    """A benchmark of methods that run one training step; model, batch, random state and settings are restored afterwards.

    Gradients are compared after the first step from the same random state. Some models amplify rounding errors (a deep network
    with batch norm to some percent of the gradient); the amplification is measured by rounding parameters.

    Args:
        workload: real tensors; its model in the mode it is trained in.
        seed: seed of the random state for the comparison of loss and gradients.
        extra_bytes: bytes that count but are not allocated here: optimizer state, gradients of earlier batches.
        host: the host memory that all methods offload to; None without offloading.
    """

    def __init__(self, workload: Workload, *, seed: int = 0, extra_bytes: int = 0, host: HostMemory | None = None) -> None:
        self._workload = workload
        self._seed, self._host = seed, host
        self._steps: dict[str, Step] = {}
        self._device = next(workload.model.parameters()).device
        step = TrainingStep(workload.model, workload.loss_fn)
        self._reference = measure.measure_outcome(step, workload.model, workload.batch, seed=seed)
        self._allowed = self._measure_rounding(step)
        self._static_bytes = extra_bytes + sum(t.size_bytes for t in StaticTensors(step, workload.batch, self._device).tensors)

    def enter(self, method: Method) -> Measured:
        """Run `method` and measure all but its time; if it fails, its error is recorded, and it cannot be timed."""
        model, loss_fn, _ = self._workload
        hidden_bytes = count_hidden_pool_bytes(self._device)
        try:
            step = method.prepare(model, loss_fn)
            measured = self._measure_step(method.name, step, hidden_bytes)
        except Exception as error:  # noqa: BLE001 (whatever stops one method, the others are measured)
            said = first_line(error) if isinstance(error, PlannerError) else typed_line(error)
            return Measured(method.name, error=said, applies=not isinstance(error, InapplicableError))
        self._steps[method.name] = step
        return measured

    def compare_with(self, name: str) -> None:
        """Compare methods entered from here on with the results of the method `name`, in place of eager PyTorch's."""
        model, _, batch = self._workload
        self._reference = measure.measure_outcome(self._steps[name], model, batch, seed=self._seed)

    def measure_times(self, names: Sequence[str], *, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of forward and backward passes of the named methods, in turns; see ``measure.turn_times``."""
        model, _, batch = self._workload
        with preserve_training_state(model, batch):
            steps = {name: measure.Isolated(self._steps[name], model, batch) for name in names}
            return measure.turn_times(steps, batch, parameters=list(model.parameters()), repeats=repeats)

    def _measure_step(self, name: str, step: Step, hidden_bytes: int) -> Measured:
        """Measure `step`; `hidden_bytes` were in pools of CUDA graphs before it was prepared."""
        model, _, batch = self._workload
        reference = self._reference
        if self._host is not None:
            self._host.peak_bytes = self._host.used_bytes
        found = measure.measure_outcome(step, model, batch, seed=self._seed)  # compilation happens here
        with preserve_training_state(model, batch):
            isolated = measure.Isolated(step, model, batch)
            memory = measure.measure_memory(isolated, batch, static_bytes=self._static_bytes, device=self._device)
        errors = _Errors.compare(reference, found)
        return Measured(
            name,
            peak_bytes=memory.peak_bytes + max(0, count_hidden_pool_bytes(self._device) - hidden_bytes),
            reserved_bytes=memory.reserved_bytes,
            host_bytes=None if self._host is None else self._host.peak_bytes,
            exactness=errors.judge_exactness(self._allowed),
            loss_error=errors.loss,
            gradient_error=errors.gradients,
            differences=reference.list_differences(found),
        )

    def _measure_rounding(self, step: Step) -> "_Errors":
        """Return the allowed errors: half of the digits, or a multiple of the effect of rounding the parameters."""
        model, _, batch = self._workload
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        eps = max(torch.finfo(p.dtype).eps for p in parameters)
        before = [p.detach().clone() for p in parameters]
        generator = torch.Generator(self._device).manual_seed(self._seed)
        loss = gradients = math.sqrt(eps)
        for _ in range(_ROUNDINGS):
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    noise = torch.randn(value.shape, dtype=value.dtype, device=value.device, generator=generator)
                    parameter.copy_(value * (1 + eps * noise))
            try:
                errors = _Errors.compare(self._reference, measure.measure_outcome(step, model, batch, seed=self._seed))
            finally:
                with torch.no_grad():
                    for parameter, value in zip(parameters, before, strict=True):
                        parameter.copy_(value)
            loss, gradients = max(loss, _MARGIN * errors.loss), max(gradients, _MARGIN * errors.gradients)
        return _Errors(loss, gradients, same=False)


@dataclass(frozen=True, slots=True)
class _Errors:
    """Relative errors of loss and gradients, and whether they are bit-identical."""

    loss: float
    gradients: float
    same: bool

    @classmethod
    def compare(cls, reference: StepOutcome, found: StepOutcome) -> "_Errors":
        gradients = [name for name in reference.values if name.startswith("gradient of ")]
        same = not {"loss", *gradients}.intersection(reference.list_differences(found))
        return cls(compute_relative_error(reference, found, ["loss"]), compute_relative_error(reference, found, gradients), same)

    def judge_exactness(self, allowed: "_Errors") -> Exactness:
        if self.same:
            return Exactness.IDENTICAL
        fits = self.loss <= allowed.loss and self.gradients <= allowed.gradients
        return Exactness.ROUNDED if fits else Exactness.WRONG


def compute_relative_error(reference: StepOutcome, found: StepOutcome, names: Sequence[str]) -> float:
    """Return the Euclidean distance from `reference` over all `names`, relative to the length of `reference`.

    The result is NaN if a value is, and infinity if a value is missing on one side.
    """
    distance = length = 0.0
    for name in names:
        wanted, given = reference.values[name], found.values.get(name)
        if wanted is None and given is None:
            continue
        if wanted is None or given is None:
            return math.inf
        distance = math.hypot(distance, _compute_length(given.double() - wanted.double()))
        length = math.hypot(length, _compute_length(wanted.double()))
    if distance == 0:
        return 0.0
    return distance / length if length else math.inf


def _compute_length(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
