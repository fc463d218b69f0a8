"""The dispatch mode: makes room before each op, and records it after; far below the budget it leaves both to a log."""

import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from graphs.errors import BudgetError
from planner.eager.deferred_log import DeferredLog, UnreadOp
from planner.eager.device_costs import DeviceCosts
from planner.eager.following import StepFollower
from planner.eager.memory import Memory
from planner.eager.modules import CurrentModule
from planner.eager.operators import Operator
from planner.eager.recompute import Recomputation, resident_tensor, whole
from planner.eager.sizes import KnownOp, OutputSizes, data_dependent_bytes, strided_parts, tensors_in
from planner.eager.storages import RecordedOp, Reference, TrackedStorage, make_alias, new_reference
from planner.passes.draws import LOCK
from planner.runtime.allocator_failure import allocator_failure
from planner.runtime.random_state import RandomState
from planner.torch_private.core import TorchDispatchMode, storage_address

# Read from the globals at each tensor of each op.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
# The number of recorded ops after which it is worth while to forget them, if no tensor is saved.
_FEW_OPS = 64
# The least number of draws and modules of unread ops after which those that are not in the log any more are looked for.
_FEW_UNREAD = 1024
# Added to the allocator's error.
_NOT_AGAIN = (
    "planner.rematerialize does not try {} again: it may have begun to write to a tensor that cannot be recomputed, as a "
    "parameter or a buffer. Lower the budget, so that tensors are evicted before the allocator fails"
)
# A storage that is written in place more often is kept, as the cost to recompute it grows with each write.
_LONGEST_CHAIN = 1000


class Recorder(TorchDispatchMode):
    """While entered, sees each op of its thread and of the backward passes that begin there.

    Args:
        memory: the budgeted memory.
        sizes: of outputs, by signature.
        recomputation: executes recorded ops.
        follower: logs steps, and follows their plans.
        device_costs: measures ops on a CUDA device; None on the CPU.
        is_deferred: ops are logged without Python, while that is possible.

    Attributes:
        log: that log; None without.
        lock: held by whatever reads or changes the state of the runtime; a backward pass may run in several threads.
        saved: number of tensors that autograd has saved.
        saved_storages: those that hold saved tensors, by identity.
        packs: number of tensors saved so far.
        ops: number of ops that were recorded.
        kept_ops: number of ops whose outputs cannot be recomputed.
        host_reads: number of Python numbers that were read from tensors.
        module: the module that is running, while entered.
    """

    def __init__(
        self,
        memory: Memory,
        sizes: OutputSizes,
        recomputation: Recomputation,
        follower: StepFollower,
        device_costs: DeviceCosts | None = None,
        *,
        is_deferred: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.sizes = sizes
        self.recomputation = recomputation
        self.follower = follower
        self.device_costs = device_costs
        self.lock = threading.RLock()
        self.saved = 0
        self.saved_storages: dict[int, TrackedStorage] = {}
        self.packs = 0
        self.ops = self.kept_ops = self.host_reads = self.copies = 0
        self.module = CurrentModule()
        self._operators: dict[int, Operator] = {}
        self._recorded = 0
        self.log = DeferredLog(self._operator, memory.budget_bytes) if is_deferred else None
        self._unread: UnreadOp | None = None
        self._unread_saved: dict[int, weakref.ref[SavedTensor]] = {}
        self._unread_draws: dict[int, tuple[torch.Generator, RandomState]] = {}
        self._unread_modules: deque[tuple[int, str]] = deque()  # names of modules, and the ops from which on they ran
        self._most_unread = _FEW_UNREAD
        self._copied_bytes = 0  # in this step
        self._read_by: tuple[int, dict[Hashable, list[int]]] = (-1, {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what else PyTorch wraps around each op takes as long as all that is done here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        operator = self._operators.get(id(func)) or self._operator(func)
        if operator.passes:
            return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        for kind in types:
            if kind is not _Tensor and kind is not _Parameter:
                return NotImplemented  # a subclass, whose inner ops are seen
        with self.lock:
            if self.recomputation.running:
                return operator.call(*args, **(kwargs or {}))
            op = RecordedOp(operator, args, kwargs or {})
            if self._unread is not None:
                return self._read(op, self._unread)
            if self.log is None:
                return self._run(op)
            if self.log.shared.open:
                return self._run_deferred(op, self.log)
            outputs = self._run(op)
            self._may_open(self.log)
            return outputs

    def _operator(self, op: object) -> Operator:
        """Return the facts about an operator. Operators are never freed, and compute their hashes slowly."""
        operator = self._operators.get(id(op))
        if operator is None:
            operator = self._operators[id(op)] = Operator.of(op)
        return operator

    def _run(self, op: RecordedOp, failed: Exception | None = None) -> Any:
        """Execute an op within the budget, and record it.

        Args:
            op: the op.
            failed: the error by which a first try has ended.
        """
        memory, follower, operator, args, kwargs = self.memory, self.follower, op.operator, op.args, op.kwargs
        if memory.freed:
            memory.settle()
        if not self.saved:
            self._begin_step()
            follower.end()
        op.module = self.module.name
        written: Sequence[TrackedStorage] = ()
        if operator.writes:
            written = self._find_writes(op)
            if operator.returns_nothing_new and not operator.rebinds and all(storage.pinned for storage in written):
                return self._write_pinned(op, written, failed)
        known = self._describe(op, args)
        out_bytes = known.out_bytes
        with_op_bytes = memory.live_bytes + out_bytes + known.workspace_bytes
        if with_op_bytes > memory.budget_bytes:
            self._make_room(known, op.function)
        elif with_op_bytes > memory.peak_bytes:
            memory.peak_bytes = with_op_bytes
        if written:
            self._before_writes(op, written)
        if operator.random:
            with LOCK:
                generator = generator_of(args, kwargs)
                op.draws = generator, RandomState.of(generator)
                outputs = self._execute(op, known, written, args, kwargs, failed)
        else:
            outputs = self._execute(op, known, written, args, kwargs, failed)
        if memory.freed:
            memory.settle()
        made_bytes = self._record(op, known, written, outputs)
        if follower.log is not None:
            follower.after_op(op, written, known)
        if made_bytes != out_bytes:
            known.out_bytes = made_bytes
            memory.make_room(0, op.function)
        return outputs

    def _make_room(self, known: KnownOp, function: object) -> None:
        """Evict until an op has room; a guessed workspace only as far as possible."""
        try:
            self.memory.make_room(known.out_bytes + known.workspace_bytes, function)
        except BudgetError:
            if not known.guessed:
                raise
            self.memory.make_room(known.out_bytes, function)

    def _write_pinned(self, op: RecordedOp, written: Sequence[TrackedStorage], failed: Exception | None) -> Any:
        """Execute an op that writes only what is pinned, of which nothing is recorded: an update of parameters, for example."""
        memory, follower = self.memory, self.follower
        self._before_writes(op, written)
        start = memory.now()
        outputs = self._call(op, written, op.args, op.kwargs, failed)
        memory.read_s = memory.clock_s = memory.clock_s + memory.now() - start
        for storage in written:
            storage.version += 1
        if follower.log is not None:
            op.recordable = False
            follower.after_op(op, written, KnownOp(0))
        return outputs

    def _find_writes(self, op: RecordedOp) -> Sequence[TrackedStorage]:
        """Return the storages that an op writes, and find what recomputes its outputs without that."""
        operator, args = op.operator, op.args
        if operator.statistics is None:
            values = [args[i] if i < len(args) else op.kwargs.get(name) for i, name in operator.mutated]
            tensors = [make_alias(tensor) for tensor in tensors_in(values)]
        elif operator.training is None or args[operator.training]:
            first = operator.statistics
            tensors = list(tensors_in(args[first : first + 2]))
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
        failed: Exception | None,
    ) -> Any:
        """Execute an op and time it."""
        memory, costs = self.memory, self.device_costs
        if costs is not None and known.needs_block:
            costs.find_block(known.out_bytes + known.workspace_bytes, memory.evict_after)
        is_measured = costs is not None and costs.start(known)
        start = memory.now()
        outputs = self._call(op, written, args, kwargs, failed)
        seconds = memory.now() - start
        if costs is not None:
            costs.check_memory(op.function)
            seconds = known.seconds
            if is_measured:
                seconds, op.taken_bytes = costs.stop()
        memory.read_s = memory.clock_s = memory.clock_s + seconds
        if seconds < known.seconds:
            known.seconds = seconds
        op.seconds = known.seconds
        self.recomputation.step_ops += 1
        return outputs

    def _describe(self, op: RecordedOp, args: Sequence[Any]) -> KnownOp:
        """Turn the arguments of an op, which were `args`, into references, and return what is known of such ops."""
        operator, kwargs = op.operator, op.kwargs
        if operator.rebinds:  # its arguments may be memory, which a signature would hold
            op.recordable = False
            return KnownOp(0)
        key: list[Any] = [id(operator)]
        try:
            op.args = self._references(op.args, op, key)
            if kwargs:
                key += kwargs
                op.kwargs = dict(zip(kwargs, self._references(kwargs.values(), op, key), strict=True))
        except (NotImplementedError, RuntimeError):  # a tensor without a storage: sparse, or of another backend
            op.recordable = False
            return KnownOp(0)
        if _is_sized_by_data(operator, args):
            return KnownOp(data_dependent_bytes(operator.name, args))
        signature = tuple(key)
        return self.sizes.known(signature) or self.sizes.learn(signature, operator.function, args, kwargs)

    def _references(self, values: Iterable[Any], op: RecordedOp, key: list[Any]) -> list[Any]:
        """Return `values` with references in place of tensors, and add to `key` what sizes depend on."""
        found: list[Any] = []
        memory = self.memory
        find, read_s = memory.find, memory.read_s
        for value in values:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                storage = find(storage_address(value)) or memory.add(value)
                version = storage.last_read = storage.version
                if storage.ledger_id is None:
                    storage.touched_s = read_s
                else:
                    memory.touch(storage, read_s)
                if storage.pinned:
                    op.kept.append(value.untyped_storage())
                elif storage.checked != memory.overwrites and self._pin_if_lost(storage):
                    op.recordable = False  # else its record would hold the input for longer than the program
                shape, dtype = value.shape, value.dtype
                reference = new_reference(  # as reference_to does, at the cost of one call
                    Reference,
                    (
                        storage,
                        version,
                        shape,
                        value.stride(),
                        value.storage_offset(),
                        dtype,
                        dtype.is_complex and value.is_conj(),
                        value.is_neg(),
                    ),
                )
                op.inputs.append(reference)
                found.append(reference)
                key += (shape, dtype, storage.device)
            elif kind is list or kind is tuple:
                if value and type(value[0]) is int:
                    found.append(value)
                    key.append(tuple(value))
                else:
                    key.append(len(value))
                    found.append(self._references(value, op, key))
            elif issubclass(kind, _Tensor):
                found += self._references((make_alias(value),), op, key)
            else:
                found.append(value)
                key.append(kind)
                if kind is not float:  # the value of a float changes no size
                    key.append(value)
        return found

    def _call(
        self,
        op: RecordedOp,
        written: Sequence[TrackedStorage],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        failed: Exception | None,
    ) -> Any:
        """Execute an op until the allocator has memory for it or nothing is left to evict.

        An op that may have begun to write before the allocator failed gets back what it has written: by recomputation.
        """
        while True:
            try:
                if failed is not None:
                    raise failed
                return op.operator.call(*args, **kwargs)
            except Exception as error:
                failed = None
                restored = () if op.operator.allocates_first else written
                if not (op.operator.allocates_first or (restored and all(s.recomputable(s.version) for s in restored))):
                    if allocator_failure(error) is not None:
                        error.add_note(_NOT_AGAIN.format(op.function))
                    raise
                if not self.memory.evict_after(error):
                    raise
            for storage in restored:
                self.recomputation.restore(storage)
            if op.draws is not None:
                generator, state = op.draws
                state.restore(generator)
            if self.device_costs is not None:
                self.device_costs.forget_failures()

    # Ops that are recorded only if memory runs out.

    def _may_open(self, log: DeferredLog) -> bool:
        """Leave the ops from here on to the log, if none of a step was recorded and memory is far below the budget.

        How all that is resident was made is forgotten.
        """
        if self.saved or not self.follower.is_far:
            return False
        memory = self.memory
        memory.forget()
        self._recorded = 0
        storages = (storage.watch() for storage in memory.resident.values() if storage.watch is not None)
        log.open((held for held in storages if held is not None), memory.peak_bytes)
        self.module.on_change = self._note_module
        self._note_module(self.module.name)
        return True

    def _note_module(self, name: str) -> None:
        assert self.log is not None
        self._unread_modules.append((self.log.shared.position, name))
        self._limit_unread(self.log)

    def _limit_unread(self, log: DeferredLog) -> None:
        if len(self._unread_modules) + len(self._unread_draws) > self._most_unread:
            self._forget_unread(log)

    def _run_deferred(self, op: RecordedOp, log: DeferredLog) -> Any:
        """Execute an op that the log leaves to the recorder, or that does not fit: then read the log first."""
        operator, args, kwargs, shared = op.operator, op.args, op.kwargs, log.shared
        if not shared.must_close and shared.known_bytes < 0:
            if _is_sized_by_data(operator, args):
                shared.must_close = not log.fits(data_dependent_bytes(operator.name, args))
            else:
                shared.known_bytes = self.sizes.out_bytes(operator.function, args, kwargs)
                shared.must_close = not log.fits(shared.known_bytes + self.sizes.guessed_bytes(operator.function, args))
        if shared.must_close:
            self._read_log(log)
            return self._run(op)
        with LOCK if operator.random else nullcontext():
            if operator.random:
                generator = generator_of(args, kwargs)
                op.draws = generator, RandomState.of(generator)
            try:
                outputs = operator.call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  raised again if it is not for want of memory
                if op.draws is not None:
                    generator, state = op.draws
                    state.restore(generator)
                self._read_log(log)
                return self._run(op, error)
        if op.draws is not None:
            self._unread_draws[shared.position] = op.draws
            self._limit_unread(log)
        return outputs

    def _read_log(self, log: DeferredLog) -> None:
        """Record the ops in the log, and record from here on."""
        memory = self.memory
        held = log.close()
        self.observe()
        memory.settle()
        for tensor in held:
            if memory.find(storage_address(tensor)) is None:
                memory.add(tensor)
        del held

        def show(unread: UnreadOp) -> None:
            self._unread = unread

        try:
            log.read(show)
        finally:
            self._unread = None
            self.module.on_change = None
        for saved in [saved for reference in self._unread_saved.values() if (saved := reference()) is not None]:
            saved.enter()
        self._unread_saved.clear()
        self._forget_unread(log)
        memory.settle()

    def _read(self, op: RecordedOp, unread: UnreadOp) -> Any:
        """Record an op that has run before."""
        self._unread = None
        memory, operator, args = self.memory, op.operator, op.args
        memory.settle()
        op.module = self._skip_modules(unread.position)
        outputs = unread.outputs
        written = self._find_writes(op) if operator.writes else ()
        if written and operator.returns_nothing_new and all(storage.pinned for storage in written):
            for storage in written:
                storage.version += 1
        else:
            known = self._describe(op, args)
            op.draws = self._unread_draws.pop(unread.position, None)
            memory.read_s = memory.clock_s = memory.clock_s + unread.seconds
            known.seconds = op.seconds = min(known.seconds, unread.seconds)
            self.recomputation.step_ops += 1
            known.out_bytes = self._record(op, known, written, outputs)
        return operator.returned(outputs)

    def _forget_unread(self, log: DeferredLog) -> None:
        """Forget what the recorder knows of ops that are not in the log any more."""
        first = log.shared.position - log.length
        self._unread_draws = {position: draws for position, draws in self._unread_draws.items() if position >= first}
        self._skip_modules(first)
        self._most_unread = 2 * (len(self._unread_draws) + len(self._unread_modules)) + _FEW_UNREAD

    def _skip_modules(self, position: int) -> str:
        """Forget the modules before the one that was running at an op, and return its name."""
        changes = self._unread_modules
        while len(changes) > 1 and changes[1][0] <= position:
            changes.popleft()
        return changes[0][1]

    def observe(self) -> None:
        """Count what the log has seen."""
        if self.log is None:
            return
        shared, memory = self.log.shared, self.memory
        memory.peak_bytes = max(memory.peak_bytes, shared.peak_bytes)
        memory.eager_peak_bytes = max(memory.eager_peak_bytes, shared.peak_bytes)
        self.ops += shared.ops
        self.kept_ops += shared.kept_ops
        self.host_reads += shared.host_reads
        memory.clock_s += shared.seconds
        shared.ops = shared.kept_ops = shared.host_reads = 0
        shared.seconds = 0.0

    # What an op has made and written.

    def _record(self, op: RecordedOp, known: KnownOp, written: Sequence[TrackedStorage], outputs: Any) -> int:
        """Record an op and return the bytes that it has made."""
        made = self._made_by(op, outputs)
        if written:
            self._note_writes(op, known, written, makes_outputs=bool(made))
        operator, made_bytes = op.operator, 0
        for position, output in made:
            storage = self.memory.add(output, pinned=not op.recordable)
            made_bytes += storage.size_bytes
            op.outputs.append((position, weakref.ref(storage)))
            if op.recordable:
                storage.chain.append(op)
        if op.taken_bytes:
            known.measured(op.taken_bytes - made_bytes)
        elif known.guessed and self.device_costs is None:
            known.measured(0)  # it was of an output
        op.room_bytes = made_bytes + known.workspace_bytes
        if operator.reads_to_host:
            self.host_reads += 1
        if op.recordable and made:
            self._count(op)
        elif made:
            self.kept_ops += 1
        return made_bytes

    def _made_by(self, op: RecordedOp, outputs: Any) -> Iterable[tuple[int, torch.Tensor]]:
        """Return the outputs of an op on storages that are not known yet, one of each storage, with their positions."""
        find = self.memory.find
        if type(outputs) is _Tensor and outputs.layout is torch.strided:
            return ((0, outputs),) if find(storage_address(outputs)) is None else ()
        made: dict[int, tuple[int, torch.Tensor]] = {}
        for position, output in enumerate(outputs if isinstance(outputs, list | tuple) else (outputs,)):
            if type(output) is _Tensor and output.layout is torch.strided:
                address = storage_address(output)
                if find(address) is None:
                    made.setdefault(address, (position, output))
            elif isinstance(output, torch.Tensor):
                op.recordable = False
                for part in strided_parts(output):
                    if type(part) is _Tensor and find(address := storage_address(part)) is None:
                        made.setdefault(address, (position, part))
        return made.values()

    def _note_writes(self, op: RecordedOp, known: KnownOp, written: Sequence[TrackedStorage], *, makes_outputs: bool) -> None:
        """Give what an op has written its next version: in the chain of its storage, or pinned."""
        operator, storage = op.operator, written[0]
        if operator.statistics is None and len(written) == 1 and not operator.rebinds:
            if not storage.pinned and op.recordable and len(storage.chain) < _LONGEST_CHAIN:
                storage.chain.append(self._in_place_op(op, known, storage))
                storage.version += 1
                return
            if storage.pinned and not makes_outputs:
                storage.version += 1
                return
        for storage in written:
            storage.version += 1
            self._pin(storage)
        if operator.statistics is None and makes_outputs:
            op.recordable = False
        if operator.rebinds:
            self.memory.resize(storage)

    def _in_place_op(self, op: RecordedOp, known: KnownOp, storage: TrackedStorage) -> RecordedOp:
        """Record an op as one that turns a version of `storage` into the next, in its memory."""
        inputs: list[Reference] = []
        args = self._in_own_memory(op.args, storage, inputs)
        kwargs = dict(zip(op.kwargs, self._in_own_memory(op.kwargs.values(), storage, inputs), strict=True))
        write = RecordedOp(op.operator, args, kwargs)
        write.inputs, write.kept, write.draws = inputs, op.kept, op.draws
        write.seconds, write.module = op.seconds, op.module
        write.room_bytes = known.out_bytes + known.workspace_bytes
        write.in_place = True
        write.outputs.append((0, weakref.ref(storage)))
        if id(storage) in self.saved_storages or id(storage) in self._read_by[1]:
            self._read_by = (-1, {})
        self._count(write)
        return write

    def _count(self, op: RecordedOp) -> None:
        self._recorded += 1
        self.ops += 1
        log = self.follower.log
        op.number = self.ops if log is None else len(log.ops)
        self.memory.pending.append(weakref.ref(op))

    def _in_own_memory(self, values: Iterable[Any], storage: TrackedStorage, inputs: list[Reference]) -> list[Any]:
        """Return the arguments with references to `storage` replaced, and enter all references into `inputs`."""
        found = []
        for value in values:
            if isinstance(value, Reference):
                value = value._replace(storage=None) if value.storage is storage else value
                inputs.append(value)
            elif isinstance(value, list):
                value = self._in_own_memory(value, storage, inputs)
            found.append(value)
        return found

    def _before_writes(self, op: RecordedOp, written: Sequence[TrackedStorage]) -> None:
        """Copy the contents of pinned storages that are about to change, if a saved tensor may need them.

        Or pin the tensors that need them, if these are smaller. Others that are computed from them are pinned when they are read.
        """
        for storage in written:
            if not storage.pinned or storage.last_read != storage.version:
                continue
            if self.saved and (readers := self._saved_readers(storage)) and not self._pin_instead(readers, storage.size_bytes):
                self.memory.make_room(storage.size_bytes, f"a copy of what {op.function} writes")
                copy = whole(storage).clone()
                self.memory.add(copy, visible=False)
                storage.snapshots = {**(storage.snapshots or {}), storage.version: copy}
                self.copies += 1
                self._copied_bytes += storage.size_bytes
            else:
                self.memory.overwrites += 1

    def _saved_readers(self, storage: TrackedStorage) -> list[TrackedStorage]:
        """Return the storages of saved tensors that may have to be recomputed from the present contents of a pinned storage."""
        readers = self._readers()
        found: set[int] = set()
        stack = list(readers.get((id(storage), storage.version), ()))
        while stack:
            reader = stack.pop()
            if reader not in found:
                found.add(reader)
                stack += readers.get(reader, ())
        return [self.saved_storages[reader] for reader in found if reader in self.saved_storages]

    def _readers(self) -> dict[Hashable, list[int]]:
        """Return what saved tensors are computed from, with the identities of the storages that are computed from it.

        Unpinned storages are named by identity; pinned ones, whose contents have to be there, with the version.
        """
        packs, readers = self._read_by
        if packs == self.packs:
            return readers
        readers = {}
        seen = set(self.saved_storages)
        stack = [storage for storage in self.saved_storages.values() if not storage.pinned]
        while stack:
            reader = stack.pop()
            for op in reader.chain:
                for reference in op.inputs:
                    storage = reference.storage
                    if storage is None:
                        continue
                    if storage.pinned:
                        readers.setdefault((id(storage), reference.version), []).append(id(reader))
                    if not storage.pinned or storage.recomputable(reference.version):
                        readers.setdefault(id(storage), []).append(id(reader))
                        if id(storage) not in seen:
                            seen.add(id(storage))
                            stack.append(storage)
        self._read_by = self.packs, readers
        return readers

    def _pin_instead(self, readers: Sequence[TrackedStorage], size_bytes: int) -> bool:
        """Pin storages, and return True; False if they have more bytes than `size_bytes` and the copies of the step so far."""
        if sum(storage.size_bytes for storage in readers) > size_bytes + self._copied_bytes:
            return False
        for storage in sorted(readers, key=lambda storage: not storage.address):
            if not storage.address:
                with self.recomputation.own_ops():
                    self.recomputation.recompute(storage)
            self._pin(storage)
        return True

    def _pin_if_lost(self, storage: TrackedStorage) -> bool:
        """Pin a resident storage, and return True, if what it is computed from was overwritten since; or return False."""
        overwrites = self.memory.overwrites
        checked = [storage]
        storage.checked = overwrites
        for computed in checked:  # which grows
            for op in computed.chain:
                for reference in op.inputs:
                    source = reference.storage
                    if source is None or (source.pinned and source.has(reference.version)):
                        continue
                    if not source.recomputable(reference.version):
                        for passed in checked:
                            passed.checked = -1
                        self._pin(storage)
                        return True
                    if source.checked != overwrites:
                        source.checked = overwrites
                        checked.append(source)
        return False

    def _pin(self, storage: TrackedStorage) -> None:
        """Keep a resident storage, whose contents cannot be recomputed any more."""
        if not storage.pinned:
            self.kept_ops += 1
            storage.pinned = True
            self.memory.released(storage)
            self._read_by = (-1, {})

    def _begin_step(self) -> None:
        """Forget how all that is resident was made, since no tensor is saved; not for a few ops, as it takes time."""
        if self._recorded <= _FEW_OPS or 4 * self._recorded <= len(self.memory.resident):
            return
        self.memory.forget()
        self.recomputation.begin_step()
        self._recorded = self._copied_bytes = 0
        self._read_by = (-1, {})

    # Tensors that autograd saves.

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of `tensor`."""
        kind = type(tensor)
        if (kind is not _Tensor and kind is not _Parameter) or tensor.layout is not torch.strided:
            return tensor
        log = self.log
        if log is not None and log.shared.open:
            return self._pack_deferred(tensor, log)
        with self.lock:
            if log is not None and self._may_open(log):
                return self._pack_deferred(tensor, log)
            memory = self.memory
            if memory.freed:
                memory.settle()
            if not self.saved:  # autograd saves the inputs of the first op of a step before the op runs
                self._begin_step()
                self.follower.begin()
            storage = memory.find(storage_address(tensor)) or memory.add(tensor)
            if not storage.pinned and storage.checked != memory.overwrites:
                self._pin_if_lost(storage)
            number = self.packs
            self.packs = number + 1
            self.saved += 1
            storage.aliases[number] = make_alias(tensor)
            storage.saved += 1
            if storage.saved == 1:
                self.saved_storages[id(storage)] = storage
                memory.saved(storage)
            return SavedTensor(self, storage, number, tensor._version)

    def forget_saved(self, number: int) -> None:
        """Forget a tensor that was saved and is not any more, while ops are not recorded."""
        self._unread_saved.pop(number, None)
        if not self.saved and self.log is not None:
            self.log.shared.in_step = 0

    def _pack_deferred(self, tensor: torch.Tensor, log: DeferredLog) -> "SavedTensor":
        if not self.saved:
            self.observe()
            log.begin_step()
            self.recomputation.begin_step()
            log.shared.must_close = not self.follower.is_far
            self.follower.begin(is_seen=False)
        number = self.packs
        self.packs = number + 1
        self.saved += 1
        saved = SavedTensor(self, make_alias(tensor), number, tensor._version)
        self._unread_saved[number] = weakref.ref(saved)
        return saved


class SavedTensor:
    """What autograd holds in place of a saved tensor: its storage, which may be evicted; the tensor while ops are not recorded.

    Attributes:
        version: autograd's version counter when it was saved.
    """

    __slots__ = ("__weakref__", "_number", "_recorder", "_storage", "version")

    def __init__(self, recorder: Recorder, storage: TrackedStorage | torch.Tensor, number: int, version: int) -> None:
        self._recorder = recorder
        self._storage = storage
        self._number = number
        self.version = version

    def enter(self) -> None:
        """Give the tensor to its storage, as ops are recorded from here on."""
        alias, memory = self._storage, self._recorder.memory
        assert isinstance(alias, torch.Tensor)
        self._storage = storage = memory.find(storage_address(alias)) or memory.add(alias)
        storage.aliases[self._number] = alias
        storage.saved += 1
        self._recorder.saved_storages[id(storage)] = storage

    def __del__(self) -> None:
        storage, recorder = self._storage, self._recorder
        recorder.saved -= 1
        if not isinstance(storage, TrackedStorage):
            recorder.forget_saved(self._number)
            return
        storage.saved -= 1
        storage.aliases.pop(self._number, None)
        if storage.evicted_aliases is not None:
            storage.evicted_aliases.pop(self._number, None)
        if not storage.saved:
            recorder.saved_storages.pop(id(storage), None)
            recorder.memory.not_evicted(storage)
            # The ledger is not told: the garbage collector may call this while the ledger is at work. Its choice is looked at.
            storage.base = None
            if storage.watch is None or storage.watch() is None:
                recorder.follower.released(storage, only_saved=True)

    def unpack(self) -> torch.Tensor:
        """Return the tensor, recomputed if it was evicted.

        Raises:
            RuntimeError: it was written in place since it was saved.
        """
        storage, recorder = self._storage, self._recorder
        if not isinstance(storage, TrackedStorage):
            if storage._version != self.version:
                raise _overwritten(storage, self.version, storage._version)
            return storage
        with recorder.lock:
            if recorder.follower.log is not None:
                recorder.follower.unpacked(storage)
            recorder.memory.touch(storage, recorder.memory.read_s)
            alias = storage.aliases.get(self._number)
            if alias is None:
                alias = self._restored()
            elif alias._version != self.version:
                raise _overwritten(alias, self.version, alias._version)
            return make_alias(alias)  # autograd may keep what it is given: then the count of holders of the storage says so

    def _restored(self) -> torch.Tensor:
        """Return the alias, which was dropped when the storage was evicted."""
        storage, recomputation = self._storage, self._recorder.recomputation
        assert isinstance(storage, TrackedStorage)
        assert storage.evicted_aliases is not None
        version, reference = storage.evicted_aliases[self._number]
        if version != self.version:
            raise _overwritten(reference, self.version, version)
        with recomputation.own_ops():
            source = resident_tensor(storage)
            if source is None:
                source = recomputation.recompute(storage)
            alias = storage.aliases[self._number] = make_alias(reference.view_of(source))
        del storage.evicted_aliases[self._number]
        self.version = alias._version
        return alias


def _overwritten(saved: torch.Tensor | Reference, expected: int, version: int) -> RuntimeError:
    """Return the error of plain eager PyTorch for a saved tensor that was written in place."""
    kind = f"{saved.dtype}".removeprefix("torch.")
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(saved.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: torch.autograd.set_detect_anomaly(True) finds the operation that failed to compute its gradient"
    )


def unpack(saved: object) -> torch.Tensor:
    """Return the tensor that ``Recorder.pack`` was given."""
    if isinstance(saved, SavedTensor):
        return saved.unpack()
    assert isinstance(saved, torch.Tensor)
    return saved


def generator_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator that an op with these arguments draws from."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    if device is None:
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[module.current_device() if device.index is None else device.index]
    return generator


def _is_sized_by_data(operator: Operator, args: Sequence[Any]) -> bool:
    if not operator.sized_by_data or operator.name != "aten::index":
        return operator.sized_by_data
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
