"""Schedules that copy tensors to the host and back wherever it is allowed."""

import re
from dataclasses import dataclass, replace
from random import Random

from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.graphs.ir import Graph
from planner.graphs.options.offload import remove_offload
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.schedule import Compute, Free, Schedule, Step, keep_everything
from planner.graphs.simulate import simulate
from planner.runtime.executor import Executor
from tests.support.models.steps import capture_of, make


@dataclass(frozen=True)
class IssuedCopy:
    """A copy in the code of a step: by what name it is issued, whether back, what it makes, reads and waits for."""

    name: str
    back: bool
    made: str | None
    read: str
    after: str | None


def copies_in(source: str) -> list[IssuedCopy]:
    """The copies that `source` issues, in order."""
    found = []
    on_host: set[str] = set()
    for name, read, after, made in re.findall(
        r"(transfers\[\d+\])\.send\((t\d+)(?:, (\S+))?\)\n +(?:(t\d+) = )?\1\.take\(\d+\)", source
    ):
        back = read in on_host
        on_host.update(() if back or not made else (made,))
        found.append(IssuedCopy(name, back, made or None, read, after or None))
    return found


def offering(captured: Capture, *, host_bytes: int | None = None) -> Capture:
    """`captured` with transfers to the host, over a link that is faster than any."""
    return replace(captured, graph=apply_options(captured.graph, ["offload"], Surroundings(Link.even(1e12), host_bytes)))


def copying_step(name: str, seed: int) -> tuple[Capture, Schedule, Executor]:
    """The step `name` with transfers, a schedule that makes some at random, and what runs it on a model of its own."""
    workload = make(name)
    captured = capture_of(name)
    offered = offering(captured)
    schedule = with_random_copies(offered.graph, keep_everything(captured.graph), seed)
    return offered, schedule, Executor(offered, schedule, workload.model, workload.loss_fn)


def with_random_copies(offered: Graph, schedule: Schedule, seed: int) -> Schedule:
    """`schedule` with copies out and back at random, judged: `offered` is its graph with the option offload.

    Copies out wait, are made twice and for nothing; copies in are early or just in time; what is on the host goes while it
    is being read, or stays to the end.
    """
    random = Random(seed)
    _, offloads = remove_offload(offered)
    by_tensor = offloads.by_tensor
    steps: list[Step] = []
    there: set[int] = set()  # on the device
    sent: set[int] = set()  # on the host

    def fetch(t: int) -> None:
        steps.append(Compute(by_tensor[t].back.op))
        there.add(t)
        if random.random() < 0.3:
            forget(t)

    def send(t: int) -> None:
        steps.append(Compute(by_tensor[t].out.op))
        sent.add(t)

    def forget(t: int) -> None:
        steps.append(Free(by_tensor[t].host_tensor))
        sent.remove(t)

    for step in schedule.steps:
        if isinstance(step, Free):
            if step.tensor in there:
                steps.append(step)
                there.remove(step.tensor)
            if step.tensor in sent and random.random() < 0.8:
                forget(step.tensor)
            continue
        op = offered.ops[step.op]
        for t in sorted(sent - there):
            if t in op.inputs or random.random() < 0.05:
                fetch(t)
        steps.append(step)
        there.update(op.outputs)
        for t in sorted(there & by_tensor.keys()):
            if random.random() < (0.02 if t in sent else 0.1):
                send(t)
            if t in sent and random.random() < 0.3:
                steps.append(Free(t))
                there.remove(t)
    found = Schedule(tuple(steps))
    simulate(offered, found)
    return found
