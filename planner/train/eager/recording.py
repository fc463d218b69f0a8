"""The dispatch mode: makes room before each op, and records it afterwards.

Once the C++ library is there, it executes and records most ops (``native_recording``), and only the others come here. Without it,
recording takes longer than small ops do. An op that ends with an error may have written a part of its result, so that storage is
kept, as it cannot be recomputed.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from graphs.errors import BudgetError
from graphs.short_tracebacks import mark_as_raised_by_op
from planner.capture.rewrites.sparse_products import list_strided_parts
from planner.runtime.allocator_failure import find_allocator_failure
from planner.torch_private.core import TorchDispatchMode, storage_address
from planner.train.eager.device_costs import OpCosts
from planner.train.eager.draws import get_random_state, lock_of_draws
from planner.train.eager.memory import Memory
from planner.train.eager.modules import CurrentModule
from planner.train.eager.operators import Operator
from planner.train.eager.recompute import Recomputation
from planner.train.eager.saved_tensors import SavedTensor
from planner.train.eager.sizes import KnownOp, OutputSizes, bound_data_dependent_bytes, may_take_free_memory
from planner.train.eager.sources import Sources
from planner.train.eager.step_follower import StepFollower
from planner.train.eager.storages import HOLE, RecordedOp, TrackedStorage, build_reference, make_alias
from planner.train.eager.tensor_arguments import iterate_tensors

# Module globals, because they are read for each tensor of each op.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
# Records are dropped when no tensor is saved, but only if there are more of them than this.
FEW_OPS = 64
# A note added to the allocator's error.
_NOT_AGAIN = (
    "planner.rematerialize does not run {} again: it may have written part of a tensor that cannot be recomputed, such as a "
    "parameter or a buffer. Lower the budget, so that tensors are evicted before the allocator runs out of memory"
)
# A storage with more in-place writes is kept, because the cost of recomputing it grows with each write.
LONGEST_CHAIN = 1000


class Recorder(TorchDispatchMode):
    """While entered, sees each op of its thread and of the backward passes that begin there.

    Args:
        memory: the budgeted memory.
        sizes: sizes of outputs, by signature.
        recomputation: executes recorded ops.
        follower: logs steps, and follows their plans.
        costs: measures ops.

    Attributes:
        take_error: returns the error of the C++ library's attempt to execute the op that was called, if there was one: in a list,
            which is emptied when it is raised again, so that its traceback does not lead back to it.
        release: forgets a saved tensor that autograd drops, and returns True, if the C++ library records ops; else returns False.
        lock: held while the state of the runtime is read or changed, because a backward pass may run in several threads.
        is_closed: the block has ended.
        sources: the saved tensors of autograd, and what they can be recomputed from.
        ops: number of recorded ops.
        kept_ops: number of ops that cannot be executed again, so that their outputs are kept.
        between_peak_bytes: the most bytes in memory during an op that ran while autograd held no tensor.
        host_reads: number of Python numbers that were read from tensors.
        module: the module that is running.
    """

    __slots__ = ("_recorded", "kept_ops", "ops")

    def __init__(
        self,
        memory: Memory,
        sizes: OutputSizes,
        recomputation: Recomputation,
        follower: StepFollower,
        costs: OpCosts,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.sizes = sizes
        self.recomputation = recomputation
        self.follower = follower
        self.costs = costs
        self.lock = threading.RLock()
        self.is_closed = False
        self.sources = Sources(memory, recomputation)
        self.ops = self.kept_ops = self.host_reads = self.between_peak_bytes = 0
        self.module = CurrentModule(SimpleNamespace(module=0))
        self.take_error: Callable[[], list[Exception]] = list
        self.release: Callable[[SavedTensor], bool] = lambda _saved: False
        self._operators: dict[int, Operator] = {}
        self._recorded = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch wraps each call, which takes as long as all the work here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        operator = self._operators.get(id(func)) or self.get_operator(func)
        if operator.passes:
            return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        for kind in types:
            if kind is not _Tensor and kind is not _Parameter:
                return NotImplemented  # a subclass: its inner ops come here
        with self.lock:
            if self.recomputation.running:
                return operator.call(*args, **(kwargs or {}))
            return self.run(RecordedOp(operator, args, kwargs or {}), self.take_error())

    def get_operator(self, op: object) -> Operator:
        """Return the facts about an operator, cached by identity: operators are never freed, and hashing them is slow."""
        operator = self._operators.get(id(op))
        if operator is None:
            operator = self._operators[id(op)] = Operator.of(op)
        return operator

    def run(self, op: RecordedOp, failed: list[Exception]) -> Any:
        """Execute an op within the budget, and record it; `failed` is what `take_error` has returned."""
        memory, follower, operator, args, kwargs = self.memory, self.follower, op.operator, op.args, op.kwargs
        if memory.freed:
            memory.settle()
        is_between = not self.sources.saved
        if is_between:
            self._begin_step()
            follower.end()
        op.module = self.module.name
        written: Sequence[TrackedStorage] = ()
        if operator.writes:
            written = self.find_writes(op)
            if operator.is_plain_write and all(storage.pinned for storage in written):
                return self._write_pinned(op, written, failed)
        known = op.known = self.describe(op, args)
        out_bytes = known.out_bytes
        with_op_bytes = memory.live_bytes + out_bytes + known.workspace_bytes
        if with_op_bytes > memory.budget_bytes:
            self._make_room(known, op)
        elif with_op_bytes > memory.peak_bytes:
            memory.peak_bytes = with_op_bytes
        held_bytes = memory.live_bytes
        if written:
            self.sources.copy_before_writes(op, written)
        if operator.draws:
            with lock_of_draws(operator):
                op.draws = get_random_state(args, kwargs)
                outputs = self._execute(op, known, written, args, kwargs, failed)
        else:
            outputs = self._execute(op, known, written, args, kwargs, failed)
        if memory.freed:
            memory.settle()
        made_bytes = self.record(op, known, written, outputs)
        if follower.log is not None:
            follower.log_op(op, written, known)
        if made_bytes != out_bytes:
            memory.make_room(0, op.function)
        if is_between:
            self.between_peak_bytes = max(self.between_peak_bytes, held_bytes + made_bytes + known.workspace_bytes)
        return outputs

    def _make_room(self, known: KnownOp, op: RecordedOp) -> None:
        """Evict until an op fits; for a guessed workspace only as far as possible."""
        memory = self.memory
        try:
            memory.make_room(known.out_bytes + known.workspace_bytes, op.function, at_last=not known.guessed)
        except BudgetError:
            if not known.guessed:
                raise
            memory.make_room(known.out_bytes, op.function)
        for reference in op.inputs:
            if reference.storage is not None and reference.storage.pinned:  # perhaps only now: `forget_unneeded`
                self.sources.keep(reference.storage, reference.version, op)

    def _write_pinned(self, op: RecordedOp, written: Sequence[TrackedStorage], failed: list[Exception]) -> Any:
        """Execute an op that writes only pinned storages, such as an update of parameters, without recording it."""
        memory, follower = self.memory, self.follower
        self.sources.copy_before_writes(op, written)
        start = memory.now()
        outputs = self._call(op, written, op.args, op.kwargs, failed)
        memory.read_s = memory.clock_s = memory.clock_s + memory.now() - start
        for storage in written:
            storage.version += 1
        if follower.log is not None:
            op.recordable = False
            follower.log_op(op, written, KnownOp(0))
        return outputs

    def find_writes(self, op: RecordedOp) -> Sequence[TrackedStorage]:
        """Return the storages that an op writes, and make it recomputable without updating running statistics."""
        operator, args = op.operator, op.args
        if operator.statistics is None:
            values = [args[i] if i < len(args) else op.kwargs.get(name) for i, name in operator.mutated]
            tensors = [make_alias(tensor) for tensor in iterate_tensors(values)]
        elif operator.training is None or args[operator.training]:
            first = operator.statistics
            tensors = list(iterate_tensors(args[first : first + 2]))
            if operator.replay is None:
                op.recordable = False
            else:
                op.args = (*args[:first], None, None, *args[first + 2 :])
                op.function = operator.replay
        else:
            return ()
        found = {storage_address(tensor): tensor for tensor in tensors if tensor.layout is torch.strided}
        return [self.memory.find(address) or self.memory.add(tensor) for address, tensor in found.items()]

    def _execute(
        self,
        op: RecordedOp,
        known: KnownOp,
        written: Sequence[TrackedStorage],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        failed: list[Exception],
    ) -> Any:
        """Execute an op and time it."""
        memory, costs = self.memory, self.costs
        if known.needs_block:
            costs.find_block(known.out_bytes + known.workspace_bytes, memory.evict_after)
        is_measured = costs.start(known)
        start = memory.now()
        try:
            outputs = self._call(op, written, args, kwargs, failed)
        except BaseException:
            if is_measured:
                costs.stop()
            raise
        seconds = memory.now() - start
        costs.check_memory(op.function)
        waited_s = known.seconds
        if is_measured:
            waited_s, op.taken_bytes = costs.stop()
        if not costs.times_each:
            seconds = waited_s
        memory.read_s = memory.clock_s = memory.clock_s + seconds
        if seconds < known.seconds:
            known.seconds = seconds
        op.seconds = known.seconds
        self.recomputation.step_ops += 1
        return outputs

    def describe(self, op: RecordedOp, args: Sequence[Any]) -> KnownOp:
        """Replace the tensors in the arguments of an op, `args`, by references; return the facts about its signature."""
        operator, kwargs = op.operator, op.kwargs
        if operator.rebinds:  # its arguments may be storages, which a signature would keep alive
            op.recordable = False
            return KnownOp(0)
        key: list[Any] = [id(operator), op.grad_enabled, op.settings]
        try:
            op.args = self._replace_by_references(op.args, op, key)
            if kwargs:
                key += kwargs
                op.kwargs = dict(zip(kwargs, self._replace_by_references(kwargs.values(), op, key), strict=True))
        except (NotImplementedError, RuntimeError):  # an argument of an unusual kind: sparse, or of another backend
            op.recordable = False
            return KnownOp(0)
        if operator.is_sized_by_data(args):
            return self.bound_sizes(operator, args, kwargs)
        if operator.resizes_out:
            key += [tensor.untyped_storage().nbytes() for tensor in iterate_tensors(kwargs)]
        signature = tuple(key)
        return self.sizes.known(signature) or self.learn_sizes(signature, operator.function, args, kwargs)

    def bound_sizes(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> KnownOp:
        """Return the facts about an op whose sizes depend on data: at most it makes their ``out_bytes``."""
        known = self.sizes.get_sized_by_data(operator.name, args)
        known.out_bytes = bound_data_dependent_bytes(operator.name, args, kwargs)
        return known

    def learn_sizes(
        self, signature: Hashable, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> KnownOp:
        """Return the facts about an op whose signature was not used in this generation."""
        known = self.sizes.learn(signature, function, args, kwargs)
        known.needs_block = not self.costs.times_each and may_take_free_memory(function)
        return known

    def _replace_by_references(self, values: Iterable[Any], op: RecordedOp, key: list[Any]) -> list[Any]:
        """Return `values` with holes in place of tensors, and append to `key` everything that sizes depend on.

        References to the tensors are appended to the inputs of `op`.
        """
        found: list[Any] = []
        memory = self.memory
        find, read_s = memory.find, memory.read_s
        for value in values:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                storage = find(storage_address(value)) or memory.add(value)
                storage.last_read = storage.version
                if storage.ledger_id is None:
                    storage.touched_s = read_s
                else:
                    memory.touch(storage, read_s)
                if storage.pinned:
                    op.kept += (value.untyped_storage(),)
                elif storage.checked != memory.overwrites and self.sources.pin_if_lost(storage):
                    op.recordable = False  # else its record would keep the input alive for longer than the program does
                reference = build_reference(storage, value)
                op.inputs.append(reference)
                found.append(HOLE)
                key += (reference.shape, reference.stride, reference.dtype, storage.device)
            elif kind is list or kind is tuple:
                if value and type(value[0]) is int:
                    found.append(value)
                    key.append(tuple(value))
                else:
                    key.append(len(value))
                    found.append(self._replace_by_references(value, op, key))
            elif issubclass(kind, _Tensor):
                found += self._replace_by_references((make_alias(value),), op, key)
            else:
                if kind is dict:  # it may hold tensors
                    raise NotImplementedError
                found.append(value)
                key.append(kind)
                if kind is not float or not op.operator.pointwise:
                    key.append(value)
        return found

    def _call(
        self,
        op: RecordedOp,
        written: Sequence[TrackedStorage],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        failed: list[Exception],
    ) -> Any:
        """Execute an op. If it ends with an error, what it may have written in part is kept: it cannot be recomputed."""
        in_part: Sequence[TrackedStorage] = () if op.operator.allocates_first else written
        try:
            while True:
                try:
                    if failed:
                        raise failed.pop()
                    return op.operator.call(*args, **kwargs)
                except Exception as error:
                    if not self._can_retry(op, in_part, error):
                        mark_as_raised_by_op(error)
                        raise
                for storage in in_part:
                    self.recomputation.restore(storage)
                if op.draws is not None:
                    generator, state = op.draws
                    state.restore(generator)
                self.costs.forget_failures()
        except BaseException:
            for storage in written:  # an error of another kind may come in the middle of any kernel
                storage.version += 1
                self.sources.pin(storage)
            raise

    def _can_retry(self, op: RecordedOp, in_part: Sequence[TrackedStorage], error: Exception) -> bool:
        """Evict if the allocator had no memory for an op; return True if the op can be executed again.

        If it may have written before the allocator failed, the storages must be recomputable, and the caller restores them.
        """
        if find_allocator_failure(error) is None:
            return False
        if not op.operator.allocates_first and not (
            in_part and all(storage.is_recomputable(storage.version) for storage in in_part)
        ):
            error.add_note(_NOT_AGAIN.format(op.function))
            return False
        return self.memory.evict_after(error)

    # Outputs and writes of an op.

    def record(self, op: RecordedOp, known: KnownOp, written: Sequence[TrackedStorage], outputs: Any) -> int:
        """Record an op, and return the bytes of its new storages and of those that have grown."""
        made = self._find_made(op, outputs)
        operator, made_bytes = op.operator, 0
        if written:
            if operator.rebinds or operator.resizes_out:
                made_bytes = sum([self.memory.update_size(storage) for storage in written])
            self._note_writes(op, known, written, makes_outputs=bool(made))
        for position, output in made:
            storage = self.memory.add(output, pinned=not op.recordable)
            made_bytes += storage.size_bytes
            op.outputs.append((position, weakref.ref(storage)))
            if op.recordable:
                storage.chain.append(op)
        if op.taken_bytes:
            self.record_measured(op, made_bytes, op.taken_bytes)
        known.out_bytes = made_bytes
        op.room_bytes = made_bytes + known.workspace_bytes
        if operator.reads_to_host:
            self.host_reads += 1
        if op.recordable and made:
            self._count(op)
        elif made:
            self.kept_ops += 1
        return made_bytes

    def record_measured(self, op: RecordedOp, made_bytes: int, taken_bytes: int) -> None:
        """Record the bytes that a measured op has taken in total, of which `made_bytes` are its outputs'."""
        known = op.known
        assert known is not None
        known.record_workspace(taken_bytes - made_bytes)
        self.costs.note(op, made_bytes, taken_bytes - made_bytes)

    def _find_made(self, op: RecordedOp, outputs: Any) -> Iterable[tuple[int, torch.Tensor]]:
        """Return the outputs of an op on new storages, one for each storage, with their positions."""
        find = self.memory.find
        if (type(outputs) is _Tensor or type(outputs) is _Parameter) and outputs.layout is torch.strided:
            return ((0, outputs),) if find(storage_address(outputs)) is None else ()
        made: dict[int, tuple[int, torch.Tensor]] = {}
        for position, output in enumerate(outputs if isinstance(outputs, list | tuple) else (outputs,)):
            if type(output) is _Tensor and output.layout is torch.strided:
                address = storage_address(output)
                if find(address) is None:
                    made.setdefault(address, (position, output))
            elif isinstance(output, torch.Tensor):
                op.recordable = False
                for part in list_strided_parts(output):
                    if type(part) is _Tensor and find(address := storage_address(part)) is None:
                        made.setdefault(address, (position, part))
        return made.values()

    def _note_writes(self, op: RecordedOp, known: KnownOp, written: Sequence[TrackedStorage], *, makes_outputs: bool) -> None:
        """Begin the next version of each storage that an op has written: add the op to its chain, or pin it."""
        storage, is_repeatable = written[0], op.recordable and op.operator.statistics is None and len(written) == 1
        if is_repeatable and not storage.pinned and len(storage.chain) < LONGEST_CHAIN:
            storage.chain.append(self._record_in_place_op(op, known, storage))
            storage.version += 1
            return
        for storage in written:
            storage.version += 1
            self.sources.pin(storage)
        if op.operator.statistics is None and makes_outputs:
            op.recordable = False

    def _record_in_place_op(self, op: RecordedOp, known: KnownOp, storage: TrackedStorage) -> RecordedOp:
        """Record an op that writes the next version of `storage` in place."""
        write = RecordedOp(op.operator, op.args, op.kwargs)
        write.grad_enabled, write.settings = op.grad_enabled, op.settings
        write.inputs = [read._replace(storage=None) if read.storage is storage else read for read in op.inputs]
        write.kept, write.draws = op.kept, op.draws
        write.seconds, write.module = op.seconds, op.module
        # The storage counts with its last size from the first op on.
        write.room_bytes = known.workspace_bytes + (0 if op.operator.resizes_out else known.out_bytes)
        write.in_place = True
        write.outputs.append((0, weakref.ref(storage)))
        self.sources.record_write(storage)
        self._count(write)
        return write

    def _count(self, op: RecordedOp) -> None:
        self._recorded += 1
        self.ops += 1
        log = self.follower.log
        op.number = self.ops if log is None else len(log.ops)
        self.memory.pending.append(weakref.ref(op))

    def _begin_step(self) -> None:
        """Drop all records if no tensor is saved, unless there are few of them, because that takes time."""
        if self._recorded > FEW_OPS and 4 * self._recorded > len(self.memory.resident):
            self.forget()
            self.recomputation.begin_step()

    def forget(self) -> None:
        """Drop the records of all resident storages: no saved tensor needs them."""
        self.memory.forget()
        self.sources.forget()
        self._recorded = 0

    def forget_unneeded(self) -> None:
        """Drop the records that no saved tensor needs."""
        if self.sources.saved:
            self.sources.forget_unneeded()
        else:
            self.forget()

    def close(self) -> None:
        """End the block: its records, and what they hold in memory, are dropped when no saved tensor needs them."""
        self.is_closed = True
        self.memory.settle()
        if not self.sources.saved:
            self.forget()

    # Tensors that autograd saves.

    def pack(self, tensor: torch.Tensor) -> object:
        """Return the handle that autograd saves in place of `tensor`; `tensor` itself if it is a subclass or not strided."""
        kind = type(tensor)
        if (kind is not _Tensor and kind is not _Parameter) or tensor.layout is not torch.strided:
            return tensor
        with self.lock:
            memory = self.memory
            if memory.freed:
                memory.settle()
            if not self.sources.saved:  # autograd saves the inputs of the first op of a step before the op runs
                self._begin_step()
                self.follower.begin()
            saved = SavedTensor(self, tensor, make_alias(tensor), tensor._version)
            storage = saved.storage
            if not storage.pinned and storage.checked != memory.overwrites:
                self.sources.pin_if_lost(storage)
            if storage.saved == 1:
                memory.allow(storage)
            return saved
