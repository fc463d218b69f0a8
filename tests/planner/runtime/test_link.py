"""What copies to the host and back reach beside a step: figures that are known, and real ones."""

import time
from contextlib import nullcontext
from sys import getswitchinterval
from threading import Condition
from typing import Any

import pytest
import torch

from graphs.capture.step import TrainingStep
from graphs.capture.trace import capture
from graphs.cost.link import MEASURED_LINK, LinkProfile, Rates, measured_link, published_link
from graphs.cost.replay import RealStep
from graphs.errors import TraceError
from graphs.options.surroundings import Link
from graphs.zoo import Workload
from planner.runtime import link
from planner.runtime.cuda_channels import CudaChannels
from planner.runtime.link import link_beside
from planner.tracing import trace
from tests.support.cuda_stand_in import cuda_stand_in
from tests.support.steps import make

_START_S, _RATE = 3e-3, 0.2e9


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LARGE_BYTES", 2**23)


class Lane:
    """Lets one at a time pass, in the order in which they came: a plain lock may let one thread pass again and again."""

    def __init__(self) -> None:
        self._turn = Condition()
        self._came = self._passed = 0

    def __enter__(self) -> None:
        with self._turn:
            place = self._came
            self._came += 1
            self._turn.wait_for(lambda: self._passed == place)

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._passed += 1
            self._turn.notify_all()


def real_step(workload: Workload) -> RealStep:
    captured = capture(*workload)
    return RealStep.of(captured, TrainingStep(workload.model, workload.loss_fn), workload.batch)


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "one lane"])
def test_known_figures_are_found(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane()

    class Slow:
        """NumPy with copies that take a known time, in a lane that both directions share or in one each."""

        def copyto(self, target: Any, source: Any) -> None:
            with lane if shared else nullcontext():
                time.sleep(_START_S + len(source) / _RATE)

    monkeypatch.setattr("planner.runtime.channels.np", Slow())
    found = link_beside(real_step(make("tied")), 0.0)
    figures = found.alone.out_bytes_per_s, found.alone.in_bytes_per_s, found.beside.out_bytes_per_s, found.beside.in_bytes_per_s
    assert figures == pytest.approx([link.LARGE_BYTES / (_START_S + link.LARGE_BYTES / _RATE)] * 4, rel=0.3)
    parts = [rates.both_bytes_per_s / min(rates.out_bytes_per_s, rates.in_bytes_per_s) for rates in (found.alone, found.beside)]
    assert parts == pytest.approx([0.5 if shared else 1.0] * 2, rel=0.3)
    # More than they sleep: beside a step a thread that wakes waits until Python lets it go on.
    assert 0.9 * _START_S < found.latency_s < _START_S + 2 * getswitchinterval()


def test_directions_that_slow_each_other_share_a_figure() -> None:
    beside = Rates(20e9, 30e9, 19e9)
    assert LinkProfile(Rates(50e9, 50e9, 50e9), beside, 1e-5).link == Link(20e9, 30e9, 1e-5)
    slowed = Rates(20e9, 30e9, 17e9)
    assert LinkProfile(Rates(50e9, 50e9, 50e9), slowed, 1e-5).link == Link(17e9, 17e9, 1e-5)


def test_a_step_is_afterwards_as_it_was() -> None:
    workload = make("mutated")
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    graph = trace(*workload, passes=1, measure_link=True)
    assert all(torch.equal(before[name], value) for name, value in workload.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    found = measured_link(graph.provenance)
    assert found is not None
    rates = (*vars_of(found.alone), *vars_of(found.beside))
    assert all(1e6 < rate < 1e13 for rate in rates) and 0 <= found.latency_s < 1
    assert MEASURED_LINK not in trace(*workload, passes=1).provenance


def vars_of(rates: Rates) -> tuple[float, ...]:
    return rates.out_bytes_per_s, rates.in_bytes_per_s, rates.both_bytes_per_s


def test_a_step_that_is_not_run_has_none() -> None:
    with pytest.raises(TraceError, match="cannot be measured with the roofline 'h200'"):
        trace(*make("tied"), roofline="h200", measure_link=True)


def test_on_streams_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_stand_in() as cuda:
        monkeypatch.setattr(
            link, "open_channels", lambda device, host_bytes, timed: CudaChannels(device, host_bytes, timed=timed)
        )
        found = link_beside(real_step(make("tied")), 0.0)
        assert all(rate > 0 for rate in (*vars_of(found.alone), *vars_of(found.beside)))
        assert not cuda.locked


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    workload = make("resnet18")
    workload.model.cuda()
    workload = Workload(workload.model, workload.loss_fn, tuple(value.cuda() for value in workload.batch))
    found = measured_link(trace(*workload, passes=1, measure_link=True).provenance)
    assert found is not None
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
def test_a_part_of_what_is_published_is_reached(device: str, bytes_per_s: float | None) -> None:
    found = published_link(device)
    assert (found is None) == (bytes_per_s is None)
    if found is not None:
        assert found.out_bytes_per_s == found.in_bytes_per_s == pytest.approx(bytes_per_s) and found.latency_s == 1e-5
