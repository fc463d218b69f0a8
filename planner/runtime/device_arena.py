"""Steps in an arena on a CUDA device: both passes take their memory from a pool of PyTorch's allocator, at planned addresses.

The pool has one large segment, the slab, which is kept from step to step, and which all plans of a model share. Before ops the
memory is held that they must not get (``planner.graphs.allocators.steering``), so that best fit gives them what is planned.

A step that finds tensors of another one in the slab, such as a second forward pass before the backward pass, takes its memory
from the usual pool. In a step whose ops ask for other memory than was planned, nothing is held any more, and the pool is given
back after it: whatever is held at other addresses than planned would need further segments.

The optimizer's temporaries lie in the slab too, beside the gradients, where there is room. State that it makes would stay there:
before the first step of an optimizer, and the first with gradients of further parameters, the gradients are copied out and the
pool is given back, so that this step may take as much elsewhere. One that makes new state in each step is not served.

Everything here relies on best fit, which PyTorch does not promise. A step in which it chooses otherwise is not wrong, only
larger: memory in use is never given away.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from planner.capture.program.program import Call
from planner.graphs.allocators.caching import DEFAULT
from planner.graphs.allocators.steering import Action, Hold, Steering, is_placed
from planner.graphs.units import format_bytes
from planner.memory.release import release_unused
from planner.runtime import optimizer_steps
from planner.runtime.arena import SharedSlab
from planner.runtime.code import Backward, Forward, Returned
from planner.torch_private.core import backward_retains_graph, list_parts
from planner.torch_private.cuda import allocate_raw, free_raw

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _KnownOptimizer:
    """What is known of an optimizer.

    Attributes:
        gradients: the most of its parameters that had a gradient in a step outside of the slab, which have their state.
        is_checked: a step in the slab was looked at.
        is_refused: that step has left state there, so that the optimizer is not served any more.
    """

    gradients: int = -1
    is_checked: bool = False
    is_refused: bool = False


class SharedPool:
    """The pool of all plans of a model, of which one runs at a time. Its slab is that of the largest of them.

    Attributes:
        pool: the pool; None where there is none at present.
        slab_bytes, slab_address: size and first address of its slab.
        stream: the stream that its memory is for.
        left: the results of the last step in it.
        ended: the last step, if the optimizer may be served behind it, until the next one begins.
        optimizers: what is known of those that have stepped.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: torch.cuda.MemPool | None = None
        self.slab_bytes = self.slab_address = 0
        self.stream: torch.cuda.Stream | None = None
        self.left: list[StorageWeakRef] = []
        self.ended: _Begun | None = None
        self.optimizers: WeakKeyDictionary[Optimizer, _KnownOptimizer] = WeakKeyDictionary()
        self._begun: ref[_Begun] | None = None  # the last step
        self._arenas: WeakSet[DeviceArena] = WeakSet()

    def add(self, arena: "DeviceArena") -> None:
        """Take the size of an arena into account."""
        self._arenas.add(arena)

    def drop(self) -> None:
        """Give the memory back; segments that tensors are in, once these are freed."""
        self.pool = self.ended = None

    def has_state_of(self, optimizer: Optimizer) -> bool:
        """Return True if state of `optimizer` is in the slab."""
        values = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))
        parts = (part for value in values for part in list_parts(value))
        return any(0 <= part.data_ptr() - self.slab_address < self.slab_bytes for part in parts)

    def begin(self, slab_bytes: int) -> "_Begun | None":
        """Return the beginning of a step that needs a slab of `slab_bytes`; None if tensors of another one are in it."""
        self.ended = None  # which holds its pool
        self.left = [storage for storage in self.left if not storage.expired()]
        last = None if self._begun is None else self._begun()
        if self.left or (last is not None and not last.is_over):
            return None
        begun = _Begun(self, self._provide_pool(slab_bytes), slab_bytes)
        self._begun = ref(begun)
        return begun

    def _provide_pool(self, slab_bytes: int) -> torch.cuda.MemPool:
        """Return the pool for the current stream, with a slab of at least `slab_bytes`; another one is given back first."""
        stream = torch.cuda.current_stream(self.device)
        if self.pool is None or self.slab_bytes < slab_bytes or self.stream != stream:
            self.drop()
            release_unused(self.device)
            # On a full device, evaluation and other work between steps may use the slab, which would otherwise be idle.
            pool = torch.cuda.MemPool(use_on_oom=True)
            self.slab_bytes = max(arena.steering.slab_bytes for arena in self._arenas)
            with _allocate_in(pool, self.device):
                self.slab_address = allocate_raw(self.slab_bytes, stream)
                free_raw(self.slab_address)
            self.pool, self.stream = pool, stream
        return self.pool


class DeviceArena:
    """The arena of one executor on a CUDA device.

    Attributes:
        steering: the planned actions.
        missed: number of steps that found no room in the slab.
        lost: number of steps that requested other memory than planned.
    """

    def __init__(self, shared: SharedPool, steering: Steering, *, accumulate: bool = False) -> None:
        """Prepare the arena. Gradients that `accumulate` in those of earlier steps are copied out of it."""
        self.steering = steering
        self.missed = self.lost = 0
        self.shared = shared
        self._accumulate = accumulate
        self._running: _Begun | None = None
        self._outside_bytes: int | None = None
        self._was_lost = False  # the step that has these bytes
        self._parameters: list[ref[torch.Tensor]] = []
        self._optimizing, self._is_serving = ExitStack(), False
        optimizer_steps.install()
        shared.add(self)

    @property
    def size_bytes(self) -> int:
        """The bytes of the slab that the step needs."""
        return self.steering.slab_bytes

    @property
    def outside_bytes(self) -> int:
        """The bytes of the other segments of the pool: predicted until a step was run, then those of a step."""
        return self.steering.outside_bytes if self._outside_bytes is None else self._outside_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes that a step takes, with the slab that it needs."""
        return self.size_bytes + self.outside_bytes

    def call_before(self, step: int) -> Call | None:
        """Return the call before a step of the schedule that makes holes for its op; None if there is nothing to be done."""
        return Call(self.make_holes, (step,)) if step in self.steering.before else None

    def make_holes(self, step: int) -> None:
        """Hold the memory that the op of a step must not get; nothing if the training step is not in the arena."""
        if self._running is not None:
            self._running.apply_actions(self.steering.before[step])

    def build_stage(self) -> Self:
        """Return the stage that runs both passes, which have the calls of ``call_before``, in the arena."""
        return self

    def has_optimizer(self, optimizer: Optimizer) -> bool:
        """Return True if a parameter of `optimizer` is one of the step."""
        return optimizer_steps.has_any(optimizer, {id(parameter) for parameter in self._list_parameters()})

    def begin_optimizer(self, optimizer: Optimizer) -> None:
        """Serve the step of `optimizer` behind the last step from here on, or give the pool back if it may make state."""
        shared = self.shared
        known = shared.optimizers.setdefault(optimizer, _KnownOptimizer())
        if shared.ended is None or known.is_refused or shared.stream != torch.cuda.current_stream(shared.device):
            return
        gradients = sum(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
        if gradients <= known.gradients:
            self._optimizing.enter_context(shared.ended.enter())
            self._is_serving = True
            return
        known.gradients = gradients
        if not self._accumulate:  # else they are copies already
            _copy_gradients(self._list_parameters(), shared.device)
        shared.drop()
        release_unused(shared.device)

    def end_optimizer(self, optimizer: Optimizer, *, is_whole: bool) -> None:
        """Serve none any more; after a step that was interrupted, the next one is outside."""
        self._optimizing.close()
        is_served, self._is_serving = self._is_serving, False
        known = self.shared.optimizers[optimizer]
        if not is_whole:
            known.gradients = -1
        if not is_served or known.is_checked:
            return
        known.is_checked = True
        if self.shared.has_state_of(optimizer):
            known.is_refused = True
            self.shared.drop()
            _LOG.warning(
                "%s makes new state in each step, which lies in the arena now: from here on its temporaries are beside the arena",
                type(optimizer).__name__,
            )

    def _list_parameters(self) -> list[torch.Tensor]:
        return [parameter for kept in self._parameters if (parameter := kept()) is not None]

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass, in the slab if there is room."""
        optimizer_steps.interrupt()
        if not self._parameters:
            self._parameters = [ref(tensor) for tensor in static if isinstance(tensor, torch.nn.Parameter)]
        if self.steering.serves_optimizer:
            optimizer_steps.follow(self)  # not in the backward pass, which has a thread of its own
        begun = self.shared.begin(self.steering.slab_bytes)
        if begun is None:
            self._note_missed()
        elif self.steering.grows:
            self.shared.drop()
        loss, extras, alive = self._run(begun, lambda: run(static))
        if begun is not None:
            self.shared.left += _find_placed((loss, *extras))
        alive.append(begun)
        return loss, extras, alive

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass, where its forward pass was."""
        begun: _Begun | None = saved.pop()
        if begun is not None and (backward_retains_graph() or begun.is_retained):  # saved tensors are freed later than planned
            begun.end()
            begun.is_retained = True
            begun = None
        gradients: tuple[Any, ...] = self._run(begun, lambda: run(static, saved))
        if begun is not None:
            begun.end()
            begun.is_over = True
            self.shared.left += _find_placed(gradients)
            if self._outside_bytes is None or begun.is_lost or self._was_lost:
                self._outside_bytes, self._was_lost = begun.outside_bytes, begun.is_lost
            if begun.is_lost:
                self._note_lost()
            elif self.steering.serves_optimizer:
                self.shared.ended = begun
        return gradients

    def _run(self, begun: "_Begun | None", run: Callable[[], Any]) -> Any:
        """Run a pass, in the arena if the step has begun there."""
        self._running = begun
        try:
            with nullcontext() if begun is None else begun.enter():
                return run()
        except BaseException:
            if begun is not None:
                begun.end()
            raise
        finally:
            self._running = None

    def _note_missed(self) -> None:
        self.missed += 1
        if self.missed == 1:
            _LOG.warning(
                "a step runs outside of its arena, where tensors of another step are: free gradients and results before the step "
                "(optimizer.zero_grad(), with set_to_none=True), or plan with accumulate=True, and call backward() for each step "
                "before the next one"
            )

    def _note_lost(self) -> None:
        self.lost += 1
        if self.lost == 1:
            _LOG.warning(
                "an op has asked for other memory than when it was measured: the step has left the addresses of its arena, and "
                "has taken %s beside it",
                format_bytes(self.outside_bytes),
            )


def create_shared_slab(device: torch.device) -> SharedSlab | SharedPool:
    """Return the memory that the plans of a model share whose steps run in an arena on `device`."""
    return SharedPool(device) if device.type == "cuda" else SharedSlab()


@contextmanager
def _allocate_in(pool: torch.cuda.MemPool, device: torch.device) -> Iterator[None]:
    """Take memory of this thread from `pool` of `device`, which becomes the current one: ``allocate_raw`` knows no other."""
    with torch.cuda.device(device), torch.cuda.use_mem_pool(pool, device):
        yield


def _copy_gradients(parameters: Sequence[torch.Tensor], device: torch.device) -> None:
    """Copy the gradients of `parameters` into one segment of the usual pool, which has no room for tensors that stay."""
    dense = [p for p in parameters if p.grad is not None and _is_dense(p.grad)]
    sizes = [DEFAULT.round_bytes(p.grad.numel() * p.grad.element_size()) for p in dense if p.grad is not None]
    block, offset = torch.empty(DEFAULT.choose_segment_bytes(sum(sizes)), dtype=torch.uint8, device=device), 0
    for parameter, size_bytes in zip(dense, sizes, strict=True):
        gradient = parameter.grad
        assert gradient is not None
        used = block[offset : offset + gradient.numel() * gradient.element_size()].view(gradient.dtype)
        parameter.grad = used.as_strided(gradient.size(), gradient.stride(), used.storage_offset()).copy_(gradient)
        offset += size_bytes


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` has all memory between its first and its last element."""
    if tensor.layout is not torch.strided:
        return False
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) == tensor.numel()


def _find_placed(tensors: Sequence[Any]) -> list[StorageWeakRef]:
    """Return references to the storages of those of `tensors`, which a step returns, that are in the slab."""
    storages = (tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return [StorageWeakRef(storage) for storage in storages if is_placed(storage.nbytes())]


class _Begun:
    """A step that runs in the arena.

    It holds what a larger slab has beyond the one of its plan, so that best fit sees the same free blocks.

    Attributes:
        is_over: True once its backward pass has ended.
        is_lost: True once a hold has another address than planned; nothing is held from then on.
        is_retained: True once a backward pass has kept the graph for another one: both are outside of the slab.
    """

    def __init__(self, shared: SharedPool, pool: torch.cuda.MemPool, slab_bytes: int) -> None:
        self.is_over = self.is_lost = self.is_retained = False
        self.shared, self._pool, self._device = shared, pool, shared.device
        self._slab_bytes, self._slab_address = shared.slab_bytes, shared.slab_address
        self._stream = torch.cuda.current_stream(shared.device)
        self._holds: list[int] = []
        self._held: set[int] = set()
        with self.enter():
            if shared.slab_bytes > slab_bytes:
                first = allocate_raw(slab_bytes, self._stream)
                self._held.add(first)  # in case there is no memory for the next one
                self._held.add(allocate_raw(shared.slab_bytes - slab_bytes, self._stream))
                self._held.remove(first)
                free_raw(first)

    def enter(self) -> AbstractContextManager[None]:
        """Return the context in which allocations of this thread come from the pool."""
        return _allocate_in(self._pool, self._device)

    @property
    def outside_bytes(self) -> int:
        """Bytes of all segments of its pool but the slab."""
        segments = torch.cuda.memory_snapshot(self._pool.id)
        return sum(int(segment["total_size"]) for segment in segments) - self._slab_bytes

    def apply_actions(self, actions: Sequence[Action]) -> None:
        """Hold and release memory as planned."""
        for action in () if self.is_lost else actions:
            if isinstance(action, Hold):
                address = allocate_raw(action.size_bytes, self._stream)
                self._holds.append(address)
                self._held.add(address)
                # From here on best fit sees other free blocks than planned, and each further hold might take a segment of its
                # own.
                if action.offset is not None and address != self._slab_address + action.offset:
                    self.is_lost = True
                    self.end()
                    self.shared.drop()  # also if no backward pass follows
                    return
            else:
                address = self._holds[action.number]
                self._held.remove(address)
                free_raw(address)

    def end(self) -> None:
        """Release all that is held: the step is over, or goes on outside of the slab."""
        for address in self._held:
            free_raw(address)
        self._held.clear()

    def __del__(self) -> None:
        self.end()
