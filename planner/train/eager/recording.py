"""The parts of recording that are Python's: sizes, room, errors of ops, and the begin and end of steps.

The C++ library executes and records ops (``planner/native/op_records.cpp``), and calls what is here.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from planner.capture.rewrites.sparse_products import list_strided_parts
from planner.graphs.errors import BudgetError
from planner.graphs.short_tracebacks import mark_as_raised_by_op
from planner.graphs.units import format_bytes, format_enough
from planner.runtime.allocator_failure import find_allocator_failure
from planner.torch_private.core import storage_address
from planner.train.eager.device_costs import OpCosts
from planner.train.eager.modules import CurrentModule
from planner.train.eager.operators import Operator
from planner.train.eager.sizes import KnownOp, OutputSizes, bound_data_dependent_bytes, may_take_free_memory
from planner.train.eager.step_follower import StepFollower
from planner.train.eager.storages import Memory, Recomputation, Sources

# Records are dropped when no tensor is saved, but only if there are more of them than this.
FEW_OPS = 64
# A note added to the allocator's error.
_NOT_AGAIN = (
    "planner.rematerialize does not run {} again: it may have written part of a tensor that cannot be recomputed, such as a "
    "parameter or a buffer. Lower the budget, so that tensors are evicted before the allocator runs out of memory"
)
# A storage with more in-place writes is kept, because the cost of recomputing it grows with each write.
LONGEST_CHAIN = 1000


class Recorder:
    """What is known of the ops of a thread, and of the backward passes that begin there.

    Args:
        memory: the budgeted memory.
        sizes: sizes of outputs, by signature.
        recomputation: executes recorded ops.
        sources: the saved tensors of autograd, and what they can be recomputed from.
        max_recomputation: the most ops that may be recomputed in a step, as a multiple of the ops of the step.
        follower: logs steps, and follows their plans.
        costs: measures ops.

    Attributes:
        module: the module that is running.
    """

    def __init__(
        self,
        memory: Memory,
        sizes: OutputSizes,
        recomputation: Recomputation,
        sources: Sources,
        max_recomputation: float,
        follower: StepFollower,
        costs: OpCosts,
    ) -> None:
        self.memory = memory
        self.max_recomputation = max_recomputation
        self.sizes = sizes
        self.recomputation = recomputation
        self.follower = follower
        self.costs = costs
        self.sources = sources
        self.module = CurrentModule()

    # Before an op.

    def bound_bytes(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Return the most bytes that an op makes whose sizes depend on data."""
        return bound_data_dependent_bytes(operator.name, args, kwargs)

    def learn_sizes(self, known: KnownOp, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Fill in the facts about the ops of a new signature."""
        self.sizes.learn(known, function, args, kwargs)
        known.needs_block = not self.costs.times_each and may_take_free_memory(function)

    # After an op.

    def recover(self, operator: Operator, error: BaseException, can_undo: bool) -> bool:  # noqa: FBT001 - called from C++
        """Evict if the allocator had no memory for an op; return True if the op can be executed again.

        It can be if what it may have written before the allocator failed can be undone.
        """
        again = False
        if isinstance(error, Exception) and find_allocator_failure(error) is not None:
            if can_undo:
                again = self.evict_after(error)
            else:
                error.add_note(_NOT_AGAIN.format(operator.function))
        if isinstance(error, Exception) and not again:
            mark_as_raised_by_op(error)
        return again

    def evict_after(self, error: BaseException) -> bool:
        """Evict as many bytes as the allocator lacked, if `error` is its failure; return True if the op can be retried.

        Return False if all resident storages are in use, or if the error has another cause.
        """
        failure = find_allocator_failure(error)
        if failure is None:
            return False
        self.memory.retries += 1
        return self.memory.evict_bytes(failure.asked_bytes or 1)

    def is_memory_error(self, error: BaseException) -> bool:
        """Return True if `error` is a failure of the allocator."""
        return find_allocator_failure(error) is not None

    def find_made(self, outputs: Sequence[object]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the tensors on new storages that the outputs of an op consist of, some of which are sparse, with positions."""
        made: set[int] = set()
        for position, output in enumerate(outputs):
            for part in list_strided_parts(output) if isinstance(output, torch.Tensor) else ():
                if type(part) is torch.Tensor and (address := storage_address(part)) not in made:
                    made.add(address)
                    if self.memory.find_bytes(part) is None:
                        yield position, part

    # Room.

    def forget_unneeded(self) -> None:
        """Drop the records that no saved tensor needs, with what they keep; called before a budget is too small."""
        if self.sources.saved:
            self.sources.forget_unneeded()
        else:
            self.forget()

    def collect_garbage(self) -> None:
        """Free what only reference cycles hold; called before a budget is too small."""
        gc.collect()

    def raise_too_small(self, size_bytes: int, purpose: object) -> NoReturn:
        """Raise the error of a budget that is too small."""
        memory = self.memory
        needed = memory.live_bytes + size_bytes
        moment, request = (
            ("", f", and {purpose} needs {format_bytes(size_bytes)} more") if size_bytes else (f" after {purpose}", "")
        )
        raise BudgetError(
            f"budget {format_bytes(memory.budget_bytes)} is too small: {format_bytes(memory.live_bytes)} are in use{moment} and "
            f"cannot be evicted{request}. Up to this point {format_enough(needed)} is enough; the peak of plain eager PyTorch so "
            f"far is {format_enough(max(memory.eager_peak_bytes, needed))}. Raise the budget, or lower the batch size"
        )

    def raise_too_much(self, recomputed: int, ops: int) -> NoReturn:
        """Raise the error of a step that has recomputed too many ops."""
        memory = self.memory
        raise BudgetError(
            f"budget {format_bytes(memory.budget_bytes)} needs too much recomputation: this step has recomputed {recomputed} "
            f"ops, more than {self.max_recomputation:g} times the {ops} ops that it has run. The peak of plain "
            f"eager PyTorch so far is {format_enough(memory.eager_peak_bytes)}: with that budget nothing is recomputed. "
            "Raise the budget, or max_recomputation="
        )

    # Saved tensors.

    def raise_overwritten(self, saved: torch.Tensor, expected: int, version: int) -> NoReturn:
        """Raise the error that plain eager PyTorch raises for a saved tensor that was modified in place."""
        kind = f"{saved.dtype}".removeprefix("torch.")
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{kind} {list(saved.shape)}] is at version {version}; expected version {expected} instead. "
            "Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
        )

    # Steps.

    def begin_saving(self) -> None:
        """Begin a step: autograd is about to save its first tensor."""
        self.begin_step()
        self.follower.begin()

    def begin_step(self) -> None:
        """Drop all records if no tensor is saved, unless there are few of them, because that takes time."""
        if self.memory.recorded > FEW_OPS and 4 * self.memory.recorded > self.memory.resident:
            self.forget()
            self.recomputation.begin_step()

    def forget(self) -> None:
        """Drop the records of all resident storages: no saved tensor needs them."""
        self.memory.forget()
        self.sources.forget()

    def close(self) -> None:
        """End the block: its records, and what they hold in memory, are dropped when no saved tensor needs them."""
        self.recomputation.in_block = False
        self.memory.settle()
        if not self.sources.saved:
            self.forget()
