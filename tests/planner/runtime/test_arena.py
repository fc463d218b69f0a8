"""Steps in an arena: the same bits, all memory from one slab, and memory in use is never given away."""

import copy
import ctypes
import gc
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphs.schedule import keep_everything
from planner.arena import LEAST_BYTES
from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.models import Workload
from planner.profiling.allocator import cpu_allocations
from planner.runtime import arena_allocator
from planner.runtime.arena import SharedSlab
from planner.runtime.arena_allocator import Addresses, Missed, Recording, Slab
from planner.runtime.executor import Executor
from planner.runtime.measure import Isolated, outcome
from tests.support.logs import lines_of
from tests.support.models.steps import STEPS, capture_of, make, random_schedule

SMALL_BYTES = 20_000  # of the requests that are too small for the slab
TANGENT_BYTES = 4  # the gradient of the loss, which autograd makes


def in_arena(name: str, seed: int | None = None, *, accumulate: bool = False) -> tuple[Executor, Workload]:
    """An executor that has run one step, which was recorded; by a random schedule if there is a seed."""
    workload = make(name)
    captured = capture(*workload, accumulate=True) if accumulate else capture_of(name)
    schedule = keep_everything(captured.graph) if seed is None else random_schedule(captured.graph, seed)
    executor = Executor(captured, schedule, workload.model, workload.loss_fn)
    executor.use_arena(SharedSlab())
    with preserve_training_state(executor._step, workload.batch):
        Isolated(executor, workload.model, workload.batch).run()
    return executor, workload


def slab_of(executor: Executor) -> Slab:
    assert executor.arena is not None
    assert executor.arena.slab is not None
    return executor.arena.slab


def is_in(slab: Slab, tensor: torch.Tensor) -> bool:
    return 0 <= tensor.untyped_storage().data_ptr() - slab.address < slab.size_bytes


def missed(executor: Executor) -> Missed:
    assert executor.arena is not None
    return executor.arena.missed


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that PyTorch's own allocator provides at once while `run` runs."""
    gc.collect()  # else tensors of other tests may be freed in between
    level = peak = 0
    for event in cpu_allocations(lambda _: run()):
        level += event.size_bytes or 0
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_bits_are_those_of_eager_pytorch(name: str, seed: int | None) -> None:
    executor, workload = in_arena(name, seed)
    eager = outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)
    for _ in range(2):
        assert not eager.differences(outcome(executor, workload.model, workload.batch, seed=3))
        assert missed(executor) == Missed()


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", ["gpt2_sdpa", "unet", "resnet18", "mutated"])
def test_the_slab_is_all_that_a_step_takes(name: str, seed: int | None) -> None:
    executor, workload = in_arena(name, seed)
    usual = Executor(capture_of(name), executor.schedule, workload.model, workload.loss_fn)
    taken = peak_bytes(Isolated(usual, workload.model, workload.batch).run)
    outside = peak_bytes(Isolated(executor, workload.model, workload.batch).run)
    assert executor.arena is not None
    assert executor.arena.outside_bytes is not None
    assert 0 <= outside - executor.arena.outside_bytes <= TANGENT_BYTES
    assert outside < SMALL_BYTES
    assert taken <= slab_of(executor).size_bytes + outside
    assert slab_of(executor).size_bytes <= taken


def test_gradients_are_in_the_slab_and_results_are_not() -> None:
    executor, workload = in_arena("gpt2_sdpa")
    loss = executor(*workload.batch)
    loss.backward()
    large = [g for g in gradients_of(workload.model).values() if g.untyped_storage().nbytes() >= LEAST_BYTES]
    assert large
    assert all(is_in(slab_of(executor), gradient) for gradient in large)
    assert not is_in(slab_of(executor), loss)


def test_what_the_caller_holds_keeps_its_values() -> None:
    executor, workload = in_arena("gpt2_sdpa")
    held = []
    with lines_of("planner.runtime.arena") as lines:
        for seed in range(3):
            torch.manual_seed(seed)
            loss = executor(*workload.batch)
            loss.backward()
            values = {"loss": loss.detach(), **gradients_of(workload.model)}
            held.append((values, copy.deepcopy(values)))
            workload.model.zero_grad(set_to_none=True)
    assert missed(executor).occupied_bytes > 0
    (line,) = lines
    assert "of a step are outside of its arena, where tensors of another step are: free gradients" in line
    assert all(torch.equal(values[name], copied[name]) for values, copied in held for name in values)


def test_two_forward_passes_before_a_backward_pass() -> None:
    executor, workload = in_arena("unet")
    plain = Executor(capture_of("unet"), executor.schedule, copy.deepcopy(workload.model), workload.loss_fn)
    other = [torch.randn_like(workload.batch[0]), workload.batch[1]]
    for step in (executor, plain):
        first, second = step(*workload.batch), step(*other)
        first.backward()
        second.backward()
    wanted = gradients_of(plain._step.model)
    assert all(torch.equal(wanted[name], gradient) for name, gradient in gradients_of(workload.model).items())
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    assert missed(executor) == Missed()


def test_a_second_backward_pass() -> None:
    executor, workload = in_arena("gpt2_sdpa", 0)
    torch.manual_seed(0)
    loss = executor(*workload.batch)
    loss.backward(retain_graph=True)
    first = copy.deepcopy(gradients_of(workload.model))
    workload.model.zero_grad()
    loss.backward()
    assert all(torch.equal(first[name], gradient) for name, gradient in gradients_of(workload.model).items())


def test_a_step_after_one_that_failed() -> None:
    executor, workload = in_arena("unet")
    eager = outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)
    calls = iter(range(100))

    def fail(op: int) -> None:
        if next(calls) == 20:
            raise RuntimeError(f"in op {op}")

    code, executor.code = executor.code, executor.ticking(fail)
    with pytest.raises(RuntimeError, match="in op"):
        executor(*workload.batch)
    executor.code = code
    gc.collect()
    assert not eager.differences(outcome(executor, workload.model, workload.batch, seed=3))
    assert missed(executor) == Missed()


def test_accumulated_gradients_are_outside() -> None:
    executor, workload = in_arena("gpt2_sdpa", accumulate=True)
    eager = copy.deepcopy(workload.model)
    for seed in range(2):
        torch.manual_seed(seed)
        executor(*workload.batch).backward()
        torch.manual_seed(seed)
        workload.loss_fn(eager(workload.batch[0]), workload.batch[1]).backward()
    assert missed(executor) == Missed()
    wanted = gradients_of(eager)
    for name, gradient in gradients_of(workload.model).items():
        assert torch.equal(wanted[name], gradient)
        assert not is_in(slab_of(executor), gradient)


def test_gradients_outlive_the_arena() -> None:
    executor, workload = in_arena("gpt2_sdpa")
    loss = executor(*workload.batch)
    loss.backward()
    copied = copy.deepcopy(gradients_of(workload.model))
    alive = weakref.ref(slab_of(executor))
    del executor, loss
    gc.collect()
    assert alive() is None
    assert all(torch.equal(copied[name], gradient) for name, gradient in gradients_of(workload.model).items())


def test_other_threads_have_the_usual_allocator() -> None:
    slab, places = Slab(4096), addresses(4096)
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.empty(4096, dtype=torch.uint8)))
    places.start(slab, range(1))
    try:
        thread.start()
        thread.join()
        made.append(torch.empty(4096, dtype=torch.uint8))
    finally:
        assert arena_allocator.stop() == Missed()
    assert [is_in(slab, tensor) for tensor in made] == [False, True]


def test_a_step_with_other_requests_is_recorded_again() -> None:
    executor, workload = in_arena("unet")
    executor(*workload.batch).backward()
    before = slab_of(executor)

    def ask_for_more(op: int) -> None:
        torch.empty(3 * LEAST_BYTES)

    executor.code = executor.ticking(ask_for_more)
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    assert missed(executor).unmatched_bytes > 0
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    assert slab_of(executor) is not before
    assert missed(executor).unmatched_bytes == 0


def addresses(size_bytes: int) -> Addresses:
    return Addresses(size_bytes, [size_bytes], [0])


def resident_bytes(slab: Slab) -> int:
    """The memory of the slab that the system has given so far."""
    page, there = mmap.PAGESIZE, ctypes.create_string_buffer(slab.size_bytes // mmap.PAGESIZE)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.size_bytes), there)
    return page * sum(byte & 1 for byte in there.raw)


def test_plans_share_the_slab_of_the_largest() -> None:
    sizes = small_bytes, large_bytes = 2 * mmap.PAGESIZE, 6 * mmap.PAGESIZE
    shared, (small, large) = SharedSlab(), map(addresses, sizes)
    shared.add(small)
    assert shared.holding(small, 0).size_bytes == small_bytes
    shared.add(large)
    slab = shared.holding(large, 0)
    assert slab.size_bytes == large_bytes
    ctypes.memset(slab.address, 1, large_bytes)
    assert shared.holding(small, large_bytes) is slab
    assert resident_bytes(slab) == large_bytes
    assert shared.holding(small, 3 * mmap.PAGESIZE) is slab
    assert resident_bytes(slab) == 3 * mmap.PAGESIZE
    assert shared.holding(small, 0) is slab
    assert resident_bytes(slab) == small_bytes
    del slab, large
    shared.drop()
    assert shared.holding(small, large_bytes).size_bytes == small_bytes


def test_pages_in_use_are_not_given_back() -> None:
    slab, places = Slab(4 * mmap.PAGESIZE), addresses(4 * mmap.PAGESIZE)
    places.start(slab, range(1))
    held = torch.ones(4 * mmap.PAGESIZE, dtype=torch.uint8)
    arena_allocator.stop()
    slab.trim(mmap.PAGESIZE)
    assert held.all()
    assert is_in(slab, held)
    del held
    slab.trim(mmap.PAGESIZE)
    assert resident_bytes(slab) == mmap.PAGESIZE


def test_a_step_goes_on_in_the_slab_that_it_began_in() -> None:
    executor, workload = in_arena("unet")
    eager = outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)

    def replaced_between(*batch: object) -> object:
        returned = executor(*batch)
        assert executor.arena is not None
        executor.arena._shared.drop()
        return returned

    assert not eager.differences(outcome(replaced_between, workload.model, workload.batch, seed=3))
    assert missed(executor) == Missed()


@pytest.fixture
def recording() -> Iterator[Recording]:
    found = Recording()
    found.start()
    yield found
    arena_allocator.stop()


def test_a_recording_says_when_memory_is_freed(recording: Recording) -> None:
    first = torch.empty(2000, dtype=torch.uint8)
    second = torch.empty(3000, dtype=torch.uint8)
    del first
    torch.empty(10, dtype=torch.uint8)  # freed at once
    third = torch.empty(4000, dtype=torch.uint8)
    assert [(r.size_bytes, r.end) for r in recording.requests()] == [(2000, 2), (3000, None), (10, 3), (4000, None)]
    assert [recording.requests()[i].address for i in (1, 3)] == [second.data_ptr(), third.data_ptr()]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(16, 64), st.integers(0, 40), st.booleans()), min_size=1, max_size=30))
def test_memory_in_use_is_never_given_away(requests: list[tuple[int, int, bool]]) -> None:
    sizes, offsets = [64 * size for size, _, _ in requests], [64 * offset for _, offset, _ in requests]
    slab, places = Slab(64 * 128), Addresses(64 * 128, sizes, offsets)
    held = []
    places.start(slab, range(len(sizes)))
    try:
        for number, (size, (_, _, keep)) in enumerate(zip(sizes, requests, strict=True)):
            made = torch.empty(size, dtype=torch.uint8).fill_(number)
            if keep:
                held.append((number, made))
    finally:
        arena_allocator.stop()
    assert all((tensor == number).all() for number, tensor in held)
