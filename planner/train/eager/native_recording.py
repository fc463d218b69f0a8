"""The Python side of ``planner/native/eager_ops.cpp`` and ``op_records.cpp``, which execute and record the ops of a block."""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from planner.capture.program.draws import LOCK, get_default_generator
from planner.graphs.errors import PlannerError
from planner.native.library import Library, is_being_compiled, wait_for_library
from planner.progress import Stage, Stages, list_views
from planner.torch_private.checkpoints import Hooks, pack_recomputed
from planner.train.eager.device_costs import MEASUREMENTS
from planner.train.eager.operators import Operator
from planner.train.eager.recording import FEW_OPS, LONGEST_CHAIN, Recorder
from planner.train.eager.shared_context import SharedContext
from planner.train.eager.sizes import may_take_workspace

_HOOKS: dict[int, Hooks] = {}  # of the blocks, by their receivers
_Describe = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64))

# While it is entered, functions under ``torch.compile`` run eagerly, in all threads.
_UNCOMPILED = SharedContext(lambda: torch.compiler.set_stance("force_eager"))
# What checkpoints recompute in blocks is evicted too.
_CHECKPOINTS = SharedContext(lambda: pack_recomputed(_find_hooks))

# What the sizes of an operator depend on: the values of ``OperatorFacts`` in op_records.h.
_NEVER, _BY_MASKS, _BY_DATA = range(3)

_COMPILED_S = 60.0  # about, on one core
_WITHOUT = "or use planner.compile or planner.checkpoint, which run without it"


class NativeRecording:
    """Receives the ops of the thread that enters it, and records them.

    Args:
        recorder: does what is Python's.
    """

    def __init__(self, recorder: Recorder) -> None:
        library = prepare_library()
        self._library = library
        self._handle = library.eager_new(_DESCRIBE)
        weakref.finalize(self, library.eager_drop, self._handle)
        parts = LONGEST_CHAIN, LOCK, get_default_generator, FEW_OPS, MEASUREMENTS, ctypes.addressof(recorder.module.number)
        record_with = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int64, ctypes.py_object)(("eager_record_with", library))
        self._hooks: Hooks = record_with(self._handle, (recorder, *parts))

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Receive the ops of this thread, and what autograd saves. Functions under ``torch.compile`` run eagerly."""
        with _UNCOMPILED, _CHECKPOINTS:
            _HOOKS[self._handle] = self._hooks
            self._library.eager_enter(self._handle)
            try:
                yield
            finally:
                self._library.eager_leave(self._handle)
                del _HOOKS[self._handle]


def _find_hooks() -> Hooks | None:
    """Return functions that pack and unpack tensors as autograd does in this thread: those of its block, if no other hooks do."""
    return _HOOKS.get(prepare_library().eager_find_packing())


def _fill_facts(name: bytes, overload: bytes, facts: Any) -> None:
    """Fill in ``OperatorFacts`` of an operator; do nothing if Python does not know the operator."""
    namespace, _, base = name.decode().partition("::")
    op = getattr(getattr(getattr(torch.ops, namespace), base, None), overload.decode() or "default", None)
    if op is None:
        return
    operator = Operator.of(op)
    values = (
        operator.passes,
        id(operator),
        operator.is_plain_write,
        operator.rebinds,
        operator.resizes_out,
        operator.reads_to_host,
        _NEVER if not operator.sized_by_data else _BY_MASKS if operator.name == "aten::index" else _BY_DATA,
        may_take_workspace(operator.function),
        -1 if operator.statistics is None else operator.statistics,
        -1 if operator.training is None else operator.training,
        operator.replay,
        sum(1 << position for position in operator.mutated),
        operator.draws,
        operator.random,
        operator.repeatable,
    )
    for i, value in enumerate(values):
        facts[i] = value


_DESCRIBE = _Describe(_fill_facts)  # kept alive as long as the library may call it


@cache
def _install(library: Library) -> ctypes.CDLL | None:
    """Return the functions of the library; None if PyTorch refuses to register them."""
    number = ctypes.c_int64  # a receiver is passed as a number
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "install": (ctypes.c_bool, []),
        "new": (number, [_Describe]),
        "drop": (None, [number]),
        "enter": (None, [number]),
        "leave": (None, [number]),
        "find_packing": (number, []),
    }
    functions = library.declare("eager", signatures)
    return functions if functions.eager_install() else None


def prepare_library() -> ctypes.CDLL:
    """Return the functions of the library, after compiling it if necessary, with the progress of planning.

    Raises:
        PlannerError: it cannot be compiled or loaded, or PyTorch refuses to register its functions.
    """
    try:
        if is_being_compiled():
            with Stages(*list_views(None), stages=(Stage.COMPILE,)) as stages, stages.run_stage(Stage.COMPILE):
                stages.expect({Stage.COMPILE: _COMPILED_S})
                wait_for_library()
            stages.finish()
        functions = _install(wait_for_library())
    except PlannerError as error:
        raise PlannerError(f"planner.rematerialize needs a C++ compiler: {error}, {_WITHOUT}") from error
    if functions is None:
        raise PlannerError(
            "PyTorch refuses to register the functions of planner.rematerialize, because another library has some for the same "
            f"dispatch key: load that one later, {_WITHOUT}"
        )
    return functions
