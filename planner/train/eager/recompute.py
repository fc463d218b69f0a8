"""Recomputation of evicted storages, and of the storages that they need and that are not resident.

No recursion: a chain of in-place writes may be longer than Python's stack. The outputs that are wanted come last, as in the
replay of ``solvers.baselines.common.online``, so that the runtime evicts what the replay of its step evicts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphs.errors import BudgetError, PlannerError
from graphs.units import format_bytes, format_enough
from planner.capture.program.draws import draw_again
from planner.runtime.allocator_failure import find_allocator_failure
from planner.torch_private.core import (
    AUTOCAST_AND_VMAP_KEYS,
    MODE_IN_CPP,
    below_autograd,
    get_kernel_settings,
    set_kernel_settings,
    without_keys,
)
from planner.train.eager.device_costs import OpCosts
from planner.train.eager.memory import Memory
from planner.train.eager.sizes import may_take_free_memory
from planner.train.eager.storages import RecordedOp, TrackedStorage, make_alias

# With fewer recomputed ops than this, the limit on recomputation is not checked.
_FEW_OPS = 1000


class Recomputation:
    """Recomputes storages by their chains of ops.

    Args:
        memory: the budgeted memory, which makes room before each op.
        max_recomputation: the most ops that may be recomputed in a step, as a multiple of the ops of the step.
        costs: measures ops. Where ops return before they are done, a recomputed op counts with its first measured time.

    Attributes:
        ops: number of recomputed ops.
        seconds: time of recomputed ops.
        step_ops: number of ops that the step has run itself.
        own_keys: the dispatch keys that its ops pass by. After the block, another one may record them.
        by_operator, by_module: number and time by operator, and by the module in which ops first ran.
    """

    __slots__ = ("__dict__", "step_ops")

    def __init__(self, memory: Memory, max_recomputation: float, costs: OpCosts) -> None:
        self.memory = memory
        self.costs = costs
        self.max_recomputation = max_recomputation
        self.step_ops = 0
        self.ops = 0
        self.seconds = 0.0
        self.by_operator: dict[str, tuple[int, float]] = {}
        self.by_module: dict[str, tuple[int, float]] = {}
        self.own_keys = AUTOCAST_AND_VMAP_KEYS | MODE_IN_CPP
        self._ops_before = 0

    def begin_step(self) -> None:
        """Start to count the ops of a step."""
        self._ops_before, self.step_ops = self.ops, 0

    @contextmanager
    def run_own_ops(self) -> Iterator[None]:
        """Run ops without recording them, below autograd, autocast and vmap, where the recorded ops were recorded."""
        settings = get_kernel_settings()
        try:
            with below_autograd(), without_keys(self.own_keys):
                yield
        finally:
            _use(settings)

    def recompute(self, storage: TrackedStorage) -> torch.Tensor:
        """Make the current contents of `storage` resident, and return a tensor on it.

        Storages that it needs and that are not resident are recomputed first. The stack of unfinished storages is a list, because
        chains may be longer than Python's recursion limit.

        Raises:
            BudgetError: the storage does not fit, or more ops than allowed are recomputed.
        """
        self._rebuild(storage, storage.version)
        assert storage.base is not None
        return storage.base

    def restore(self, storage: TrackedStorage) -> None:
        """Restore the current contents of a resident storage that a failed op may have written in part.

        Raises:
            BudgetError: a copy does not fit, or more ops than allowed are recomputed.
        """
        version = storage.version
        with self.run_own_ops():
            storage.version += 1  # nothing reads this one, so the contents before it are rebuilt in new memory
            try:
                rebuilt = self._rebuild(storage, version)
            finally:
                storage.version = version
            held = storage.get_storage()
            assert held is not None
            held.copy_(rebuilt.untyped_storage())
        del rebuilt
        self.memory.settle()

    def _rebuild(self, storage: TrackedStorage, version: int) -> torch.Tensor:
        """Return a tensor with the contents of a version of `storage`, rebuilt in new memory."""
        stack = [rebuild := self._begin(storage, version)]
        try:
            while stack:
                self.memory.settle()
                top = stack[-1]
                missing = top.find_next_missing()
                if missing is not None:
                    stack.append(self._begin(*missing))
                elif top.step < len(top.chain):
                    self._execute(top, stack)
                else:
                    stack.pop()
                    if stack:
                        stack[-1].receive(top)
        except BaseException:
            for rebuild in stack:
                rebuild.abandon(self.memory)
            raise
        assert rebuild.built is not None
        return rebuild.built

    def _begin(self, storage: TrackedStorage, version: int) -> "_Rebuild":
        """Return a new rebuild of a storage. All inputs of its ops count as read now, before missing ones are recomputed."""
        rebuild = _Rebuild(storage, version)
        for op in rebuild.chain:
            for read, _ in op.inputs:
                if read is not None:
                    self.memory.touch(read, self.memory.clock_s)
        return rebuild

    def _execute(self, rebuild: "_Rebuild", stack: "list[_Rebuild]") -> None:
        op = rebuild.chain[rebuild.step]
        sources = [source for storage, version in op.inputs if (source := rebuild.get_source(storage, version)) is not None]
        if len(sources) < len(op.inputs):  # the garbage collector has just freed one
            return
        # The list holds the inputs, so that they are not evicted.
        # A tensor for results counts with its last size, although an op resizes it only later.
        self._make_room(op, op.room_bytes if op.in_place else max(op.room_bytes, rebuild.storage.size_bytes), stack)
        called = self._call(op, sources, stack)
        if called is None:
            rebuild.restart(self.memory)
            return
        outputs, seconds = called
        rebuild.take_outputs(op, outputs, self.memory)
        self.memory.record_recomputed(op)
        self._count(op, seconds)

    def _make_room(self, op: RecordedOp, room_bytes: int, stack: "list[_Rebuild]") -> None:
        """Make room for `op`. As the last resort, drop inputs that unfinished rebuilds hold, once per op."""
        memory, at_last = self.memory, False
        while memory.live_bytes + room_bytes > memory.budget_bytes:
            try:
                memory.make_room(room_bytes, f"recomputing {op.operator.function}", at_last=at_last)
            except BudgetError:
                if at_last:
                    raise
                at_last = not _let_go(stack)
        memory.peak_bytes = max(memory.peak_bytes, memory.live_bytes + room_bytes)

    def _call(self, op: RecordedOp, sources: list[torch.Tensor], stack: "list[_Rebuild]") -> tuple[list[Any], float] | None:
        """Execute an op again, until the allocator has memory for it or nothing is left to evict; return outputs and seconds.

        Return None if the op may have written before the allocator failed. The caller then rebuilds the storage that it writes.
        """
        _use(op.settings)
        costs = self.costs
        if not costs.times_each and may_take_free_memory(op.operator.function):
            costs.find_block(op.room_bytes, self.memory.evict_after)
        while True:
            start = self.memory.now()
            costs.forget_failures()
            try:
                if op.draws is None:
                    outputs = op.execute(sources)
                else:
                    generator, state = op.draws
                    outputs = draw_again(state.copy.get_state(), generator, None, op.execute, sources)
                break
            except Exception as error:
                while not self.memory.evict_after(error):
                    if find_allocator_failure(error) is None or not _let_go(stack):
                        raise
                if op.in_place and not op.operator.allocates_first:
                    return None
        seconds = self.memory.now() - start
        costs.check_memory(op.operator.function)
        if not costs.times_each:
            seconds = op.seconds
        return outputs, seconds

    def _count(self, op: RecordedOp, seconds: float) -> None:
        self.ops += 1
        self.seconds += seconds
        self.memory.clock_s += seconds
        for by, name in ((self.by_operator, str(op.operator.function)), (self.by_module, op.module or "outside of modules")):
            count, total = by.get(name, (0, 0.0))
            by[name] = count + 1, total + seconds
        step = self.ops - self._ops_before
        if step > _FEW_OPS and step > self.max_recomputation * self.step_ops:
            raise BudgetError(
                f"budget {format_bytes(self.memory.budget_bytes)} needs too much recomputation: this step has recomputed {step} "
                f"ops, more than {self.max_recomputation:g} times the {self.step_ops} ops that it has run. The peak of plain "
                f"eager PyTorch so far is {format_enough(self.memory.eager_peak_bytes)}: with that budget nothing is recomputed. "
                "Raise the budget, or max_recomputation="
            )


class _Rebuild:
    """The rebuild of one version of a storage, in new memory, by the first ops of its chain."""

    def __init__(self, storage: TrackedStorage, version: int) -> None:
        self.storage = storage
        self.version = version
        if not storage.is_recomputable(version):
            raise PlannerError("an evicted tensor cannot be recomputed: this is a bug in planner, please report it")
        self.chain = storage.chain[: version + 1]
        self.step = 0
        self.built: torch.Tensor | None = None
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        self._let_go = 0

    def find_next_missing(self) -> tuple[TrackedStorage, int] | None:
        """Return the next input of the next op that is not resident."""
        if self.step == len(self.chain):
            return None
        for storage, version in self.chain[self.step].inputs:
            if storage is None or (storage.address and version == storage.version):
                continue
            if (id(storage), version) in self._inputs or storage.has_copy(version):
                continue
            return storage, version
        return None

    def receive(self, made: "_Rebuild") -> None:
        """Hold a rebuilt storage as an input of the next op."""
        assert made.built is not None
        self._inputs[id(made.storage), made.version] = made.built

    def let_go(self) -> bool:
        """Drop the inputs of the next op, and return True; return False if there are none or they were dropped once before."""
        if not self._inputs or self._let_go > self.step:
            return False
        self._let_go = self.step + 1
        self._inputs.clear()
        return True

    def get_source(self, storage: TrackedStorage | None, version: int) -> torch.Tensor | None:
        """Return another tensor on the storage of an input; None if it is not resident."""
        if storage is None:
            return self.built
        source = self._inputs.get((id(storage), version))
        if source is None and storage.snapshots is not None:
            source = storage.snapshots.get(version)
        if source is None and (resident := get_resident_tensor(storage)) is not None:
            source = make_alias(resident)  # whoever holds this one keeps the storage from being evicted
        return source

    def take_outputs(self, op: RecordedOp, outputs: list[Any], memory: Memory) -> None:
        """Take the output of an op of the chain, and keep its other outputs that saved tensors need."""
        self.step += 1
        self._inputs.clear()
        if op.in_place:
            return
        made = [(position, storage) for position, weak in op.outputs if (storage := weak()) is not None]
        for position, storage in sorted(made, key=lambda output: output[1] is self.storage):  # last, as in the replay
            if storage is self.storage:
                self.built = outputs[position]
                if self.version == storage.version:
                    memory.record_computed(storage, self.built)
                else:
                    memory.add(self.built, visible=False)
            elif storage.saved and not storage.address and storage.version == 0:
                memory.record_computed(storage, outputs[position])

    def restart(self, memory: Memory) -> None:
        """Start again, in new memory."""
        self.abandon(memory)
        self.step = 0
        self._inputs.clear()

    def abandon(self, memory: Memory) -> None:
        """Free the unfinished result."""
        if self.built is not None and self.version == self.storage.version:
            self.storage.base = None
            self.storage.move_aliases(None)
        self.built = None
        memory.settle()


def _let_go(stack: list[_Rebuild]) -> bool:
    """Drop the inputs of the first unfinished rebuild below the top that can drop them; return False if none can."""
    return any(rebuild.let_go() for rebuild in stack[:-1])


def _use(settings: tuple[Any, ...]) -> None:
    if settings != get_kernel_settings():
        set_kernel_settings(settings)


def get_resident_tensor(storage: TrackedStorage) -> torch.Tensor | None:
    """Return a tensor on a storage; None if it is not resident."""
    if storage.base is not None:
        return storage.base
    if (alias := storage.find_alias()) is not None:
        return alias
    return None if storage.get_storage() is None else view_whole(storage)


def view_whole(storage: TrackedStorage) -> torch.Tensor:
    """Return a tensor on all bytes of a resident storage, even if all tensors on it cover only a part."""
    held = storage.get_storage()
    assert held is not None
    return torch.empty(0, dtype=torch.uint8, device=held.device).set_(held)
