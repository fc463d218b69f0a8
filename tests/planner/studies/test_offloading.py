"""Hooks that send what is saved to the host: the bits of plain PyTorch, less on the device, what they take of the host."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu as torch_save_on_cpu

from benchmarks.models.parts import FunctionModule
from planner.capture.step import TrainingStep
from planner.capture.workload.models import Workload, build
from planner.measure.steps import get_loss
from planner.runtime.transfers.channels import HostChannels
from planner.solvers.baselines.sac import SacRule
from planner.studies.baselines import build_checkpoint_blocks, build_eager, build_sac
from planner.studies.measured import Benchmark, Exactness
from planner.studies.offloading import list_offloading_methods, offload_activations, offload_checkpoints, save_on_cpu
from tests.support.models.steps import make


@pytest.mark.parametrize("name", ["gpt2_written", "gpt2_sdpa", "resnet18", "tied", "mutated"])
def test_offloading_methods_are_exact_and_move_memory_to_the_host(name: str) -> None:
    channels = HostChannels(torch.device("cpu"))
    benchmark = Benchmark(make(name), host=channels.memory)
    plain, saved, stashed = map(benchmark.enter, (build_eager(), save_on_cpu(channels), offload_activations(channels)))
    for row in (plain, saved, stashed):
        assert row.error is None and row.exactness is Exactness.IDENTICAL and row.differences == ()
    assert plain.host_bytes == 0
    # Parameters go too, and stay all the same.
    assert (saved.host_bytes or 0) > (stashed.host_bytes or 0) > 0
    assert (saved.peak_bytes or 0) < (plain.peak_bytes or 0)
    assert (stashed.peak_bytes or 0) < (plain.peak_bytes or 0) or name == "mutated"  # at its peak its stash is whole
    assert channels.memory.used_bytes == 0


class Counting(torch_save_on_cpu):
    """PyTorch's own, which says how much it packs. Where nothing is pinned it hands tensors of the CPU on."""

    def __init__(self) -> None:
        super().__init__(pin_memory=True)
        self.packed_bytes = 0
        own = self.pack_hook

        def pack(tensor: torch.Tensor) -> object:
            packed = own(tensor)
            self.packed_bytes += packed[1].nbytes
            return packed

        self.pack_hook = pack


def test_checkpoints_on_the_host_are_exact_and_hold_less_on_the_device() -> None:
    channels = HostChannels(torch.device("cpu"))
    benchmark = Benchmark(build("gpt2", layers=4, width=64, heads=4, vocab=500, batch=8, seq=128), host=channels.memory)
    found = {
        method.name: benchmark.enter(method)
        for method in (build_checkpoint_blocks(), build_sac(), *list_offloading_methods(channels))
    }
    for row in found.values():
        assert row.error is None and row.exactness is Exactness.IDENTICAL
    peaks = {name: row.peak_bytes or 0 for name, row in found.items()}
    hosts = {name: row.host_bytes or 0 for name, row in found.items()}
    assert hosts["checkpoint-blocks"] == hosts["sac"] == 0 < hosts["save-on-cpu checkpoint-blocks"]
    assert hosts["save-on-cpu checkpoint-blocks"] <= hosts["save-on-cpu sac"] < hosts["save-on-cpu"]
    assert peaks["save-on-cpu checkpoint-blocks"] < peaks["checkpoint-blocks"]
    assert peaks["save-on-cpu checkpoint-blocks"] <= peaks["save-on-cpu sac"] < peaks["sac"]
    assert channels.memory.used_bytes == 0


def test_a_list_that_no_op_is_in_does_not_apply() -> None:
    workload = make("resnet18")
    method = offload_checkpoints(HostChannels(torch.device("cpu")), SacRule.ATTENTION)
    row = Benchmark(workload).enter(method)
    assert not row.applies and "saves nothing" in (row.error or "")


@pytest.mark.parametrize("name", ["gpt2_written", "gpt2_sdpa", "resnet18"])
def test_save_on_cpu_sends_as_many_bytes_as_pytorch(name: str) -> None:
    workload = make(name)
    counting = Counting()
    with counting:
        TrainingStep(workload.model, workload.loss_fn)(*workload.batch)
    channels = HostChannels(torch.device("cpu"))
    step = save_on_cpu(channels).prepare(workload.model, workload.loss_fn)
    returned = step(*workload.batch)
    assert channels.memory.used_bytes == counting.packed_bytes > 0
    del returned
    assert channels.memory.used_bytes == 0


def chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Exponentials of one another, each of which saves its output of 4 kB, and of a few bytes at the end."""
    x = x * m.weight
    for _ in range(8):
        x = (-x).exp()
    return x[:10].exp().sum()


def test_a_stash_of_five_stays_and_small_tensors_and_parameters_do_too() -> None:
    workload = Workload(FunctionModule(chain, weight=nn.Parameter(torch.zeros(1000))), None, (torch.ones(1000),))
    channels = HostChannels(torch.device("cpu"))
    copies: list[int] = []
    back = channels.reload
    channels.reload = lambda host: copies.append(len(host.bytes.room)) or back(host)
    loss = get_loss(offload_activations(channels).prepare(workload.model, workload.loss_fn)(*workload.batch))
    assert channels.memory.used_bytes == 9 * 4000  # the input, which the product saves, and eight exponentials
    loss.backward()
    # The first node takes its tensor from the stash; the second finds it gone.
    assert copies == [4000] * 8
    assert channels.memory.used_bytes == 0


def test_host_without_room_is_reported_in_the_row() -> None:
    channels = HostChannels(torch.device("cpu"), 1000)
    row = Benchmark(make("resnet18"), host=channels.memory).enter(save_on_cpu(channels))
    assert row.error is not None and "does not fit" in row.error and "of the host's memory are in use" in row.error
    assert row.peak_bytes is None and not math.isnan(channels.memory.used_bytes)
