"""What copies to the host and back reach beside a step: figures that are known, and real ones."""

import gc
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from planner.capture.replay import collect_static
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload
from planner.graphs.options.surroundings import Link
from planner.measure import link_rates as link
from planner.measure.link_rates import link_during_step
from planner.measure.tracing import trace
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.transfers.host_memory import HostTensor
from planner.settings.link import MEASURED_LINK, LinkProfile, LinkRates, get_measured_link, get_published_link
from tests.support.cuda_device import cuda_device, on_device
from tests.support.cuda_device.streams import BYTES_PER_S, LAUNCH_S
from tests.support.models.steps import make

_START_S, _RATE = 3e-3, 0.2e9


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LARGE_BYTES", 2**23)


class KnownCopy:
    """One that ended at a known time."""

    has_ended = True

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s

    def measure_seconds_after(self, earlier: "KnownCopy") -> float:
        return self._end_s - earlier._end_s

    def finish(self) -> None:
        """Nothing is left to do."""

    def wait_for_arrival(self, taken: torch.Tensor) -> torch.Tensor:
        return taken


class KnownChannels(HostChannels):
    """Copies between what is on both sides take a known time, in a lane that the directions share or in one each."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._ends_s = [0.0] if shared else [0.0, 0.0]

    def copy_again(self, tensor: torch.Tensor, host: HostTensor, *, out: bool) -> Any:
        lane = out % len(self._ends_s)
        self._ends_s[lane] += _START_S + tensor.nbytes / _RATE
        return KnownCopy(self._ends_s[lane])


def link_of(workload: Workload) -> LinkProfile:
    captured = capture(*workload)
    return link_during_step(
        captured, collect_static(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch), 0.0
    )


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one lane"])
def test_measured_link_matches_known_rates(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HostChannels", lambda device, timed: KnownChannels(shared=shared))
    found = link_of(make("tied"))
    rate = link.LARGE_BYTES / (_START_S + link.LARGE_BYTES / _RATE)
    known = pytest.approx([rate, rate, rate / 2 if shared else rate])
    assert [*vars_of(found.alone)] == known and [*vars_of(found.beside)] == known
    assert found.latency_s == pytest.approx(_START_S + link.SMALL_BYTES * (1 / _RATE - 1 / rate))


def test_a_thread_copies_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(target: Any, source: Any) -> None:
        time.sleep(0.01)
        target[:] = source

    monkeypatch.setattr("planner.runtime.transfers.thread_channels.np.copyto", copy)
    channels = HostChannels(torch.device("cpu"))
    values = torch.arange(8.0)
    host, first = channels.offload(values)
    copies = [first, channels.copy_again(values, host, out=True), channels.copy_again(values, host, out=True)]
    assert all(later.measure_seconds_after(earlier) >= 0.01 for earlier, later in pairwise(copies))
    assert all(each.has_ended for each in copies)
    assert torch.equal(torch.from_numpy(host.bytes.values.numpy().view("float32")), values)


def test_directions_that_slow_each_other_share_a_figure() -> None:
    beside = LinkRates(20e9, 30e9, 19e9)
    assert LinkProfile(LinkRates(50e9, 50e9, 50e9), beside, 1e-5).link == Link(20e9, 30e9, 1e-5)
    slowed = LinkRates(20e9, 30e9, 17e9)
    assert LinkProfile(LinkRates(50e9, 50e9, 50e9), slowed, 1e-5).link == Link(17e9, 17e9, 1e-5)


def test_measuring_the_link_leaves_model_and_generator_unchanged() -> None:
    workload = make("mutated")
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    graph = trace(*workload, passes=1, measure_link=True)
    assert all(torch.equal(before[name], value) for name, value in workload.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    found = get_measured_link(graph.provenance)
    rates = (*vars_of(found.alone), *vars_of(found.beside))
    assert all(1e6 < rate < 1e13 for rate in rates) and 0 <= found.latency_s < 1
    assert MEASURED_LINK not in trace(*workload, passes=1).provenance


def vars_of(rates: LinkRates) -> tuple[float, ...]:
    return rates.out_bytes_per_s, rates.in_bytes_per_s, rates.both_bytes_per_s


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
def test_link_on_streams_of_cuda_matches_their_clocks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LARGE_BYTES", 2**16)
    with cuda_device(devices=2) as cuda:
        found = link_of(on_device(make("tied"), place))
        each_s = LAUNCH_S + 2 * link.LARGE_BYTES / BYTES_PER_S  # by the clock of its stream
        known = [pytest.approx(link.LARGE_BYTES / each_s)] * 3
        assert [*vars_of(found.alone)] == [*vars_of(found.beside)] == known
        gc.collect()
        assert not cuda.locked


@pytest.mark.gpu
def test_link_on_a_gpu_has_plausible_rates() -> None:
    workload = make("resnet18")
    workload.model.cuda()
    workload = Workload(workload.model, workload.loss_fn, tuple(value.cuda() for value in workload.batch))
    found = get_measured_link(trace(*workload, passes=1, measure_link=True).provenance)
    assert all(1e9 < rate < 1e12 for rate in (*vars_of(found.alone), *vars_of(found.beside))) and found.latency_s < 1e-3


@pytest.mark.parametrize(
    ("device", "bytes_per_s"),
    [
        ("h200", 25.6e9),
        ("NVIDIA H100 80GB HBM3", 25.6e9),
        ("NVIDIA GH200 480GB", 180e9),
        ("NVIDIA A100-SXM4-80GB", 12.8e9),
        ("NVIDIA L4", 12.8e9),
        ("NVIDIA GeForce RTX 4090", 12.8e9),
        ("cpu", 0.4 * 51.2e9 / 2),
        ("NVIDIA L40S", None),
        ("", None),
    ],
)
def test_published_link_assumes_a_share_of_the_published_bandwidth(device: str, bytes_per_s: float | None) -> None:
    found = get_published_link(device)
    assert (found is None) == (bytes_per_s is None)
    if found is not None:
        assert found.out_bytes_per_s == found.in_bytes_per_s == pytest.approx(bytes_per_s) and found.latency_s == 1e-5
