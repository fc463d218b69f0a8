"""Steps whose ops run on several pools of the CPU, a thread each, and schedules that place them at random."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from random import Random

import torch
from torch import nn

from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.options.traced import replace_graph
from planner.capture.program.other_device import move_calls
from planner.capture.step import TrainingStep
from planner.graphs.ir import Graph
from planner.graphs.options.passes import order_by_passes
from planner.graphs.options.placement import Placement, get_placement
from planner.graphs.options.selection import list_exact_ops
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.schedule import Compute, Free, Schedule, Step
from planner.graphs.simulate import simulate
from planner.measure.steps import get_loss
from planner.measure.tracing import capture_profiled
from planner.runtime.devices import place_of
from planner.runtime.executor import Executor
from planner.settings.option_settings import OptionSettings
from planner.settings.other_devices import parse_device
from planner.settings.plan import PlanSettings
from tests.support.graphs.random_choices import BESIDE, any_schedule
from tests.support.models.outcomes import assert_same
from tests.support.models.steps import make

CPU = torch.device("cpu")
SECOND = "cpu:1"
TRACED = ("chunks", "pack", "kernels", "in-place", "compress")


def profiled(name: str) -> Capture:
    """The step `name` with measured times and workspaces."""
    workload = make(name)
    return capture_profiled(workload, PlanSettings(passes=1))


@cache
def traced(name: str) -> Capture:
    """The step `name` with all that is found in it, measured."""
    workload = make(name)
    return capture_profiled(workload, PlanSettings(passes=1, options=OptionSettings(TRACED)))


def with_everything(name: str, names: Sequence[str] = (SECOND,), *, exact: bool = True, host_bytes: int | None = None) -> Capture:
    """The step `name` with further pools of the CPU, round trips to the host, and what is found in it.

    Args:
        exact: none of that differs in a bit; else it may be compressed to 4 bits.
    """
    captured = traced(name)
    around = replace(surroundings(captured, names), host_bytes=host_bytes)
    options = (*(option for option in TRACED if option != "compress"), *BESIDE, *(() if exact else ("compress:4",)))
    return replace_graph(
        captured, apply_options(captured.graph, options, around, list_exact_ops(captured.graph) if exact else None)
    )


def step_with_everything(name: str, seed: int) -> tuple[Capture, Schedule, Executor]:
    """As ``placed_step``, of a graph with all options."""
    workload = make(name)
    offered = with_everything(name)
    schedule = order_by_passes(offered.graph, any_schedule(offered.graph, seed))
    return offered, schedule, Executor(offered, schedule, workload.model, workload.loss_fn)


def on_pools(captured: Capture, names: Sequence[str] = (SECOND,), *options: str, main: torch.device = CPU) -> Capture:
    """`captured`, of the device `main`, with placement on the devices called `names`, and with `options`."""
    around = surroundings(captured, names, main)
    return replace(captured, graph=apply_options(captured.graph, [*options, "placement"], around))


def surroundings(captured: Capture, names: Sequence[str], main: torch.device = CPU) -> Surroundings:
    """Devices called `names` beside `main`, and the host, over links that are faster than any."""

    def other(name: str) -> OtherDevice:
        place = place_of(parse_device(name))
        able = [move_calls(captured.program, op, op, main, place) is not None for op in captured.graph.program]
        times = tuple(op.time_s if can else None for op, can in zip(captured.graph.program, able, strict=True))
        return OtherDevice(name, times, 1e12, block_bytes=512 if place.type == "cuda" else 1)

    return Surroundings(Link.even(1e12), others=tuple(map(other, names)))


def placed_step(name: str, seed: int, names: Sequence[str] = (SECOND,)) -> tuple[Capture, Schedule, Executor]:
    """The step `name`, a schedule that places its ops at random, and what runs it on a model of its own."""
    workload = make(name)
    captured = profiled(name)
    offered = on_pools(captured, names)
    schedule = placed_at_random(offered.graph, seed)
    return offered, schedule, Executor(offered, schedule, workload.model, workload.loss_fn)


def placed_at_random(graph: Graph, seed: int) -> Schedule:
    """A schedule, judged: each op on any device, now and then twice; what goes is copied again from where it is left."""
    placing = _Placing(get_placement(graph), Random(seed))
    found = Schedule(tuple(placing.steps()))
    simulate(graph, found)
    return found


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters, buffers and gradients."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found | {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def undone_and_right_again(step: Executor, name: str = "mutated") -> Iterator[None]:
    """What fails inside leaves the model of the step `name` as it was; the next one trains as eager PyTorch from there."""
    planned, workload = step.training_step, make(name)
    before = state(planned)
    yield
    assert_same(before, state(planned))
    eager = TrainingStep(workload.model, workload.loss_fn)
    eager.load_state_dict(planned.state_dict())
    for p, q in zip(eager.parameters(), planned.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    losses = []
    for run in (eager, step):
        torch.manual_seed(5)
        losses.append(get_loss(run(*workload.batch)))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert_same(state(eager), state(planned))
    gc.collect()  # an error of a thread that cannot start holds frames
    assert step.devices.host is None or step.devices.host.used_bytes == 0


class _Placing:
    def __init__(self, placement: Placement, random: Random) -> None:
        self.placement, self.random = placement, random
        self.program = placement.program
        self.found: list[Step] = []
        self.there = {t.id for t in self.program.tensors if t.static}  # tensors of the whole graph, in any memory

    def steps(self) -> list[Step]:
        readers = self.program.consumers
        for op in self.program.ops:
            for d in self._devices(op.id):
                for x in op.inputs:
                    self._bring(x, d)
                run = self.placement.runs[d][op.id]
                assert run is not None
                self._compute(run)
            for x in {*op.inputs, *op.outputs}:
                last = max(readers[x], default=-1) <= op.id
                self._forget(x, last=last)
        for x in sorted(self.program.kept):
            self._bring(x, 0)
        return self.found

    def _devices(self, op: int) -> list[int]:
        able = [d for d, runs in enumerate(self.placement.runs) if runs[op] is not None]
        most = 2 if self.program.ops[op].recomputable and self.random.random() < 0.1 else 1
        return self.random.sample(able, min(most, len(able)))

    def _compute(self, op: int) -> None:
        self.found.append(Compute(op))
        self.there.update(self.placement.whole.ops[op].outputs)

    def _bring(self, x: int, d: int) -> None:
        place = self._place(d, x)
        if place in self.there:
            return
        source = self.random.choice([e for e in self._where(x) if (e, d, x) in self.placement.copies])
        self._compute(self.placement.copies[source, d, x])

    def _forget(self, x: int, *, last: bool) -> None:
        """Free what nobody reads, and now and then a copy of what is elsewhere too."""
        for d in self._where(x):
            place = self._place(d, x)
            tensor = self.placement.whole.tensors[place]
            if tensor.static or place in self.placement.whole.kept:
                continue
            spare = len(self._where(x)) > 1 and self.random.random() < 0.3
            left = last and x not in self.program.kept and self.random.random() < 0.9
            if spare or left:
                self.found.append(Free(place))
                self.there.remove(place)

    def _where(self, x: int) -> list[int]:
        return [d for d, places in enumerate(self.placement.places) if places[x] in self.there]

    def _place(self, d: int, x: int) -> int:
        place = self.placement.places[d][x]
        assert place is not None
        return place
