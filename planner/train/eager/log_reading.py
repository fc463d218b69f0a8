"""Opens the log of ops that are recorded only if memory runs out, and reads it for the recorder."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from planner.capture.program.draws import LOCK
from planner.runtime.random_state import RandomState
from planner.torch_private.core import (
    current_backward_pass,
    current_dispatch_mode,
    current_transform,
    get_kernel_settings,
    storage_address,
)
from planner.train.eager.deferred_log import DeferredLog, OpExchange, UnreadOp
from planner.train.eager.device_costs import MEASUREMENTS
from planner.train.eager.draws import get_random_state, lock_of_draws
from planner.train.eager.recording import LONGEST_CHAIN, Recorder
from planner.train.eager.saved_tensors import SavedTensor, unpack
from planner.train.eager.size_rules import iterate_tensors
from planner.train.eager.sizes import KnownOp, bound_data_dependent_bytes, may_take_free_memory
from planner.train.eager.step_log import LoggedOp
from planner.train.eager.storages import LedgerWatch, RecordedOp, Reference, StorageWatch, TrackedStorage

_Hooks = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]  # pack and unpack saved tensors
# With fewer random states than this, those of ops that are no longer in the log are not dropped.
_FEW_DRAWS = 1024


class LogReader:
    """Leaves ops to a log while memory is far below the budget, and lets the recorder record them if memory runs out.

    Args:
        recorder: executes the ops that the log does not execute.
        device: the device whose memory is counted.

    Attributes:
        log: the log; the caller enters it when it has entered the recorder.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        memory = recorder.memory
        measurements = 0 if recorder.costs.times_each else MEASUREMENTS
        self.log = DeferredLog(recorder.get_operator, memory.budget_bytes, device, measurements)
        self._recorder = recorder
        self._other_bytes = memory.live_bytes - sum(storage.size_bytes for storage in memory.resident.values())
        self._unread: UnreadOp | None = None  # the op of the log that is being recorded
        self._settings = get_kernel_settings()  # with which all ops in the log ran
        self._draws: dict[int, tuple[torch.Generator, RandomState]] = {}  # of ops in the log, by position
        self._most_draws = _FEW_DRAWS
        recorder.handle = self._handle
        recorder.module.noted = self.log.shared
        parts = TrackedStorage, StorageWatch, Reference, LoggedOp, RecordedOp, KnownOp, SavedTensor, LONGEST_CHAIN, LOCK
        self.log.record_with((recorder, *parts, get_random_state, LedgerWatch))

    def build_hooks(self) -> _Hooks:
        """Return the hooks that pack and unpack saved tensors."""
        recorder = self._recorder
        pack, unpack_saved, recorder.release, recorder.memory.enter_ops = self.log.build_hooks(
            self._begin_step, self._pack, unpack
        )
        return pack, unpack_saved

    def observe(self) -> None:
        """Add the counts of the log to those of the recorder."""
        recorder, memory, shared = self._recorder, self._recorder.memory, self.log.shared
        memory.peak_bytes = max(memory.peak_bytes, shared.peak_bytes)
        memory.eager_peak_bytes = max(memory.eager_peak_bytes, shared.peak_bytes)
        recorder.ops += shared.ops
        recorder.kept_ops += shared.kept_ops
        recorder.host_reads += shared.host_reads
        memory.clock_s += shared.seconds
        shared.ops = shared.kept_ops = shared.host_reads = 0
        shared.seconds = 0.0

    def _pack(self, tensor: torch.Tensor) -> object:
        """Return the object that autograd holds in place of `tensor`; None if this has opened the log."""
        with self._recorder.lock:
            return None if self._may_open() else self._recorder.pack(tensor)

    def _begin_step(self) -> None:
        """Begin a step, when autograd saves its first tensor while ops are logged."""
        recorder = self._recorder
        self.observe()
        self.log.begin_step()
        recorder.recomputation.begin_step()
        self.log.shared.must_close = not recorder.follower.is_far
        recorder.follower.begin(is_seen=False)

    def _handle(self, op: RecordedOp) -> Any:
        """Execute an op that the log has left to Python, or record an op that is read from the log."""
        if self._unread is not None:
            return self._record(op, self._unread)
        call = self.log.call
        if call.unserved:
            self._recorder.costs.check_memory(op.function)
        if call.failed:
            failed = [self.log.take_error()]
            if self.log.shared.open:
                self._read()
            return self._recorder.run(op, failed)
        if self.log.shared.open:
            return self._run(op, call)
        outputs = self._recorder.run(op)
        if call.is_new:
            self._learn(op)
        self._may_open()
        return outputs

    def _learn(self, op: RecordedOp) -> None:
        """Leave further ops of the signature of `op` to the library, if they need not be measured."""
        known = op.known
        is_known = known is not None and known.number and known.measurements == MEASUREMENTS and not known.needs_block
        is_supported = not op.operator.resizes_out and op.operator.random == op.operator.draws
        if op.recordable and is_known and is_supported:
            self.log.learn(op.build_pattern())

    def _may_open(self) -> bool:
        """Open the log, and return True, if no step is being recorded and memory is far below the budget; else return False.

        The records of all resident storages are dropped.
        """
        recorder, memory = self._recorder, self._recorder.memory
        if recorder.sources.saved or not recorder.follower.is_far:
            return False
        recorder.forget()
        self._settings = get_kernel_settings()
        resident = (held for storage in memory.resident.values() if (held := storage.get_storage()) is not None)
        self.log.open(resident, self._other_bytes, memory.peak_bytes)
        recorder.collections.stop()
        return True

    def _run(self, op: RecordedOp, call: OpExchange) -> Any:
        """Execute an op that the open log leaves to Python; if the log cannot log it, or it does not fit, read the log first."""
        recorder, log, costs = self._recorder, self.log, self._recorder.costs
        operator, args, kwargs = op.operator, op.args, op.kwargs
        is_new = call.known_bytes < 0
        if log.shared.must_close or call.noted != log.shared.openings or (is_new and not self._fits(op, call)):
            self._read()
            return recorder.run(op)
        with lock_of_draws(operator):
            if operator.draws:
                op.draws = get_random_state(args, kwargs)
            costs.forget_failures()
            is_measured = is_new and costs.begin()
            try:
                outputs = operator.call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  the recorder raises it again unless the allocator ran out of memory
                if is_measured:
                    costs.stop()
                if op.draws is not None:
                    generator, state = op.draws
                    state.restore(generator)
                self._read()
                return recorder.run(op, [error])
        costs.check_memory(op.function)
        if is_measured:
            call.seconds, call.taken_bytes = costs.stop()
            if operator.is_sized_by_data(args):
                made_bytes = sum(tensor.untyped_storage().nbytes() for tensor in iterate_tensors((outputs,)))
                recorder.sizes.get_sized_by_data(operator.name, args).record_workspace(call.taken_bytes - made_bytes)
        if op.draws is not None:
            self._draws[log.shared.position] = op.draws
            if len(self._draws) > self._most_draws:
                self._forget_draws()
        log.keep_open()
        return outputs

    def _fits(self, op: RecordedOp, call: OpExchange) -> bool:
        """Return True if an op of a new signature, or with sizes that depend on data, fits the budget."""
        log, sizes = self.log, self._recorder.sizes
        function, args, kwargs = op.operator.function, op.args, op.kwargs
        if op.operator.is_sized_by_data(args):
            room_bytes = sizes.get_sized_by_data(op.operator.name, args).workspace_bytes
            return log.fits(bound_data_dependent_bytes(op.operator.name, args, kwargs) + room_bytes)
        call.known_bytes = sizes.count_out_bytes(function, args, kwargs)
        room_bytes = call.room_bytes
        if room_bytes < 0:
            room_bytes = sizes.guess_bytes(function, args, kwargs, call.known_bytes)
        if not log.fits(call.known_bytes + room_bytes):
            return False
        costs = self._recorder.costs
        return not may_take_free_memory(function) or costs.find_missing_block(call.known_bytes + room_bytes) is None

    def _read(self) -> None:
        """Record the ops in the log, and close it: the recorder sees further ops itself."""
        recorder, memory, log = self._recorder, self._recorder.memory, self.log
        recorder.collections.start()
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
        for saved, tensor in log.take_saved():
            saved.held = SavedTensor(recorder, tensor, saved.held, saved.version)
        self._forget_draws()
        memory.settle()
        recorder.follower.note_read()

    def _record(self, op: RecordedOp, unread: UnreadOp) -> Any:
        """Record an op of the log, which has run already."""
        self._unread = None
        recorder, memory, operator, args = self._recorder, self._recorder.memory, op.operator, op.args
        memory.settle()
        op.module = recorder.module.names[unread.module]
        op.settings = self._settings
        outputs = unread.outputs
        written = recorder.find_writes(op) if operator.writes else ()
        if op.is_writing_only_pinned(written):
            for storage in written:
                storage.version += 1
        else:
            known = recorder.describe(op, args, has_run=True)
            op.draws = self._draws.pop(unread.position, None)
            op.taken_bytes = unread.taken_bytes
            memory.read_s = memory.clock_s = memory.clock_s + unread.seconds
            known.seconds = op.seconds = min(known.seconds, unread.seconds)
            recorder.recomputation.step_ops += 1
            recorder.record(op, known, written, outputs)
        return operator.build_result(outputs)

    def _forget_draws(self) -> None:
        """Drop the random states of ops that are no longer in the log."""
        first = self.log.first
        self._draws = {position: draws for position, draws in self._draws.items() if position >= first}
        self._most_draws = 2 * len(self._draws) + _FEW_DRAWS


class SwitchedHooks(ExitStack):
    """Hooks on saved tensors that leave ops to a log as soon as its library is there: at once, or between two steps.

    Args:
        recorder: records ops until then; this thread has entered it.
        device: the device whose memory is counted.

    Attributes:
        reader: the reader of the log; None until then.
    """

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        super().__init__()
        self.reader: LogReader | None = None
        self._recorder, self._device, self._thread = recorder, device, threading.get_ident()
        self._hooks: _Hooks = (recorder.pack, unpack)

    def build_hooks(self) -> _Hooks:
        """Return the hooks: those of the log, if it is there."""
        if DeferredLog.is_available():
            self._start_log()
        return (self._pack, self._unpack) if self.reader is None else self._hooks

    def _start_log(self) -> None:
        self.reader = LogReader(self._recorder, self._device)
        self.enter_context(self.reader.log.enter())
        self._hooks = self.reader.build_hooks()

    def _pack(self, tensor: torch.Tensor) -> object:
        if self.reader is None and not self._recorder.sources.saved and self._may_start():
            with self._recorder.lock:
                self._recorder.forget()  # else what it keeps in memory would count as that of others from here on
                self._start_log()
        return self._hooks[0](tensor)

    def _unpack(self, saved: object) -> torch.Tensor:
        return self._hooks[1](saved)

    def _may_start(self) -> bool:
        """Return True if the log is there and may take the recorder's place: nothing restores PyTorch's state for it."""
        return (
            DeferredLog.is_available()
            and threading.get_ident() == self._thread
            and current_dispatch_mode() is self._recorder
            and current_transform() is None
            and current_backward_pass() == -1
        )
