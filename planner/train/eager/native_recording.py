"""The Python side of ``planner/native/eager_ops.cpp`` and ``op_records.cpp``, which execute and record most ops.

Known weakness: saved tensors, what watches storages and the counts of bytes are Python objects, and evicted tensors are
recomputed in Python.
"""

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from planner.capture.program.draws import LOCK
from planner.native.library import Library, find_library
from planner.torch_private.core import current_backward_pass, current_dispatch_mode, current_transform
from planner.train.eager.device_costs import MEASUREMENTS
from planner.train.eager.draws import get_random_state
from planner.train.eager.operators import Operator
from planner.train.eager.recording import FEW_OPS, LONGEST_CHAIN, Recorder
from planner.train.eager.saved_tensors import SavedTensor, unpack
from planner.train.eager.shared_context import SharedContext
from planner.train.eager.sizes import KnownOp, may_take_workspace
from planner.train.eager.step_log import LoggedOp
from planner.train.eager.storages import HOLE, LedgerWatch, RecordedOp, Reference, StorageMethods, StorageWatch, TrackedStorage

_LOGGER = logging.getLogger(__name__)

_Hooks = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]  # pack and unpack saved tensors
_Describe = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))

# While it is entered, functions under ``torch.compile`` run eagerly, in all threads.
_UNCOMPILED = SharedContext(lambda: torch.compiler.set_stance("force_eager"))

# Who executes an operator, and what its sizes depend on: the values of ``OperatorFacts`` in op_records.h.
_VIEW, _RECORDED, _BY_RECORDER = range(3)
_NEVER, _BY_MASKS, _BY_DATA = range(3)


class NativeRecording:
    """Receives the ops of the thread that enters it, and records them; what it cannot do, the recorder does.

    Args:
        recorder: the mode that this thread has entered last.
    """

    def __init__(self, recorder: Recorder) -> None:
        library = _find_functions()
        assert library is not None
        self._library = library
        self._recorder = recorder
        self._describe = _Describe(self._fill_facts)  # kept alive as long as the library may call it
        self._handle = library.eager_new(self._describe)
        weakref.finalize(self, library.eager_drop, self._handle)
        recorder.follower.end()
        recorder.forget()
        recorder.memory.replace_storages(_create_storage_type(library))
        parts = StorageWatch, Reference, LoggedOp, RecordedOp, KnownOp, SavedTensor, LONGEST_CHAIN, LOCK
        self.record_with((recorder, *parts, get_random_state, LedgerWatch, FEW_OPS, MEASUREMENTS, HOLE))

    @staticmethod
    def is_available() -> bool:
        """Return True if the library is loaded."""
        return _find_functions() is not None

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Receive the ops of this thread, in place of the recorder.

        PyTorch reports that a mode is active. Functions under ``torch.compile`` run eagerly, as in a mode.
        """
        with _UNCOMPILED:
            self._recorder.take_error = _take_error
            self._library.eager_enter(self._handle)
            try:
                yield
            finally:
                self.record_with(None)
                self._library.eager_leave(self._handle)

    def record_with(self, parts: tuple[object, ...] | None) -> None:
        """Let the library record ops, with the objects that op_records.cpp names; or no more, if there are none."""
        ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.py_object)(("eager_record_with", self._library))(
            self._handle, parts
        )

    def build_hooks(self) -> _Hooks:
        """Return the hooks that pack and unpack saved tensors; `Recorder.release` and `Memory.enter_ops` are the library's."""
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, *[ctypes.py_object] * 2)(("eager_hooks", self._library))
        recorder = self._recorder
        pack, unpack_saved, recorder.release, recorder.memory.enter_ops = make(self._handle, recorder.pack, unpack)
        return pack, unpack_saved

    def _fill_facts(self, name: bytes, overload: bytes, facts: Any) -> None:
        """Fill in ``OperatorFacts`` of an operator; do nothing if Python does not know the operator."""
        namespace, _, base = name.decode().partition("::")
        op = getattr(getattr(getattr(torch.ops, namespace), base, None), overload.decode() or "default", None)
        if op is None:
            return
        operator = self._recorder.get_operator(op)
        values = (
            _choose_way(operator),
            id(operator),
            operator.is_plain_write,
            operator.reads_to_host,
            _NEVER if not operator.sized_by_data else _BY_MASKS if operator.name == "aten::index" else _BY_DATA,
            may_take_workspace(operator.function),
            -1 if operator.statistics is None else operator.statistics,
            -1 if operator.training is None else operator.training,
            sum(1 << position for position, _ in operator.mutated),
        )
        for i, value in enumerate(values):
            facts[i] = value


def _choose_way(operator: Operator) -> int:
    if operator.passes:
        return _VIEW
    is_recorded = operator.repeatable and operator.has_plain_returns and operator.random == operator.draws
    has_replay = operator.statistics is None or operator.replay is not None
    return _RECORDED if is_recorded and has_replay and not operator.rebinds and not operator.resizes_out else _BY_RECORDER


def _take_error() -> list[Exception]:
    """Return the error of the op of this thread, once; raise it if it must not be handled, as an interrupt."""
    try:
        torch.ops.planner_eager.raise_error()
    except Exception as error:  # noqa: BLE001  the recorder raises it again if it is not for want of memory
        return [error]
    return []


def _find_functions() -> ctypes.CDLL | None:
    """Return the functions of the library; None while it is not loaded, or if PyTorch refuses to register them."""
    library = find_library()
    return None if library is None else _install(library)


def _create_storage_type(library: ctypes.CDLL) -> type[TrackedStorage]:
    """Return the library's type of storages."""
    create = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(("eager_storage_type", library))
    created: type[TrackedStorage] = create(StorageMethods)
    return created


@cache
def _install(library: Library) -> ctypes.CDLL | None:
    number = ctypes.c_int64  # a receiver is passed as a number
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "install": (ctypes.c_bool, []),
        "new": (number, [_Describe]),
        "drop": (None, [number]),
        "enter": (None, [number]),
        "leave": (None, [number]),
    }
    functions = library.declare("eager", signatures)
    if not functions.eager_install():
        _LOGGER.info("planner.rematerialize records all ops in Python, because PyTorch refuses to register its C++ functions")
        return None
    return functions


class SwitchedHooks(ExitStack):
    """Hooks on saved tensors that leave ops to the library as soon as it is there: at once, or between two steps.

    Args:
        recorder: records ops until then; this thread has entered it.

    Attributes:
        native: the library's recording; None until then.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.native: NativeRecording | None = None
        self._recorder, self._thread = recorder, threading.get_ident()
        self._hooks: _Hooks = (recorder.pack, unpack)

    def build_hooks(self) -> _Hooks:
        """Return the hooks: those of the library, if it is there."""
        if NativeRecording.is_available():
            self._start()
        return (self._pack, self._unpack) if self.native is None else self._hooks

    def _start(self) -> None:
        self.native = NativeRecording(self._recorder)
        self.enter_context(self.native.enter())
        self._hooks = self.native.build_hooks()

    def _pack(self, tensor: torch.Tensor) -> object:
        if self.native is None and not self._recorder.sources.saved and self._may_start():
            with self._recorder.lock:
                self._start()
        return self._hooks[0](tensor)

    def _unpack(self, saved: object) -> torch.Tensor:
        return self._hooks[1](saved)

    def _may_start(self) -> bool:
        """Return True if the library is there and may take the recorder's place: nothing restores PyTorch's state for it."""
        return (
            NativeRecording.is_available()
            and threading.get_ident() == self._thread
            and current_dispatch_mode() is self._recorder
            and current_transform() is None
            and current_backward_pass() == -1
        )
