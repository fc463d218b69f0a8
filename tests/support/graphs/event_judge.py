"""A second judge, slow and by other means: rules that are read off the whole schedule, and time as a queue of events."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.graphs.ir import Graph, Op, Phase
from planner.graphs.schedule import Compute, Free, Schedule, Step


@dataclass(slots=True)
class Job:
    """A step as what happens on a stream, once all that it waits for is done."""

    step: Step
    stream: str
    seconds: float
    waits_for: set[int] = field(default_factory=set)
    second: set[int] = field(default_factory=set)  # outputs that are there already: these copies go when it ends
    over: set[int] = field(default_factory=set)  # what the last op has written over


@dataclass(frozen=True, slots=True)
class Verdict:
    """By pool the most bytes in the order of steps, and as time goes by; by stream when it is done; by step when it ran."""

    peaks_bytes: dict[str, int]
    peaks_in_time_bytes: dict[str, int]
    done_s: dict[str, float]
    times_s: list[tuple[float, float]]


def judged(graph: Graph, schedule: Schedule) -> Verdict:
    """The verdict on a schedule that runs."""
    jobs = _jobs(graph, schedule.steps)
    times, in_time = _events(graph, jobs)
    done = {stream: max((end for job, (_, end) in zip(jobs, times, strict=True) if job.stream == stream), default=0.0)
            for stream in graph.streams}  # fmt: skip
    received = (times[j][1] for j in _received(graph, schedule.steps, len(jobs)))
    done["compute"] = max(done["compute"], *received, 0.0)
    most = {pool.name: max(during(graph, schedule.steps, k, pool.name) for k in range(len(jobs))) for pool in graph.pools}
    return Verdict(most, in_time, done, times)


def runs(graph: Graph, steps: Sequence[Step], *, to_the_end: bool = True) -> bool:
    """Whether `steps` are a schedule; the first steps of one, where not `to_the_end`."""
    executed = [(k, graph.ops[step.op]) for k, step in enumerate(steps) if isinstance(step, Compute)]
    as_places = [(k, op, p) for k, op in executed for p in (op.replaces if op.optional else (op.id,))]
    first: dict[int, int] = {}
    for k, _, p in as_places:
        first.setdefault(p, k)
    program = [op for op in graph.ops if not op.optional]
    random_ops = [p for _, p in sorted((k, p) for p, k in first.items() if graph.ops[p].random)]
    rules = [
        all(_step_runs(graph, steps, k) for k in range(len(steps))),
        all(sum(op.id in (p, other.id) for _, other, p in as_places) <= 1 or op.recomputable for op in program),
        all([other.id for _, other in executed].count(op.id) <= 1 or op.recomputable for op in graph.ops),
        random_ops == [op.id for op in program if op.random][: len(random_ops)],
        all(
            (first.get(w.id, k) < k) == (w.id < p)
            for k, op, p in as_places
            for w in program
            if w.id not in (p, *op.replaces) and set(w.mutates) & {*op.inputs, *op.mutates}
        ),
    ]
    ended = not to_the_end or (len(first) == len(program) and graph.kept <= live(graph, steps))
    return all(rules) and ended


def live(graph: Graph, steps: Sequence[Step]) -> set[int]:
    """What is in memory after `steps`."""
    there = {t.id for t in graph.tensors if not t.producers}
    for step in steps:
        there = there - {step.tensor} if isinstance(step, Free) else there | set(graph.ops[step.op].outputs)
    return there


def during(graph: Graph, steps: Sequence[Step], k: int, pool: str) -> int:
    """Bytes in `pool` during step `k`."""
    step = steps[k]
    if isinstance(step, Free):
        return _bytes(graph, live(graph, steps[: k + 1]) - _over(graph, steps, k), pool)
    op = graph.ops[step.op]
    there = live(graph, steps[:k]) - _over(graph, steps, k)
    return _bytes(graph, there, pool) + _bytes(graph, op.outputs, pool) + _workspace(graph, op, pool)


def _over(graph: Graph, steps: Sequence[Step], k: int) -> set[int]:
    """What the op of the last execution up to step `k` has written over: it is there before that, and not at the next."""
    at = max((j for j in range(k + 1) if isinstance(steps[j], Compute)), default=None)
    if at is None or not isinstance(step := steps[at], Compute):
        return set()
    following = next((j for j in range(at + 1, len(steps)) if isinstance(steps[j], Compute)), len(steps))
    goes = {t for _, t in graph.ops[step.op].overwrites} & (live(graph, steps[:at]) - live(graph, steps[:following]))
    return {t for t in goes if not _read_elsewhere(graph, steps, at, t)}


def _read_elsewhere(graph: Graph, steps: Sequence[Step], k: int, t: int) -> bool:
    """Whether another stream than that of its memory reads what is there of `t` before step `k`."""
    reading = (s for s in steps[_maker(graph, steps, k, t) : k] if isinstance(s, Compute) and t in graph.ops[s.op].inputs)
    return any(graph.ops[s.op].stream != _owner(graph, t) for s in reading)


def _step_runs(graph: Graph, steps: Sequence[Step], k: int) -> bool:
    step, there = steps[k], live(graph, steps[:k])
    if isinstance(step, Free):
        return step.tensor in there and step.tensor not in graph.kept and bool(graph.tensors[step.tensor].producers)
    op = graph.ops[step.op]
    fits = all(pool.capacity_bytes is None or during(graph, steps, k, pool.name) <= pool.capacity_bytes for pool in graph.pools)
    return fits and there.issuperset(op.inputs) and all(_owner(graph, t) == op.stream for t in there & set(op.outputs))


def _owner(graph: Graph, t: int) -> str:
    return next(pool.owner for pool in graph.pools if pool.name == graph.tensors[t].pool)


def _bytes(graph: Graph, tensors: Sequence[int] | set[int], pool: str) -> int:
    return sum(graph.tensors[t].size_bytes for t in tensors if graph.tensors[t].pool == pool)


def _workspace(graph: Graph, op: Op, pool: str) -> int:
    owned = [p.name for p in graph.pools if p.owner == op.stream]
    return op.workspace_bytes if owned[:1] == [pool] else 0


def _jobs(graph: Graph, steps: Sequence[Step]) -> list[Job]:
    """What each step waits for: all is looked up in the steps before it."""
    jobs: list[Job] = []
    for k, step in enumerate(steps):
        if isinstance(step, Free):
            job = Job(step, _owner(graph, step.tensor), 0.0, over=_over(graph, steps, k))
            job.waits_for = _touching(graph, steps, k, step.tensor)
        else:
            op = graph.ops[step.op]
            second = live(graph, steps[:k]) & set(op.outputs)
            job = Job(step, op.stream, op.time_s, second=second, over=_over(graph, steps, k))
            for t in op.inputs:
                job.waits_for |= {_maker(graph, steps, k, t)} if graph.tensors[t].producers else _writing(graph, steps, k, t)
            for t in op.mutates:
                job.waits_for |= _touching(graph, steps, k, t)
            owners = {_owner(graph, t) for t in op.outputs}
            job.waits_for |= {j for j, other in enumerate(jobs) if other.stream in owners}
        job.waits_for |= {j for j, other in enumerate(jobs) if other.stream == job.stream}
        if "compute" in {job.stream, *([] if isinstance(step, Free) else owners)}:
            job.waits_for |= _received(graph, steps, k)
        jobs.append(job)
    return jobs


def _received(graph: Graph, steps: Sequence[Step], k: int) -> set[int]:
    """The steps that made what the caller receives from other devices after the forward pass, if it has ended before step `k`."""
    others = [op for op in graph.ops if op.stream != "compute"]
    results = {t for op in others for p in op.replaces for t in graph.ops[p].outputs if t in graph.kept}
    results = {t for t in results if graph.ops[graph.tensors[t].producers[0]].phase is Phase.FORWARD}
    done = {p for s in steps[:k] if isinstance(s, Compute) for p in (s.op, *graph.ops[s.op].replaces)}
    ended = done.issuperset(op.id for op in graph.program if op.phase is Phase.FORWARD)
    return {_maker(graph, steps, k, t) for t in results} if ended and results <= live(graph, steps[:k]) else set()


def _maker(graph: Graph, steps: Sequence[Step], k: int, t: int) -> int:
    """The step that made what is there of `t` before step `k`."""
    freed = max((j for j in range(k) if steps[j] == Free(t)), default=-1)
    return min(j for j in range(freed + 1, k) if isinstance(s := steps[j], Compute) and t in graph.ops[s.op].outputs)


def _writing(graph: Graph, steps: Sequence[Step], k: int, t: int) -> set[int]:
    return {j for j in range(k) if isinstance(s := steps[j], Compute) and t in graph.ops[s.op].mutates}


def _touching(graph: Graph, steps: Sequence[Step], k: int, t: int) -> set[int]:
    """The steps before `k` that made what is there of `t`, read it since, or wrote in it."""
    since = _maker(graph, steps, k, t) if graph.tensors[t].producers else 0
    users = {
        j for j in range(since, k)
        if isinstance(s := steps[j], Compute) and t in (*graph.ops[s.op].inputs, *graph.ops[s.op].mutates)
    }  # fmt: skip
    return users | {since} if graph.tensors[t].producers else users


def _events(graph: Graph, jobs: Sequence[Job]) -> tuple[list[tuple[float, float]], dict[str, int]]:
    """When each job ran, and by pool the most bytes at any moment."""
    now_s, finished, begun_s, ended_s = 0.0, set[int](), dict[int, float](), dict[int, float]()
    queue: list[tuple[float, int]] = []
    stays = [t.id for t in graph.tensors if not t.producers]
    held = {pool.name: _bytes(graph, stays, pool.name) for pool in graph.pools}
    most = dict(held)
    while len(finished) < len(jobs):
        for j, job in enumerate(jobs):
            if j not in begun_s and job.waits_for <= finished:
                begun_s[j] = now_s
                heapq.heappush(queue, (now_s + job.seconds, j))
                if isinstance(job.step, Compute):
                    op = graph.ops[job.step.op]
                    for pool in held:
                        held[pool] += _bytes(graph, op.outputs, pool) + _workspace(graph, op, pool)
                        held[pool] -= _bytes(graph, job.over, pool)
                        most[pool] = max(most[pool], held[pool])
        now_s, j = heapq.heappop(queue)
        finished.add(j)
        ended_s[j] = now_s
        step = jobs[j].step
        for pool in held:
            if isinstance(step, Free):
                held[pool] -= _bytes(graph, {step.tensor} - jobs[j].over, pool)
            else:
                held[pool] -= _bytes(graph, jobs[j].second, pool) + _workspace(graph, graph.ops[step.op], pool)
    return [(begun_s[j], ended_s[j]) for j in range(len(jobs))], most
