"""Graphs and plans with every field that there is, as hypothesis draws them; and what a refused file says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from planner.graphs.errors import PlannerError
from planner.graphs.io import files
from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.pools import COMPUTE, DEVICE, Pool
from planner.graphs.provenance import Provenance
from planner.graphs.schedule import Compute, Free, Schedule
from planner.plans.plan import Plan
from planner.plans.record import GraphSummary
from planner.solvers.result import SolveSettings

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
sizes = st.integers(0, 2**63 - 1)
times = st.floats(0, allow_nan=False, allow_infinity=False, max_value=2.0**62)
free = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any valid graph, with every field that there is."""
    tensors: list[Tensor] = []

    host = Pool("host", "copies", draw(st.none() | st.just(2**63 - 1)))
    pools = draw(st.sampled_from([(Pool(DEVICE, COMPUTE),), (Pool(DEVICE, COMPUTE), host)]))

    def tensor(*producers: int) -> int:
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        kind, dtype = draw(st.sampled_from(Kind)), draw(names)
        pool = draw(st.sampled_from(pools)).name if producers else DEVICE
        view_of = draw(st.none() | st.integers(0, len(tensors) - 1)) if producers and tensors else None
        made = Tensor(
            len(tensors), f"{draw(names)}{len(tensors)}", draw(sizes), producers, kind, shape, dtype, view_of, pool=pool
        )
        tensors.append(made)
        return len(tensors) - 1

    static = [tensor() for _ in range(draw(st.integers(0, 3)))]
    ops = []
    for i in range(draw(st.integers(1, 5))):
        inputs = tuple(draw(st.lists(st.sampled_from(range(len(tensors))), unique=True, max_size=3))) if tensors else ()
        phase = list(Phase)[draw(st.integers(list(Phase).index(ops[-1].phase) if ops else 0, 2))]
        op = Op(
            id=i,
            name=f"{draw(names)}{i}",
            target=draw(names),
            inputs=inputs,
            outputs=tuple(tensor(i) for _ in range(draw(st.integers(0, 2)))),
            time_s=draw(times),
            workspace_bytes=draw(sizes),
            phase=phase,
            recomputable=draw(st.booleans()),
            random=draw(st.booleans()),
            mutates=tuple(draw(st.lists(st.sampled_from(static), max_size=2))) if static else (),
            module=draw(names),
        )
        ops.append(op)
    program = tuple(ops)
    made = [t.id for t in tensors if not t.static]
    kept = frozenset(draw(st.lists(st.sampled_from(made)))) if made else frozenset()
    for i in range(len(ops), len(ops) + draw(st.integers(0, 2))):
        replaces = tuple(sorted(draw(st.sets(st.sampled_from(range(len(program)))))))
        others = tuple(draw(st.lists(st.sampled_from(made), unique=True))) if made else ()
        for t in others:
            tensors[t] = replace(tensors[t], producers=(*tensors[t].producers, i))
        ops.append(
            Op(
                id=i,
                name=f"{draw(names)}{i}",
                target=draw(names),
                inputs=tuple(t for t in made if t not in others),
                outputs=(*others, tensor(i)),
                time_s=draw(times),
                random=any(ops[p].random for p in replaces),
                mutates=tuple({t for p in replaces for t in ops[p].mutates}),
                stream=draw(st.sampled_from([COMPUTE, "copies"])),
                optional=True,
                replaces=replaces,
                differs=draw(names),
            )
        )
    provenance = draw(st.dictionaries(names, free, max_size=3))
    if len(pools) == 1 and len(ops) == len(program):
        own = {t.view_of for t in tensors} | {t.id for t in tensors if t.static or t.view_of is not None}
        for i, op in enumerate(program):
            pairs = [(o, t) for o, t in zip(op.outputs, op.inputs, strict=False) if not own & {o, t} and t not in kept]
            for o, t in pairs:
                tensors[o] = replace(tensors[o], size_bytes=tensors[t].size_bytes)
            ops[i] = replace(op, overwrites=tuple(pairs))
    return Graph(tuple(ops), tuple(tensors), kept, provenance, pools)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that a file can hold; whether its schedule runs is not the file's business."""
    ops, tensors, budget_bytes = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(sizes)
    step = st.builds(Compute, st.integers(0, ops - 1)) | st.builds(Free, st.integers(0, tensors - 1))
    provenance = Provenance.of(draw(st.dictionaries(names, free, max_size=2)))
    return Plan(
        graph=GraphSummary(draw(names), ops, tensors, draw(sizes), draw(sizes), draw(times), provenance),
        schedule=Schedule(tuple(draw(st.lists(step, max_size=9)))),
        budget_bytes=budget_bytes,
        peak_bytes=draw(st.integers(0, budget_bytes)),
        time_s=draw(times),
        bound_s=draw(st.none() | times),
        solver=draw(names),
        seconds=draw(times),
        settings=SolveSettings(method=draw(st.dictionaries(names, free, max_size=2))),
        versions=draw(st.dictionaries(names, names, max_size=2)),
        measured_peak_bytes=draw(st.none() | sizes),
        pool_peaks_bytes=draw(st.dictionaries(names, sizes, max_size=2)),
        graph_file=draw(st.none() | st.text()),
    )


def through_text(data: dict[str, object]) -> object:
    return json.loads(files.format_json(data))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(PlannerError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 400
    return message.removeprefix(f"{path}: ")
