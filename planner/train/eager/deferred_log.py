"""The Python side of ``planner/native/deferred_log.cpp``: a log of ops that are recorded only if memory runs out.

Known weaknesses: an op may be recorded twice, by its entry here, and by the recorder when the log is read; and near the budget
the log is read in every step, and ops then take the slow way.
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from planner.native.library import Library, find_library
from planner.train.eager.operators import Operator
from planner.train.eager.shared_context import SharedContext
from planner.train.eager.size_rules import bound_of
from planner.train.eager.sizes import may_take_free_memory
from planner.train.eager.storages import RecordedOp

_LOGGER = logging.getLogger(__name__)

_Describe = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))

# While it is entered, functions under ``torch.compile`` run eagerly, in all threads.
_UNCOMPILED = SharedContext(lambda: torch.compiler.set_stance("force_eager"))

# How an operator is executed: the values of ``Way`` in deferred_log.cpp.
_VIEW, _HERE, _BY_RECORDER, _CLOSED = range(4)


class LogState(ctypes.Structure):
    """State that Python and C++ read and set without calls; the fields are those of ``LogState`` in deferred_log.cpp."""

    open: int
    openings: int
    must_close: int
    in_step: int
    saved: int
    module: int
    position: int
    peak_bytes: int
    ops: int
    kept_ops: int
    host_reads: int
    seconds: float
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("open", "openings", "must_close", "in_step", "saved", "module")),
        *((name, ctypes.c_int64) for name in ("position", "peak_bytes", "ops", "kept_ops", "host_reads")),
        ("seconds", ctypes.c_double),
    )


class OpExchange(ctypes.Structure):
    """The data about one op that log and recorder exchange; the fields are those of ``OpExchange`` in deferred_log.cpp."""

    noted: int
    stays_open: int
    known_bytes: int
    room_bytes: int
    taken_bytes: int
    unserved: int
    failed: int
    is_new: int
    seconds: float
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("noted", "stays_open", "known_bytes", "room_bytes", "taken_bytes")),
        *((name, ctypes.c_int64) for name in ("unserved", "failed", "is_new")),
        ("seconds", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class UnreadOp:
    """The position, module, outputs and measurements of a logged op that the recorder has not read yet.

    Attributes:
        position: number of ops that were logged before it, in all steps.
        module: number of the module that was running.
        outputs: the returned tensors; None for values that are not tensors.
        taken_bytes: measured bytes of the outputs and of workspaces; 0 if they were not measured.
        seconds: measured time.
    """

    position: int
    module: int
    outputs: Sequence[torch.Tensor | None]
    taken_bytes: int
    seconds: float


class LoggedTensor(Protocol):
    """The handle that autograd holds in place of a tensor that it saved while the log was open.

    Attributes:
        held: the tensor or an alias; after the log was read, the object that unpacks it.
        version: autograd's version counter when it was saved.
    """

    held: Any
    version: int


class DeferredLog:
    """A log of the ops of the thread that enters it; while it is closed, it passes ops on to the recorder.

    Args:
        operator: returns the facts about an operator.
        budget_bytes: an op that does not fit into it closes the log.
        device: the device whose memory is counted.
        measurements: number of executions of each signature that the log leaves to the recorder, which measures them.

    Attributes:
        shared: the state that is read and set without a call.
    """

    def __init__(
        self, operator: Callable[[object], Operator], budget_bytes: int, device: torch.device, measurements: int = 0
    ) -> None:
        library = _find_functions()
        assert library is not None
        self._library = library
        self._operator = operator
        self._measures = measurements > 0
        self._threads = threading.local()
        self._describe = _Describe(self._fill_facts)  # kept alive as long as the log may call it
        cuda_device = device.index if device.type == "cuda" else -1
        self._handle = library.deferred_new(budget_bytes, cuda_device, measurements, self._describe)
        weakref.finalize(self, library.deferred_drop, self._handle)
        self.shared = LogState.from_address(library.deferred_shared(self._handle))
        self._learn = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.py_object)(("deferred_learn", library))

    @staticmethod
    def is_available() -> bool:
        """Return True if the log can be used now: the library that it is part of is loaded."""
        return _find_functions() is not None

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Receive the ops of this thread, in place of the mode that was entered last, which executes ops and reads the log.

        PyTorch reports that a mode is active. Functions under ``torch.compile`` run eagerly, as in a mode.
        """
        with _UNCOMPILED:
            self._library.deferred_enter(self._handle)
            try:
                yield
            finally:
                self.record_with(None)
                self._library.deferred_leave(self._handle)

    def record_with(self, parts: tuple[object, ...] | None) -> None:
        """Let the library record ops of known signatures while the log is closed, with the objects that op_records.cpp names."""
        ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.py_object)(("deferred_record_with", self._library))(
            self._handle, parts
        )

    def learn(self, pattern: RecordedOp) -> None:
        """Take the record of the op of this thread, without its tensors, as the pattern for ops like it."""
        self._learn(self._handle, pattern)

    @property
    def call(self) -> OpExchange:
        """The op of this thread."""
        found: OpExchange | None = getattr(self._threads, "call", None)
        if found is None:
            found = self._threads.call = OpExchange.from_address(self._library.deferred_call())
        return found

    def take_error(self) -> Exception:
        """Return the error of the op of this thread, once; raise it if it must not be handled, as an interrupt."""
        try:
            torch.ops.planner_log.raise_error()
        except Exception as error:  # noqa: BLE001  the caller raises it again if it is not for want of memory
            return error
        raise AssertionError

    def keep_open(self) -> None:
        """Do not close before the op that the recorder has executed in this thread is logged."""
        self._library.deferred_stay_open(self._handle)

    def open(self, storages: Iterable[torch.UntypedStorage], other_bytes: int, peak_bytes: int) -> None:
        """Start to log ops, with these storages and `other_bytes` in memory."""
        held = list(storages)
        addresses = (ctypes.c_void_p * len(held))(*[storage._cdata for storage in held])
        self._library.deferred_open(self._handle, len(held), addresses, other_bytes, peak_bytes)

    def begin_step(self) -> None:
        """Drop the ops of the last step, because autograd saves the first tensor of a new one."""
        self._library.deferred_begin_step(self._handle)

    @property
    def length(self) -> int:
        """The number of ops in it."""
        return int(self._library.deferred_length(self._handle))

    @property
    def first(self) -> int:
        """The position of its first op: the number of ops that were logged before it, in all steps."""
        return self.shared.position - self.length

    def fits(self, size_bytes: int) -> bool:
        """Return True if `size_bytes` more fit the budget, and count them in the peak."""
        return bool(self._library.deferred_fits(self._handle, size_bytes))

    def close(self) -> list[torch.Tensor]:
        """Stop logging, and return tensors on the resident storages that no op in the log has made."""
        held: list[torch.Tensor] = torch.ops.planner_log.close(self._handle)
        return held

    def read(self, show: Callable[[UnreadOp], None]) -> None:
        """Call `show` and then the recorder for each op of the log; then clear the log."""
        log, first = self._handle, self.first
        try:
            for i in range(self.length):
                show(UnreadOp(first + i, *torch.ops.planner_log.unread(log, i)))
                torch.ops.planner_log.show(log, i)
        finally:
            self._library.deferred_forget(log)

    def build_hooks(
        self,
        begin_step: Callable[[], None],
        pack: Callable[[torch.Tensor], object],
        unpack: Callable[[object], torch.Tensor],
    ) -> tuple[Callable[..., Any], ...]:
        """Return the hooks on saved tensors that leave these to the library, `Recorder.release` and `Memory.enter_ops`.

        Args:
            begin_step: called before the first tensor of a step is saved while the log is open.
            pack: packs the first tensor of a step while it is closed; returns None if it has opened it, which then packs it.
            unpack: unpacks tensors that were evicted, and raises the error for those that were modified in place.
        """
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, *[ctypes.py_object] * 3)(("deferred_hooks", self._library))
        found: tuple[Callable[..., Any], ...] = make(self._handle, begin_step, pack, unpack)
        return found

    def take_saved(self) -> "list[tuple[LoggedTensor, torch.Tensor]]":
        """Remove the saved tensors from the log, and return them, each with the tensor that it has held before an alias."""
        take = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64)(("deferred_take_saved", self._library))
        found: list[tuple[LoggedTensor, torch.Tensor]] = take(self._handle)
        return found

    def _fill_facts(self, name: bytes, overload: bytes, facts: Any) -> None:
        """Fill in ``Operator`` of deferred_log.cpp for an operator; do nothing if Python does not know the operator."""
        namespace, _, base = name.decode().partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), base, None), overload.decode() or "default", None)
        if op is None:
            return
        operator = self._operator(op)
        values = (
            _choose_way(operator),
            operator.repeatable,
            operator.returns_nothing_new,
            operator.reads_to_host,
            operator.sized_by_data,
            -1 if operator.statistics is None else operator.statistics,
            -1 if operator.training is None else operator.training,
            sum(1 << position for position, _ in operator.mutated),
            self._measures and may_take_free_memory(op),
            bound_of(op),
            operator.pointwise,
        )
        for i, value in enumerate(values):
            facts[i] = value


def _choose_way(operator: Operator) -> int:
    if operator.passes:
        return _VIEW
    if operator.rebinds or not operator.has_plain_returns or (operator.statistics is not None and operator.replay is None):
        return _CLOSED
    return _BY_RECORDER if operator.draws else _HERE


def note_failure(cuda_device: int) -> None:
    """Tell the logs that the allocator of a CUDA device had no memory for a request of this thread."""
    library = _find_functions()
    if library is not None:
        library.deferred_failed(cuda_device)


def _find_functions() -> ctypes.CDLL | None:
    """Return the functions of the log; None while the library is not loaded, or if PyTorch refuses to register the log."""
    library = find_library()
    return None if library is None else _install(library)


@cache
def _install(library: Library) -> ctypes.CDLL | None:
    number, pointer = ctypes.c_int64, ctypes.c_void_p  # a log is passed as a number
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "install": (ctypes.c_bool, []),
        "new": (number, [number, number, number, _Describe]),
        "drop": (None, [number]),
        "shared": (pointer, [number]),
        "enter": (None, [number]),
        "leave": (None, [number]),
        "call": (pointer, []),
        "failed": (None, [number]),
        "stay_open": (None, [number]),
        "open": (None, [number, number, pointer, number, number]),
        "begin_step": (None, [number]),
        "fits": (ctypes.c_bool, [number, number]),
        "length": (number, [number]),
        "forget": (None, [number]),
    }
    functions = library.declare("deferred", signatures)
    if not functions.deferred_install():
        _LOGGER.info("planner.rematerialize records all ops in Python, because PyTorch refuses to register its C++ op log")
        return None
    return functions
