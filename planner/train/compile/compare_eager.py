"""Comparison of a planned step with plain eager PyTorch on the batch it was planned for: bits, time and peak.

Eager PyTorch is run twice where the planned step differs from it, since on a GPU it may differ from itself. The first op that
differs is found by digests of all values, so that the warning names the cause and not the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from statistics import median
from typing import Any

import torch

from planner.capture.frontend.preserved_state import UndoWrites, preserve_training_state
from planner.capture.lowering.lower import Capture
from planner.capture.program.program import Call, Ref
from planner.capture.replay import RealStep, collect_written_tensors
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.graphs.errors import EagerWarning, typed_line
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.units import format_bytes, format_seconds
from planner.graphs.walks import walk
from planner.measure.pool_memory import measure_peak
from planner.measure.steps import Isolated, Step, compute_ratio, measure_outcome, turn_times
from planner.memory.release import release_unused
from planner.plans.eager import DifferingOp, EagerComparison
from planner.plans.keep_everything import explain_not_fitting
from planner.plans.plan import Plan
from planner.runtime.allocator_failure import find_allocator_failure
from planner.torch_private.core import TorchDispatchMode, pytree
from planner.train.distributed.ranks import ALONE, SingleProcess

_MOST_TURNS = 9
_TURNS_S = 0.5  # seconds for all turns of both steps; at least one turn
# A captured step may take this ratio, and this many seconds, more than eager PyTorch before a warning.
_MUCH = 1.5
_ROUNDING = 0.05  # of the largest element: partial sums in half precision are far below
_MORE_THAN_PREDICTED = 3.0  # of a gradient error
_LEAST_S, _LEAST_BYTES = 0.02, 32 * 2**20
_FSDP2 = "FSDP2"
_CAPTURED = "one op was captured as several; please report it"
_BUSY_OR_CAPTURED = f"other work ran on the machine, and planning again helps, or {_CAPTURED}"


def compare_with_eager(
    captured: Capture,
    planned: Step,
    step: TrainingStep,
    batch: Batch,
    *,
    plan: Plan | None = None,
    together: SingleProcess = ALONE,
) -> EagerComparison:
    """Compare `planned` with `step` from the current random state; restore `step` and `batch` afterwards.

    With Inductor's kernels, the reference is PyTorch's own run of them in place of `step`. Under FSDP2 `step` runs by its hooks:
    all processes run the same steps, and each compares its own shards. Inductor's kernels have no reference there.

    Differences that `plan` allows are measured, but not where they begin; of a lossy one the error of gradients too. Time and
    peak of an earlier comparison are reused if the bits are equal in both.
    """
    reference, reference_name = _choose_reference(captured, step, together)
    if captured.whole is not None and not together.is_alone:  # whose kernels would read beyond shards
        return EagerComparison(failure="torch.compile does not compile its hooks", reference=reference_name)
    device = next(step.parameters()).device
    if failure := _find_first(together, explain_not_fitting(captured.graph, device)):
        return EagerComparison(failure=failure, reference=reference_name)
    # Autograd does not see writes of Inductor's kernels. FSDP2 writes into memory of its own, which it frees and takes again.
    undone = UndoWrites() if together.is_alone else None
    written = collect_written_tensors(captured, step, batch)
    try:
        plain = measure_outcome(reference, step, batch, written=written, undone=undone)
    except Exception as error:  # noqa: BLE001  # whatever stops PyTorch, the plan is good all the same
        failure = _describe_failure(error, device)
    if failure := _find_first(together, failure):
        return EagerComparison(failure=failure, reference=reference_name)
    written += [] if undone is None else undone.written
    found = measure_outcome(planned, step, batch, written=written)
    differ = any(together.gather(bool(names := plain.list_differences(found))))
    known, allowed = (None, False) if plan is None else (plan.eager, bool(plan.differs))
    if known is not None and known.identical and known.planned_time_s and not differ:
        return known
    own_error = None
    if differ and not allowed:
        again = measure_outcome(reference, step, batch, written=written, undone=None if undone is None else UndoWrites())
        own_error = plain.compute_gradient_error(again) if plain.list_differences(again) else None
    lossy = plan is not None and plan.gradient_error is not None
    unexplained = bool(names) and not allowed and own_error is None and together.is_alone
    with preserve_training_state(step, batch, written=written) as restore:
        steps = {"plain": Isolated(reference, step, batch), "planned": Isolated(planned, step, batch)}
        turn = partial(turn_times, steps, batch, parameters=list(step.parameters()), warm_up=False, prepare=restore)
        time_s, ratio, spread = _compare_times(turn, together)
        peak_bytes = measure_peak(captured, reference, step, batch).peak_bytes
    return EagerComparison(
        differences=tuple(plain.compute_difference(name, found) for name in names),
        first_op=_find_first_differing_op(captured, step, batch) if unexplained and captured.whole is None else None,
        peak_bytes=peak_bytes,
        time_s=time_s,
        planned_time_s=time_s * ratio,
        spread=spread,
        reference=reference_name,
        gradient_error=plain.compute_gradient_error(found) if lossy or own_error is not None else None,
        eager_error=own_error,
    )


def _choose_reference(captured: Capture, step: TrainingStep, together: SingleProcess) -> tuple[Step, str]:
    """Return the step to compare with, and its name."""
    reference, name = (step, "eager") if captured.whole is None else (captured.whole, "torch.compile")
    if captured.guards is not None:
        reference = captured.guards.wrap_uncounted(reference, step)
    return reference, name if together.is_alone else _FSDP2


def _describe_failure(error: Exception, device: torch.device) -> str:
    if find_allocator_failure(error) is not None:
        release_unused(device)
        return "it needs more memory than there is"
    return typed_line(error)


def _find_first(together: SingleProcess, reason: str) -> str:
    """Return the reason of the first of the processes that has one, "" if none has."""
    return next(filter(None, together.gather(reason)), "")


def warn_of_differences(plan: Plan) -> None:
    """Warn if a step by `plan` differs from eager PyTorch without permission, or was captured with more expensive ops."""
    eager = plan.eager
    if eager is None or eager.failure:
        return
    if plan.gradient_error is not None:
        found = eager.gradient_error
        if found is not None and not found <= _MORE_THAN_PREDICTED * plan.gradient_error + _ROUNDING:
            warn_caller(f"the planned step has a {plan.lossy}: refresh its sensitivities", EagerWarning)
    elif plan.differs:
        much = tuple(found for found in eager.differences if found.max_abs is None or (found.relative or 0.0) > _ROUNDING)
        if much:
            differing = replace(eager, differences=much).describe_differences()
            warn_caller(f"the planned step {differing}, by more than the permitted rounding", EagerWarning)
    elif not (eager.identical or eager.within_own_error):
        warn_caller(f"the planned step {eager.describe_differences()}", EagerWarning)
    kept_bytes = plan.graph.keep_everything_peak_bytes
    frees = eager.reference == _FSDP2  # units after each pass, which keeping everything does not
    if kept_bytes > max(_MUCH * eager.peak_bytes, eager.peak_bytes + _LEAST_BYTES) and not frees:
        _warn_dearer(format_bytes(kept_bytes), f"{eager.reference} {format_bytes(eager.peak_bytes)}", why=_CAPTURED)
    kept_s = eager.planned_time_s / (1 + plan.overhead)
    if kept_s > max(_MUCH * eager.time_s, eager.time_s + _LEAST_S):
        _warn_dearer(format_seconds(kept_s), f"{eager.reference} {format_seconds(eager.time_s)}", why=_BUSY_OR_CAPTURED)


def _warn_dearer(kept: str, plain: str, *, why: str) -> None:
    warn_caller(f"the captured step takes {kept} without recomputation, and {plain}: {why}", EagerWarning)


def _compare_times(turn: Callable[..., dict[str, list[float]]], together: SingleProcess) -> tuple[float, float, float]:
    """Return the seconds of a plain step, the ratio of a planned step to it, and the spread of that ratio.

    Both have run before. A turn that takes all the time there is for turns counts; otherwise it was a warm-up.
    """
    found = turn(repeats=1)
    if (turns := min(together.gather(min(_MOST_TURNS, int(_TURNS_S / sum(map(sum, found.values()))))))) > 0:
        found = turn(repeats=turns)
    return median(found["plain"]), *compute_ratio(found["planned"], found["plain"])


def _find_first_differing_op(captured: Capture, step: TrainingStep, batch: Batch) -> DifferingOp | None:
    """Return the first op on the path to a difference, none of whose results eager PyTorch computes; None if there is none.

    The path is followed backward from the differing results, and ends at ops whose results eager PyTorch has. An eager op that
    was captured as several ops does not count if the last result is the same.
    """
    written = collect_written_tensors(captured, step, batch)
    with preserve_training_state(step, batch, written=written), UndoWrites(), _Results() as results:
        Isolated(step, step, batch).run()
    made: dict[int, tuple[bytes, ...]] = {}
    graph, real = captured.graph, RealStep(captured, step, batch)
    with real.preserve_state():
        real.run({op.id: Call(partial(_note_digests, made), (op.id, tuple(map(Ref, op.outputs)))) for op in graph.ops})
    other = {op.id for op in graph.ops if op.outputs and op.id in made and not results.digests.intersection(made[op.id])}
    ends = {t for t in graph.kept if not other.isdisjoint(graph.tensors[t].producers)}
    ends |= {t for op in graph.ops if op.mutates for t in op.inputs}
    behind = {op: other.intersection(p for t in graph.ops[op].inputs for p in graph.tensors[t].producers) for op in other}
    found = walk(other.intersection(p for t in ends for p in graph.tensors[t].producers), behind.__getitem__)
    first = min((op for op in found if graph.ops[op].target != "generator.get_state"), default=None)
    if first is None:
        return None
    culprit = graph.ops[first]
    module = "" if culprit.module == "model" else culprit.module.removeprefix("model.")  # as in the user's code
    return DifferingOp(culprit.name, culprit.target, module)


def _note_digests(made: dict[int, tuple[bytes, ...]], op: int, values: tuple[torch.Tensor | None, ...]) -> None:
    made[op] = tuple(_compute_digest(value) for value in values if value is not None)


class _Results(TorchDispatchMode):
    """Digests of all values computed inside the context, forward and backward, including views and transposes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digests: set[bytes] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(returned):
            if isinstance(value, torch.Tensor):
                self.digests.add(_compute_digest(value))
                if value.dim() == 2:
                    self.digests.add(_compute_digest(value.t()))
        return returned


def _compute_digest(value: torch.Tensor) -> bytes:
    """Return a digest of the dtype and the elements of `value` in order; sparse layouts are made dense first."""
    dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    flat = dense.cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)  # one row may keep its stride
    return blake2b(flat.numpy().tobytes(), key=str(value.dtype).encode(), digest_size=16).digest()
