"""Steps in an arena: the same bits, all memory from one slab, and memory in use is never given away."""

import copy
import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from planner.capture.frontend.preserved_state import preserve_training_state
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import OutOfMemoryError
from planner.graphs.schedule import keep_everything
from planner.measure.steps import Isolated, measure_outcome
from planner.memory.arena_rules import ALIGNMENT, LEAST_BYTES
from planner.memory.release import release_large_blocks
from planner.runtime import arena_allocator, slab_addresses
from planner.runtime.arena import SharedSlab
from planner.runtime.arena_allocator import Addresses, Missed, Recording, Slab, keep_idle_pages
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.executor import Executor
from tests.support.logs import lines_of
from tests.support.marks import slow, slow_among
from tests.support.memory_limits.steps import limited, used_bytes
from tests.support.models.optimizers import Wrapping
from tests.support.models.outcomes import peak_bytes
from tests.support.models.steps import STEPS, capture_of, make, random_schedule

SMALL_BYTES = 20_000  # of the requests that are too small for the slab
TANGENT_BYTES = 4  # the gradient of the loss, which autograd makes
SCALAR_BYTES = 8  # of momentum, with which the first step multiplies nothing
HUGE_PAGE_BYTES = 2**21


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "nesterov foreach": lambda model: SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1, nesterov=True, foreach=True),
    "adamw": lambda model: AdamW(model.parameters()),
    "adamw foreach": lambda model: AdamW(model.parameters(), foreach=True),
    "adamw fused": lambda model: AdamW(model.parameters(), fused=True),
}


@pytest.fixture(scope="module", autouse=True)
def no_other_slabs() -> None:
    """Slabs of other files share the budget of those here; what is frozen of those files may hold them."""
    gc.unfreeze()
    gc.collect()


def in_arena(name: str, seed: int | None = None, *, accumulate: bool = False) -> tuple[Executor, Workload]:
    """An executor that has run one step, which was recorded; by a random schedule if there is a seed."""
    workload = mlp() if name == "mlp" else make(name)
    captured = capture_of(name) if name in STEPS and not accumulate else capture(*workload, accumulate=accumulate)
    schedule = keep_everything(captured.graph) if seed is None else random_schedule(captured.graph, seed)
    executor = Executor(captured, schedule, workload.model, workload.loss_fn)
    executor.use_arena(SharedSlab())
    with preserve_training_state(executor.training_step, workload.batch):
        Isolated(executor, workload.model, workload.batch).run()
    return executor, workload


def mlp() -> Workload:
    """A step whose parameters take more than its activations."""
    torch.manual_seed(7)
    return build("mlp", batch=8, layers=3, width=64, classes=10, dropout=0.1)


def is_in(slab: Slab, tensor: torch.Tensor) -> bool:
    return 0 <= tensor.untyped_storage().data_ptr() - slab.address < slab.size_bytes


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("seed", [0, *slow(None, 1)])
@pytest.mark.parametrize("name", slow_among(STEPS, "llama", "vit"))
def test_bits_are_those_of_eager_pytorch(name: str, seed: int | None) -> None:
    executor, workload = in_arena(name, seed)
    eager = measure_outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)
    for _ in range(2):
        assert not eager.list_differences(measure_outcome(executor, workload.model, workload.batch, seed=3))
        assert executor.arena.missed == Missed()


@pytest.mark.parametrize("seed", [0, *slow(None)])
@pytest.mark.parametrize("name", ["gpt2_sdpa", "unet", "resnet18", "mutated"])
def test_the_slab_is_all_that_a_step_takes(name: str, seed: int | None) -> None:
    executor, workload = in_arena(name, seed)
    usual = Executor(capture_of(name), executor.schedule, workload.model, workload.loss_fn)
    taken = peak_bytes(Isolated(usual, workload.model, workload.batch).run)
    outside = peak_bytes(Isolated(executor, workload.model, workload.batch).run)
    assert 0 <= outside - executor.arena.outside_bytes <= TANGENT_BYTES
    assert outside < SMALL_BYTES
    assert taken <= executor.arena.slab.size_bytes + outside
    assert executor.arena.slab.size_bytes <= taken


def test_gradients_are_in_the_slab_and_results_are_not() -> None:
    executor, workload = in_arena("gpt2_sdpa")
    loss = executor(*workload.batch)
    loss.backward()
    large = [g for g in gradients_of(workload.model).values() if g.untyped_storage().nbytes() >= LEAST_BYTES]
    assert large
    assert all(is_in(executor.arena.slab, gradient) for gradient in large)
    assert not is_in(executor.arena.slab, loss)


def test_tensors_held_by_the_caller_keep_their_values() -> None:
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
    assert executor.arena.missed.occupied_bytes > 0
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
    wanted = gradients_of(plain.training_step.model)
    assert all(torch.equal(wanted[name], gradient) for name, gradient in gradients_of(workload.model).items())
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    assert executor.arena.missed == Missed()


def test_second_backward_pass_in_an_arena_is_exact() -> None:
    executor, workload = in_arena("gpt2_sdpa", 0)
    torch.manual_seed(0)
    loss = executor(*workload.batch)
    loss.backward(retain_graph=True)
    first = copy.deepcopy(gradients_of(workload.model))
    workload.model.zero_grad()
    loss.backward()
    assert all(torch.equal(first[name], gradient) for name, gradient in gradients_of(workload.model).items())


class Unseeing:
    """An observer that runs the passes."""

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        return run(static)

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        return run(static, saved)


def test_a_step_after_one_that_failed() -> None:
    executor, workload = in_arena("unet")
    eager = measure_outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)
    calls = iter(range(100))

    def fail(op: int) -> None:
        if next(calls) == 20:
            raise RuntimeError(f"in op {op}")

    observer = Unseeing()
    executor.observe(observer, fail)
    with pytest.raises(RuntimeError, match="in op"):
        executor(*workload.batch)
    executor.stop_observing(observer)
    gc.collect()
    assert not eager.list_differences(measure_outcome(executor, workload.model, workload.batch, seed=3))
    assert executor.arena.missed == Missed()


def test_accumulated_gradients_are_outside_the_arena() -> None:
    executor, workload = in_arena("gpt2_sdpa", accumulate=True)
    eager = copy.deepcopy(workload.model)
    for seed in range(2):
        torch.manual_seed(seed)
        executor(*workload.batch).backward()
        torch.manual_seed(seed)
        workload.loss_fn(eager(workload.batch[0]), workload.batch[1]).backward()
    assert executor.arena.missed == Missed()
    wanted = gradients_of(eager)
    for name, gradient in gradients_of(workload.model).items():
        assert torch.equal(wanted[name], gradient)
        assert not is_in(executor.arena.slab, gradient)


def test_gradients_outlive_the_arena() -> None:
    executor, workload = in_arena("gpt2_sdpa")
    loss = executor(*workload.batch)
    loss.backward()
    copied = copy.deepcopy(gradients_of(workload.model))
    alive = weakref.ref(executor.arena.slab)
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
    before = executor.arena.slab

    def ask_for_more(op: int) -> None:
        torch.empty(3 * LEAST_BYTES)

    executor.observe(Unseeing(), ask_for_more)
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    assert executor.arena.missed.unmatched_bytes > 0
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    workload.model.zero_grad()
    executor(*workload.batch).backward()
    assert executor.arena.slab is not before
    assert executor.arena.missed.unmatched_bytes == 0


def addresses(size_bytes: int) -> Addresses:
    return Addresses(size_bytes, [size_bytes], [0])


def resident_bytes(slab: Slab) -> int:
    """The memory of the slab that the system has given so far."""
    page, there = mmap.PAGESIZE, ctypes.create_string_buffer(slab.size_bytes // mmap.PAGESIZE)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(slab.address), ctypes.c_size_t(slab.size_bytes), there)
    return page * sum(byte & 1 for byte in there.raw)


def touch(slab: Slab) -> None:
    """Write to all pages in a pass."""
    places = addresses(slab.size_bytes)
    places.start(slab, range(1))
    torch.ones(slab.size_bytes, dtype=torch.uint8)
    assert arena_allocator.stop() == Missed()


def test_plans_share_the_slab_of_the_largest() -> None:
    sizes = small_bytes, large_bytes = 2 * mmap.PAGESIZE, 6 * mmap.PAGESIZE
    shared, (small, large) = SharedSlab(), map(addresses, sizes)
    shared.add(small)
    assert shared.provide_slab(small, 0).size_bytes == small_bytes
    shared.add(large)
    slab = shared.provide_slab(large, 0)
    assert slab.size_bytes == large_bytes
    touch(slab)
    assert shared.provide_slab(small, large_bytes) is slab
    assert resident_bytes(slab) == large_bytes
    assert shared.provide_slab(small, 3 * mmap.PAGESIZE) is slab
    assert resident_bytes(slab) == 3 * mmap.PAGESIZE
    assert shared.provide_slab(small, 0) is slab
    assert resident_bytes(slab) == small_bytes
    del slab, large
    shared.drop()
    assert shared.provide_slab(small, large_bytes).size_bytes == small_bytes


def test_a_slab_grows_with_its_pages_as_far_as_it_may() -> None:
    page, shared = mmap.PAGESIZE, SharedSlab()
    small, large, largest = map(addresses, (2 * page, 4 * page, 6 * page))
    shared.add(small)
    slab = shared.provide_slab(small, 4 * page)
    places = addresses(2 * page)
    places.start(slab, range(1))
    held = torch.ones(2 * page, dtype=torch.uint8)
    arena_allocator.stop()
    shared.add(large)
    assert shared.provide_slab(large, 4 * page) is slab and slab.size_bytes == 4 * page
    assert resident_bytes(slab) == 2 * page and held.all()
    del held
    touch(slab)
    shared.add(largest)
    assert shared.provide_slab(largest, 4 * page) is not slab


def test_requests_in_another_order_get_their_own_places() -> None:
    page = mmap.PAGESIZE
    slab, places = Slab(6 * page), Addresses(6 * page, [page, 2 * page, 3 * page], [0, page, 3 * page])
    places.start(slab, range(3))
    made = [torch.empty(size * page, dtype=torch.uint8) for size in (3, 1, 2)]
    assert arena_allocator.stop() == Missed()
    assert [tensor.data_ptr() - slab.address for tensor in made] == [3 * page, 0, page]


def test_pages_in_use_are_not_given_back() -> None:
    slab, places = Slab(4 * mmap.PAGESIZE), addresses(4 * mmap.PAGESIZE)
    places.start(slab, range(1))
    held = torch.ones(4 * mmap.PAGESIZE, dtype=torch.uint8)
    arena_allocator.stop()
    slab.keep_within(mmap.PAGESIZE)
    assert held.all()
    assert is_in(slab, held)
    del held
    touch(slab)
    slab.keep_within(mmap.PAGESIZE)
    assert resident_bytes(slab) == mmap.PAGESIZE


def test_pages_between_those_in_use_are_given_back() -> None:
    page = mmap.PAGESIZE
    slab, places = Slab(8 * page), Addresses(8 * page, [page + 64, 2 * page], [page, 5 * page])
    touch(slab)
    places.start(slab, range(2))
    held = [torch.ones(size, dtype=torch.uint8) for size in (page + 64, 2 * page)]
    arena_allocator.stop()
    slab.keep_within(0)
    assert resident_bytes(slab) == 4 * page
    assert all(tensor.all() for tensor in held)


@contextmanager
def without_collection() -> Iterator[None]:
    """Free no tensors of other tests inside: what is freed since the last pass leaves room."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@without_collection()
def test_idle_pages_are_given_back_for_requests_above_the_budget() -> None:
    size = 4 * HUGE_PAGE_BYTES
    slab = Slab(size)
    slab.keep_within(size + HUGE_PAGE_BYTES)
    touch(slab)
    within = torch.empty(HUGE_PAGE_BYTES, dtype=torch.uint8)
    with keep_idle_pages():
        torch.empty(size, dtype=torch.uint8)
    assert resident_bytes(slab) == size
    above = torch.empty(HUGE_PAGE_BYTES // 2, dtype=torch.uint8)
    left = resident_bytes(slab)
    assert size - 2 * HUGE_PAGE_BYTES <= left <= size - above.nbytes
    del within, above
    thread = threading.Thread(target=lambda: torch.empty(2 * HUGE_PAGE_BYTES, dtype=torch.uint8))
    thread.start()
    thread.join()
    assert left - HUGE_PAGE_BYTES <= resident_bytes(slab) <= size - HUGE_PAGE_BYTES
    touch(slab)
    assert resident_bytes(slab) == size


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@without_collection()
@release_large_blocks()  # what the heap keeps of other tests is no room for this one
def test_pages_that_were_given_back_leave_room_in_the_limit_of_the_process() -> None:
    size = 32 * HUGE_PAGE_BYTES
    slab = Slab(size)
    slab.keep_within(size)
    touch(slab)
    full_bytes = used_bytes()
    beside = torch.empty(size // 2, dtype=torch.uint8)
    assert used_bytes() - full_bytes <= 2 * HUGE_PAGE_BYTES
    other, places = Slab(4096), addresses(4096)
    places.start(other, range(1))
    with limited(size // 4), pytest.raises(OutOfMemoryError, match="that were given back between steps"):
        touch(slab)
    assert not is_in(other, torch.empty(4096, dtype=torch.uint8))  # it has ended before
    arena_allocator.stop()
    del beside
    with limited(size):
        touch(slab)
    assert resident_bytes(slab) == size


@without_collection()
def test_a_slab_gives_idle_pages_back_for_a_pass_in_another_one() -> None:
    slabs = [Slab(2 * HUGE_PAGE_BYTES) for _ in range(2)]
    for slab in slabs:
        slab.keep_within(3 * HUGE_PAGE_BYTES)
        touch(slab)
    assert list(map(resident_bytes, slabs)) == [HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES]
    touch(slabs[0])
    assert list(map(resident_bytes, slabs)) == [2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=8),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(0, 32),
)
@without_collection()
def test_pages_and_requests_beside_them_are_within_the_budget(
    inside: list[tuple[int, bool]], beside: list[int], more_pages: int
) -> None:
    page = mmap.PAGESIZE
    slab, places = Slab(32 * page), Addresses(32 * page, [2 * page] * len(inside), [page * begin for begin, _ in inside])
    slab.keep_within((32 + more_pages) * page)
    touch(slab)
    places.start(slab, range(len(inside)))
    made = [torch.full((2 * page,), 1, dtype=torch.uint8) for _ in inside]
    held = [tensor for tensor, (_, keep) in zip(made, inside, strict=True) if keep]
    del made
    arena_allocator.stop()
    in_use = sum(tensor.nbytes for tensor in held if is_in(slab, tensor))
    others: list[torch.Tensor] = []
    for pages in beside:
        others.append(torch.full((pages * page,), 2, dtype=torch.uint8))
        taken = sum(tensor.nbytes for tensor in others)
        assert in_use <= resident_bytes(slab) <= max((32 + more_pages) * page - taken, in_use)
    assert all((tensor == 1).all() for tensor in held)
    assert all((tensor == 2).all() for tensor in others)


def test_backward_continues_in_the_slab_of_its_forward_pass() -> None:
    executor, workload = in_arena("unet")
    eager = measure_outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)

    def replaced_between(*batch: object) -> object:
        returned = executor(*batch)
        executor.arena.shared.drop()
        return returned

    assert not eager.list_differences(measure_outcome(replaced_between, workload.model, workload.batch, seed=3))
    assert executor.arena.missed == Missed()


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
    assert [(r.size_bytes, r.end) for r in recording.list_requests()] == [(2000, 2), (3000, None), (10, 3), (4000, None)]
    assert [recording.list_requests()[i].address for i in (1, 3)] == [second.data_ptr(), third.data_ptr()]


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


def train(step: Callable[..., torch.Tensor], workload: Workload, optimizer: Optimizer, steps: int) -> list[torch.Tensor]:
    """The losses of some steps."""
    losses = []
    for seed in range(steps):
        torch.manual_seed(seed)
        loss = step(*workload.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("optimizer", slow_among(OPTIMIZERS, "nesterov foreach", "adamw"))
@pytest.mark.parametrize("name", ["mlp", *slow("vit")])
def test_steps_and_their_optimizer_take_the_larger_of_both(name: str, optimizer: str) -> None:
    executor, workload = in_arena(name)
    usual = copy.deepcopy(workload)
    plain = Executor(capture(*usual), executor.schedule, usual.model, usual.loss_fn)
    steps = [(executor, workload, OPTIMIZERS[optimizer](workload.model)), (plain, usual, OPTIMIZERS[optimizer](usual.model))]
    trained, wanted = [train(*each, 3) for each in steps]
    assert all(map(torch.equal, (*trained, *workload.model.parameters()), (*wanted, *usual.model.parameters())))
    outside, taken = [peak_bytes(lambda each=each: train(*each, 1)) for each in steps]
    assert 0 <= executor.arena.slab.size_bytes + outside - executor.arena.training_bytes <= TANGENT_BYTES + SCALAR_BYTES
    assert outside < SMALL_BYTES
    assert executor.arena.slab.size_bytes <= taken + ALIGNMENT
    assert executor.arena.missed == executor.arena.optimizer_missed == Missed()
    assert not any(is_in(executor.arena.slab, value) for state in steps[0][2].state.values() for value in state.values())


def test_the_first_step_of_an_optimizer_takes_pages_of_the_slab() -> None:
    executor, workload = in_arena("vit")
    optimizer = OPTIMIZERS["adamw foreach"](workload.model)
    resident: list[int] = []
    optimizer.register_step_post_hook(lambda *_: resident.append(resident_bytes(executor.arena.slab)))
    executor(*workload.batch).backward()
    taken = peak_bytes(optimizer.step)
    parameters = list(workload.model.parameters())
    gradients = sum(parameter.nbytes for parameter in parameters)
    in_use = gradients + 2 * mmap.PAGESIZE * len(parameters)
    assert gradients <= resident[0] <= max(executor.arena.slab.size_bytes - taken, in_use) < 0.8 * executor.arena.slab.size_bytes
    workload.model.zero_grad()
    train(executor, workload, optimizer, 1)
    assert resident[1] > 0.9 * executor.arena.slab.size_bytes


def test_evaluation_between_steps_reuses_pages_of_the_slab() -> None:
    executor, workload = in_arena("vit")
    eager = measure_outcome(TrainingStep(workload.model, workload.loss_fn), workload.model, workload.batch, seed=3)
    for _ in range(2):
        executor(*workload.batch).backward()
        workload.model.zero_grad()
        before = resident_bytes(executor.arena.slab)
        with torch.no_grad():
            taken = peak_bytes(lambda: workload.model(workload.batch[0]))
        assert resident_bytes(executor.arena.slab) <= executor.arena.slab.size_bytes - taken < before
        assert not eager.list_differences(measure_outcome(executor, workload.model, workload.batch, seed=3))
        workload.model.zero_grad()
    assert executor.arena.missed == Missed()


def test_closures_are_served_with_the_step_inside() -> None:
    executor, workload = in_arena("mlp")
    optimizer = OPTIMIZERS["adamw foreach"](workload.model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = executor(*workload.batch)
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        optimizer.step(closure)
    assert peak_bytes(lambda: optimizer.step(closure)) < SMALL_BYTES
    assert executor.arena.missed == executor.arena.optimizer_missed == Missed()


def test_accumulated_gradients_leave_the_slab_to_the_optimizer() -> None:
    executor, workload = in_arena("mlp", accumulate=True)
    usual = copy.deepcopy(workload)
    steps = [(executor, workload), (lambda x, y: usual.loss_fn(usual.model(x), y), usual)]
    for step, of in steps:
        optimizer = OPTIMIZERS["adamw foreach"](of.model)
        for _ in range(3):
            torch.manual_seed(3)
            step(*workload.batch).backward()
            train(step, of, optimizer, 1)
    assert all(map(torch.equal, workload.model.parameters(), usual.model.parameters()))
    assert executor.arena.optimizer_missed == Missed()
    assert executor.arena.slab.size_bytes < 1.1 * sum(parameter.nbytes for parameter in workload.model.parameters())


class Sometimes(SGD):
    """Asks for more memory from its third step on, and for much more in steps that are listed, which fail."""

    def __init__(self, model: nn.Module, failing: Sequence[int] = ()) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.steps, self.failing = 0, failing

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.steps += 1
        asked = torch.empty(3 * LEAST_BYTES * (2 if self.steps > 2 else 1))
        if self.steps in self.failing:
            torch.empty(100 * LEAST_BYTES)
            raise RuntimeError(f"in step {self.steps}")
        del asked
        super().step()


def test_an_optimizer_with_other_requests_is_recorded_again() -> None:
    executor, workload = in_arena("mlp")
    optimizer = Sometimes(workload.model)
    missed_bytes = []
    for _ in range(5):
        train(executor, workload, optimizer, 1)
        missed_bytes.append(executor.arena.optimizer_missed.unmatched_bytes)
    assert missed_bytes == [0, 0, 4 * 6 * LEAST_BYTES, 0, 0]
    assert peak_bytes(lambda: train(executor, workload, optimizer, 1)) < SMALL_BYTES


@pytest.mark.parametrize("failing", [1, 2])
def test_training_goes_on_after_a_step_of_an_optimizer_that_failed(failing: int) -> None:
    executor, workload = in_arena("mlp")
    usual = copy.deepcopy(workload)
    for step, of in [(executor, workload), (lambda x, y: usual.loss_fn(usual.model(x), y), usual)]:
        optimizer = Sometimes(of.model, failing=[failing])
        train(step, of, optimizer, failing - 1)
        with pytest.raises(RuntimeError, match=f"in step {failing}"):
            train(step, of, optimizer, 1)
        held = torch.ones(3 * LEAST_BYTES)  # of a size that the optimizer asks for
        optimizer.zero_grad()
        train(step, of, optimizer, 5)
        assert held.all()
    assert all(map(torch.equal, workload.model.parameters(), usual.model.parameters()))
    assert executor.arena.optimizer_missed == Missed()
    assert executor.arena.slab.size_bytes < 4 * 100 * LEAST_BYTES


def test_an_optimizer_that_is_always_interrupted_leaves_the_pages_of_the_slab() -> None:
    executor, workload = in_arena("mlp")
    optimizer = Wrapping(OPTIMIZERS["adamw foreach"](workload.model))
    train(executor, workload, optimizer, 4)
    pages = resident_bytes(executor.arena.slab)
    assert peak_bytes(lambda: train(executor, workload, optimizer, 1)) < SMALL_BYTES
    assert resident_bytes(executor.arena.slab) == pages > 0.9 * executor.arena.slab.size_bytes


def test_optimizers_without_temporaries_keep_the_addresses_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, workload = in_arena("mlp")
    alone_bytes = executor.arena.size_bytes
    monkeypatch.setattr(slab_addresses, "solve", lambda *_, **__: pytest.fail("addresses are planned again"))
    train(executor, workload, OPTIMIZERS["adamw fused"](workload.model), 3)
    assert executor.arena.slab.size_bytes == alone_bytes
    assert executor.arena.missed == executor.arena.optimizer_missed == Missed()
