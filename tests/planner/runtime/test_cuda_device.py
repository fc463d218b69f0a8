"""The stand-in for CUDA devices: what must show there does, and a test holds each wait, event, hold and rounding."""

import gc
import threading

import numpy as np
import pytest
import torch

from tests.support.cuda_device import Order, cuda_device
from tests.support.cuda_device.memory import WORKSPACE_BYTES
from tests.support.cuda_device.mutations import MUTATIONS, ROOT, Mutation, path_of_test, survives

CUDA = torch.device("cuda:0")
MIB = 2**20


@pytest.mark.parametrize("order", Order)
def test_emulated_device_computes_the_same_as_the_cpu(order: Order) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(40, 30), torch.randn(30, 20, requires_grad=True)
    wanted = torch.nn.functional.gelu(x @ w).square().sum()
    (gradient,) = torch.autograd.grad(wanted, w)
    with cuda_device(order=order) as cuda:
        there = w.detach().to(CUDA).requires_grad_()
        found = torch.nn.functional.gelu(x.to(CUDA) @ there).square().sum()
        assert found.is_cuda and found.device == CUDA and found.item() == wanted.item()
        found.backward()
        assert torch.equal(there.grad.cpu(), gradient)
        assert len(cuda.passes) == 1 and threading.get_ident() not in cuda.passes


def test_a_stream_that_does_not_wait_reads_too_early() -> None:
    with cuda_device(order=Order.OTHERS_FIRST):
        side = torch.cuda.Stream(CUDA)
        x = torch.ones(1000, device=CUDA) * 2
        with torch.cuda.stream(side):
            y = x + 1
        side.synchronize()
        assert y.cpu().isnan().all()
        side.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(side):
            y = x + 1
        side.synchronize()
        assert torch.equal(y.cpu(), torch.full((1000,), 3.0))


def freed_while_it_is_read() -> None:
    with cuda_device(order=Order.OTHERS_LATE):
        side = torch.cuda.Stream(CUDA)
        x = torch.ones(1000, device=CUDA)
        side.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(side):
            y = x + 1
        del x
        torch.zeros(1, device=CUDA)
        side.synchronize()
        assert y.cpu().isnan().any()


def test_freeing_memory_that_a_stream_reads_raises() -> None:
    with pytest.raises(AssertionError, match="behind where its memory was freed"):
        freed_while_it_is_read()


@pytest.mark.parametrize("order", Order)
def test_record_stream_keeps_memory_for_the_stream(order: Order) -> None:
    with cuda_device(order=order):
        side = torch.cuda.Stream(CUDA)
        x = torch.ones(1000, device=CUDA)
        address = x.data_ptr()
        side.wait_stream(torch.cuda.current_stream(CUDA))
        with torch.cuda.stream(side):
            y = x + 1
        x.record_stream(side)
        del x
        z = torch.zeros(1000, device=CUDA)
        assert z.data_ptr() != address or order in (Order.OTHERS_FIRST, Order.RANDOM)
        side.synchronize()
        assert torch.equal(y.cpu(), torch.full((1000,), 2.0)) and not z.cpu().any()


def test_memory_is_used_again_on_the_same_stream() -> None:
    with cuda_device():
        x = torch.ones(1000, device=CUDA)
        y, address = x + 1, x.data_ptr()
        del x
        x = torch.zeros(1000, device=CUDA)
        assert x.data_ptr() == address
        assert torch.equal(y.cpu(), torch.full((1000,), 2.0))


def test_memory_is_counted_by_the_allocators_rules() -> None:
    with cuda_device():
        x = torch.empty(1000, dtype=torch.uint8, device=CUDA)
        assert torch.cuda.memory_allocated() == 1024 and torch.cuda.memory_reserved() == 2 * MIB
        y = torch.empty(3 * MIB, dtype=torch.uint8, device=CUDA)
        del y
        assert torch.cuda.memory_allocated() == 1024 and torch.cuda.max_memory_allocated() == 1024 + 3 * MIB
        assert torch.cuda.memory_reserved() == 22 * MIB
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 2 * MIB
        del x


def test_a_full_device_is_pytorchs_error() -> None:
    with cuda_device(capacity_bytes=24 * MIB), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 30\.00 MiB"):
        torch.empty(30 * MIB, dtype=torch.uint8, device=CUDA)


def test_libraries_have_a_workspace_for_each_thread_and_stream() -> None:
    with cuda_device() as cuda:
        x = torch.ones(4, 4, device=CUDA, requires_grad=True)
        before = torch.cuda.memory_allocated()
        y = x @ x
        assert torch.cuda.memory_allocated() - before - 512 == WORKSPACE_BYTES
        y.sum().backward()
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            x.detach() @ x.detach()
        assert len(cuda.memories[0].workspaces) == 3
        torch._C._cuda_clearCublasWorkspaces()
        assert torch.cuda.memory_allocated() < WORKSPACE_BYTES


def test_copies_to_page_locked_memory_are_not_waited_for() -> None:
    with cuda_device():
        x = torch.ones(1000, device=CUDA)
        host = torch.empty(1000, pin_memory=True)
        host.zero_()
        host.copy_(x, non_blocking=True)
        assert not host.any()
        torch.cuda.synchronize()
        assert host.all()
        assert x.cpu().all()


def unlocked_while_it_is_written() -> None:
    with cuda_device() as cuda:
        whole = np.empty(2 * 4096, dtype=np.uint8)
        start = -whole.ctypes.data % 4096
        cuda.lock_memory(whole.ctypes.data + start, 4096)
        host = torch.from_numpy(whole[start : start + 4096])
        host.copy_(torch.ones(4096, dtype=torch.uint8, device=CUDA), non_blocking=True)
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def test_page_locked_memory_that_a_copy_uses_is_not_unlocked() -> None:
    with pytest.raises(AssertionError, match="unlocked while a copy uses it"):
        unlocked_while_it_is_written()


def test_times_are_those_of_the_stream_that_events_were_recorded_on() -> None:
    with cuda_device(devices=2):
        first, last, other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        x = torch.ones(10**6, device="cuda:1")
        first.record()
        y = x + 1
        last.record()
        other.record(torch.cuda.current_stream(y.device))
        torch.cuda.synchronize("cuda:0")
        assert first.elapsed_time(last) == 0
        torch.cuda.synchronize("cuda:1")
        with pytest.raises(RuntimeError, match="of different devices"):
            first.elapsed_time(other)


def test_devices_do_not_mix() -> None:
    with cuda_device(devices=2):
        x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        for other in (y, torch.ones(3)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                x + other
        assert torch.equal((x + y.to("cuda:0")).cpu(), torch.full((3,), 2.0))


def test_a_graph_is_replayed_into_the_same_memory() -> None:
    for order in Order:
        with cuda_device(order=order, seed=3):
            x = torch.ones(1000, device=CUDA)
            side, graph = torch.cuda.Stream(CUDA), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                present = torch.cuda.current_stream(CUDA)
                y = x * 3
                side.wait_stream(present)
                with torch.cuda.stream(side):
                    z = y + 1
                present.wait_stream(side)
                del y
                w = z * 2
            address = w.data_ptr()
            for value in (1.0, 5.0):
                x.fill_(value)
                graph.replay()
                assert w.data_ptr() == address and torch.equal(w.cpu(), torch.full((1000,), 2 * (3 * value + 1)))


REFUSED = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "copy to the host": lambda x: x.cpu(),
    "state of a generator": lambda x: torch.cuda.default_generators[0].get_state(),
    "page-locked memory": lambda x: torch.empty(3, pin_memory=True),
    "outside": lambda x: torch.cuda.current_stream().wait_event(x.before),
}


@pytest.mark.parametrize("what", REFUSED)
def test_capture_raises_where_cuda_does(what: str) -> None:
    with cuda_device():
        x = torch.ones(10, device=CUDA)
        x.before = torch.cuda.current_stream().record_event()
        with pytest.raises(RuntimeError, match="CUDA error"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            REFUSED[what](x)


def captured_on_two_streams() -> None:
    side = torch.cuda.Stream(CUDA)
    x = torch.ones(10, device=CUDA)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1


def test_a_stream_that_does_not_come_back_to_its_capture_is_refused() -> None:
    with cuda_device(), pytest.raises(RuntimeError, match="unjoined work"):
        captured_on_two_streams()


def test_random_numbers_are_drawn_anew_in_each_replay_and_by_the_seed() -> None:
    with cuda_device():
        x = torch.ones(1000, device=CUDA)
        torch.manual_seed(3)
        drawn = [torch.nn.functional.dropout(x).cpu() for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.nn.functional.dropout(x)
        torch.manual_seed(3)
        for wanted in drawn:
            graph.replay()
            assert torch.equal(y.cpu(), wanted)
        gc.collect()


def name_of(mutation: Mutation) -> str:
    return mutation.takes_away.replace(" ", "-")


def test_mutated_text_is_in_the_sources_once() -> None:
    assert len(MUTATIONS) >= 38
    for mutation in MUTATIONS:
        compile(mutation.change((ROOT / mutation.file).read_text()), mutation.file, "exec")
        file, *_ = mutation.test.split()
        assert (ROOT / path_of_test(ROOT, file)).exists()


@pytest.mark.parametrize(
    "mutation", [MUTATIONS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in MUTATIONS[1:])], ids=name_of
)
def test_mutation_makes_its_test_fail(mutation: Mutation) -> None:
    assert not survives(mutation)
