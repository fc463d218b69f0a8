"""The dispatch mode: makes room before each op, and records it after."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from graphs.errors import BudgetError
from planner.eager.device_costs import DeviceCosts
from planner.eager.following import StepFollower
from planner.eager.memory import Memory
from planner.eager.modules import CurrentModule
from planner.eager.operators import Operator
from planner.eager.recompute import Recomputation, resident_tensor
from planner.eager.sizes import KnownOp, OutputSizes, data_dependent_bytes, tensors_in
from planner.eager.storages import RecordedOp, Reference, TrackedStorage, make_alias, new_reference
from planner.passes.draws import LOCK
from planner.runtime.random_state import RandomState
from planner.torch_private.core import TorchDispatchMode, storage_address

# Read from the globals at each tensor of each op.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
# The number of recorded ops after which it is worth while to forget them, if no tensor is saved.
_FEW_OPS = 64
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

    Attributes:
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
        self._needed_at: tuple[int, set[tuple[int, int]]] = (-1, set())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what else PyTorch wraps around each op takes as long as all that is done here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        operator = self._operators.get(id(func))  # operators are never freed, and compute their hashes slowly
        if operator is None:
            operator = self._operators[id(func)] = Operator.of(func)
        if operator.passes:
            return operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        for kind in types:
            if kind is not torch.Tensor and kind is not torch.nn.Parameter:
                return NotImplemented  # a subclass, whose inner ops are seen
        with self.lock:
            if self.recomputation.running:
                return operator.call(*args, **(kwargs or {}))
            return self._run(_Call(operator, func, args, kwargs or {}))

    def _run(self, call: "_Call") -> Any:
        memory, follower, operator = self.memory, self.follower, call.operator
        if memory.freed:
            memory.settle()
        if not self.saved:
            self._begin_step()
            follower.end()
        elif follower.log is not None:
            follower.before_op()
        if operator.mutated or operator.statistics is not None:
            self._find_writes(call)
            if operator.returns_nothing_new and not operator.rebinds and all(storage.pinned for storage in call.written):
                return self._write_pinned(call)
        known = self._describe(call)
        out_bytes = known.out_bytes
        with_op_bytes = memory.live_bytes + out_bytes + known.workspace_bytes
        if with_op_bytes > memory.budget_bytes:
            self._make_room(known, call.function)
        elif with_op_bytes > memory.peak_bytes:
            memory.peak_bytes = with_op_bytes
        if call.written and self.saved:
            self._before_writes(call)
        if operator.random:
            with LOCK:
                generator = generator_of(call.args, call.kwargs)
                call.draws = (generator, RandomState.of(generator))
                outputs = self._execute(call, known)
        else:
            outputs = self._execute(call, known)
        if memory.freed:
            memory.settle()
        if call.seconds < known.seconds:
            known.seconds = call.seconds
        else:
            call.seconds = known.seconds
        made_bytes = self._record(call, known, outputs)
        if follower.log is not None:
            follower.after_op(call, self.module.name, known.number, known.workspace_bytes)
        if made_bytes != out_bytes:
            known.out_bytes = made_bytes
            memory.make_room(0, call.function)
        return outputs

    def _make_room(self, known: KnownOp, function: object) -> None:
        """Evict until an op has room; a guessed workspace only as far as possible."""
        try:
            self.memory.make_room(known.out_bytes + known.workspace_bytes, function)
        except BudgetError:
            if not known.guessed:
                raise
            self.memory.make_room(known.out_bytes, function)

    def _write_pinned(self, call: "_Call") -> Any:
        """Execute an op that writes only what is pinned, of which nothing is recorded: an update of parameters, for example."""
        memory, follower = self.memory, self.follower
        if self.saved:
            self._before_writes(call)
        start = memory.now()
        outputs = call.operator.call(*call.args, **call.kwargs)
        memory.clock_s += memory.now() - start
        memory.read_s = memory.clock_s
        for storage in call.written:
            storage.version += 1
        if follower.log is not None:
            call.recordable = False
            follower.after_op(call, self.module.name, 0)
        return outputs

    def _find_writes(self, call: "_Call") -> None:
        """Find the storages that an op writes, and what recomputes its outputs without that."""
        operator, args = call.operator, call.args
        if operator.statistics is None:
            tensors = [
                tensor
                for i, name in operator.mutated
                for tensor in tensors_in(args[i] if i < len(args) else call.kwargs.get(name))
            ]
        elif operator.training is None or args[operator.training]:
            first = operator.statistics
            tensors = list(tensors_in(args[first : first + 2]))
            if operator.replay is None:
                call.recordable = False
            else:
                call.recorded_args = (*args[:first], None, None, *args[first + 2 :])
                call.replay = operator.replay
        else:
            return
        found = {storage_address(tensor): tensor for tensor in tensors if tensor.layout is torch.strided}
        call.written = [self.memory.find(address) or self.memory.add(tensor) for address, tensor in found.items()]

    def _execute(self, call: "_Call", known: KnownOp) -> Any:
        """Execute an op and time it."""
        memory, costs = self.memory, self.device_costs
        if costs is not None and known.needs_block:
            costs.find_block(known.out_bytes + known.workspace_bytes, memory.evict_after)
        is_measured = costs is not None and costs.start(known.number)
        start = memory.now()
        try:
            outputs = call.operator.call(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001  it is raised again unless it is the allocator's
            outputs = self._retry(call, error)
        if costs is None:
            call.seconds = memory.now() - start
        else:
            costs.check_memory(call.function)
            if is_measured:
                call.seconds, call.taken_bytes = costs.stop()
            else:
                call.seconds = known.seconds
        memory.read_s = memory.clock_s = memory.clock_s + call.seconds
        self.recomputation.step_ops += 1
        return outputs

    def _describe(self, call: "_Call") -> KnownOp:
        """Turn the arguments of `call` into references, and return what is known of such ops."""
        key: list[Any] = [id(call.function)]
        operator, args = call.operator, call.args
        try:
            call.recorded_args = self._references(call.recorded_args or args, call, key)
            if call.kwargs:
                names = list(call.kwargs)
                key += names
                call.recorded_kwargs = dict(zip(names, self._references(call.kwargs.values(), call, key), strict=True))
        except (NotImplementedError, RuntimeError):  # a tensor without a storage: sparse, or of another backend
            call.recordable = False
            return KnownOp(0)
        if operator.sized_by_data and (operator.name != "aten::index" or _has_mask(args[1])):
            return KnownOp(data_dependent_bytes(operator.name, args))
        signature = tuple(key)
        known = self.sizes.known(signature)
        if known is None:
            known = self.sizes.learn(signature, call.function, args, call.kwargs)
        return known

    def _references(self, values: Iterable[Any], call: "_Call", key: list[Any]) -> list[Any]:
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
                    call.keep(storage.keep(value))
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
                    ),
                )
                call.inputs.append(reference)
                found.append(reference)
                key += (shape, dtype, storage.device)
            elif kind is list or kind is tuple:
                if value and type(value[0]) is int:
                    found.append(value)
                    key.append(tuple(value))
                else:
                    key.append(len(value))
                    found.append(self._references(value, call, key))
            else:
                found.append(value)
                key.append(kind)
                if kind is not float:  # the value of a float changes no size
                    key.append(value)
        return found

    def _retry(self, call: "_Call", error: Exception) -> Any:
        """Evict, and execute an op again that the allocator had no memory for, until it succeeds or nothing is left to evict."""
        # Batch norm allocates what it makes before it writes statistics; what else writes may have begun to.
        repeatable = not call.written or call.operator.statistics is not None
        while repeatable and self.memory.evict_after(error):
            if call.draws is not None:
                generator, state = call.draws
                state.restore(generator)
            if self.device_costs is not None:
                self.device_costs.forget_failures()
            try:
                return call.operator.call(*call.args, **call.kwargs)
            except Exception as again:  # noqa: BLE001  it is raised below unless it is the allocator's
                error = again
        raise error

    # What an op has made and written.

    def _record(self, call: "_Call", known: KnownOp, outputs: Any) -> int:
        """Record an op and return the bytes that it has made."""
        memory, operator = self.memory, call.operator
        made = self._made_by(call, outputs)
        if not operator.repeatable:
            call.recordable = False
        if call.written:
            self._note_writes(call, makes_outputs=bool(made))
        if operator.reads_to_host:
            self.host_reads += 1
        if not made:
            return 0
        op = call.record() if call.recordable else None
        made_bytes = 0
        for position, output in made:
            if made_bytes and memory.find(storage_address(output)) is not None:  # another view of the same output
                continue
            storage = memory.add(output, None, pinned=op is None)
            made_bytes += storage.size_bytes
            call.made.append(storage)
            if op is not None:
                storage.chain.append(op)
                op.outputs.append((position, weakref.ref(storage)))
        if call.taken_bytes:
            known.measured(call.taken_bytes - made_bytes)
        room_bytes = made_bytes + known.workspace_bytes
        if call.in_place is not None:
            call.in_place.room_bytes = room_bytes
        if op is None:
            self.kept_ops += 1
        else:
            op.room_bytes = room_bytes
            self._count(op)
        return made_bytes

    def _made_by(self, call: "_Call", outputs: Any) -> list[tuple[int, torch.Tensor]]:
        """Return the outputs of an op on storages that are not known yet, with their positions."""
        if type(outputs) is _Tensor and outputs.layout is torch.strided:
            return [(0, outputs)] if self.memory.find(storage_address(outputs)) is None else []
        made = []
        for position, output in enumerate(outputs if isinstance(outputs, list | tuple) else (outputs,)):
            if type(output) is _Tensor and output.layout is torch.strided:
                if self.memory.find(storage_address(output)) is None:
                    made.append((position, output))
            elif isinstance(output, torch.Tensor):
                call.recordable = False
        return made

    def _note_writes(self, call: "_Call", *, makes_outputs: bool) -> None:
        """Give what an op has written its next version: in the chain of its storage, or pinned."""
        written, operator = call.written, call.operator
        storage = written[0]
        if operator.statistics is None and len(written) == 1 and not operator.rebinds:
            if not storage.pinned and call.recordable and len(storage.chain) < _LONGEST_CHAIN:
                call.in_place = self._in_place_op(call, storage)
                storage.chain.append(call.in_place)
                storage.version += 1
                return
            if storage.pinned and not makes_outputs:
                storage.version += 1
                return
        for storage in written:
            storage.version += 1
            if not storage.pinned:
                self.kept_ops += 1
                storage.pinned = True
                self.memory.released(storage)
        if operator.statistics is None and makes_outputs:
            call.recordable = False
        if operator.rebinds:
            self.memory.resize(storage, call.args[0])

    def _in_place_op(self, call: "_Call", storage: TrackedStorage) -> RecordedOp:
        """Record an op as one that turns a version of `storage` into the next, in its memory."""
        op = call.record()
        op.inputs = []
        op.in_place = True
        op.args = self._in_own_memory(op.args, storage, op.inputs)
        op.kwargs = dict(zip(op.kwargs, self._in_own_memory(op.kwargs.values(), storage, op.inputs), strict=True))
        op.outputs.append((0, weakref.ref(storage)))
        self._count(op)
        return op

    def _count(self, op: RecordedOp) -> None:
        op.module = self.module.name
        self._recorded += 1
        self.ops += 1
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

    def _before_writes(self, call: "_Call") -> None:
        """Copy the contents of pinned storages that are about to change, if a saved tensor may need them."""
        for storage in call.written:
            if storage.pinned and storage.last_read == storage.version and (id(storage), storage.version) in self._needed():
                tensor = resident_tensor(storage)
                assert tensor is not None
                self.memory.make_room(storage.size_bytes, f"a copy of what {call.function} writes")
                copy = tensor.clone()
                self.memory.add(copy, visible=False)
                storage.snapshots = {**(storage.snapshots or {}), storage.version: copy}
                self.copies += 1

    def _needed(self) -> set[tuple[int, int]]:
        """Return the pinned storages, with the version, from which saved tensors may have to be recomputed."""
        packs, needed = self._needed_at
        if packs == self.packs:
            return needed
        needed = set()
        seen = set(self.saved_storages)
        stack = list(self.saved_storages.values())
        while stack:
            for op in stack.pop().chain:
                for reference in op.inputs:
                    storage = reference.storage
                    if storage is None:
                        continue
                    if storage.pinned:
                        needed.add((id(storage), reference.version))
                    if id(storage) not in seen:
                        seen.add(id(storage))
                        stack.append(storage)
        self._needed_at = self.packs, needed
        return needed

    def _begin_step(self) -> None:
        """Forget how all that is resident was made, since no tensor is saved; not for a few ops, as it takes time."""
        if self._recorded <= _FEW_OPS or 4 * self._recorded <= len(self.memory.resident):
            return
        self.memory.forget()
        self.recomputation.begin_step()
        self._recorded = 0
        self._needed_at = (-1, set())

    # Tensors that autograd saves.

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of `tensor`."""
        kind = type(tensor)
        if (kind is not _Tensor and kind is not _Parameter) or tensor.layout is not torch.strided:
            return tensor
        with self.lock:
            memory = self.memory
            if memory.freed:
                memory.settle()
            if not self.saved:  # autograd saves the inputs of the first op of a step before the op runs
                self._begin_step()
                self.follower.begin()
            storage = memory.find(storage_address(tensor)) or memory.add(tensor)
            number = self.packs
            self.packs = number + 1
            self.saved += 1
            storage.aliases[number] = make_alias(tensor)
            storage.saved += 1
            if storage.saved == 1:
                self.saved_storages[id(storage)] = storage
                memory.saved(storage)
            return SavedTensor(self, storage, number, tensor._version)


class SavedTensor:
    """What autograd holds in place of a saved tensor: its storage, which may be evicted.

    Attributes:
        version: autograd's version counter when it was saved.
    """

    __slots__ = ("_number", "_recorder", "_storage", "version")

    def __init__(self, recorder: Recorder, storage: TrackedStorage, number: int, version: int) -> None:
        self._recorder = recorder
        self._storage = storage
        self._number = number
        self.version = version

    def __del__(self) -> None:
        storage, recorder = self._storage, self._recorder
        recorder.saved -= 1
        storage.saved -= 1
        storage.aliases.pop(self._number, None)
        if storage.evicted_aliases is not None:
            storage.evicted_aliases.pop(self._number, None)
        if not storage.saved:
            recorder.saved_storages.pop(id(storage), None)
            recorder.memory.not_evicted(storage)
            # The ledger is not told: the garbage collector may call this while the ledger is at work. Its choice is looked at.
            storage.base = None
            if not storage.address:
                recorder.follower.released(storage)

    def unpack(self) -> torch.Tensor:
        """Return the tensor, recomputed if it was evicted.

        Raises:
            RuntimeError: it was written in place since it was saved.
        """
        storage, recorder = self._storage, self._recorder
        with recorder.lock:
            if recorder.follower.log is not None:
                recorder.follower.before_op()
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


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Call:
    """One op that is about to run.

    Attributes:
        function: the operator.
        replay: what is recorded: the operator, or what recomputes its outputs without further effects.
        args: its arguments, kwargs its keyword arguments.
        keep: adds to the aliases that keep inputs in memory.
        written: the storages that it writes.
        made: the storages that it has made.
        seconds: time that it has taken, or that such ops take.
        taken_bytes: all that it has allocated; 0 if that was not measured.
        recordable: all that it reads can be named.
        in_place: the op in the chain of what it writes.
    """

    __slots__ = (
        "args",
        "draws",
        "function",
        "in_place",
        "inputs",
        "keep",
        "kept",
        "kwargs",
        "made",
        "operator",
        "recordable",
        "recorded_args",
        "recorded_kwargs",
        "replay",
        "seconds",
        "taken_bytes",
        "written",
    )

    def __init__(self, operator: Operator, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.operator = operator
        self.function = self.replay = function
        self.args: Sequence[Any] = args
        self.kwargs = kwargs
        self.written: Sequence[TrackedStorage] = ()
        self.recordable = True
        self.in_place: RecordedOp | None = None
        self.inputs: list[Reference] = []
        self.kept: list[torch.Tensor] = []
        self.keep = self.kept.append
        self.made: list[TrackedStorage] = []
        self.draws: tuple[torch.Generator, RandomState] | None = None
        self.seconds = 0.0
        self.taken_bytes = 0
        self.recorded_args: Sequence[Any] = ()
        self.recorded_kwargs: dict[str, Any] = {}

    def record(self) -> RecordedOp:
        """Return the record of it."""
        return RecordedOp(self.replay, self.recorded_args, self.recorded_kwargs, self.inputs, self.kept, self.draws, self.seconds)
