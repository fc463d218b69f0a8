"""The JSON formats of graphs and plans, described in docs/formats.md."""

import os
from dataclasses import asdict
from enum import StrEnum

from graphs.eager import Difference, DifferingOp, EagerComparison
from graphs.errors import FormatError, GraphError
from graphs.io.fields import Fields, plain, shown
from graphs.io.files import layout, read_object, write_text
from graphs.ir import Graph, Kind, Op, Phase, Tensor, check_sums
from graphs.plan import GraphSummary, Plan
from graphs.pools import COMPUTE, DEVICE, Pool
from graphs.schedule import Compute, Free, Schedule, Step

GRAPH_FORMAT = "remat-planner graph"
PLAN_FORMAT = "remat-planner plan"
VERSION = 2

_WRITER = {GRAPH_FORMAT: "planner trace", PLAN_FORMAT: "planner solve"}


class PlanStatus(StrEnum):
    """What a solve that ended in a schedule may say about it."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


def read_graph(path: str | os.PathLike[str]) -> Graph:
    """The graph in the file `path`.

    Raises:
        FormatError: the file is not a graph of a version this planner reads.
        GraphError: it is, but does not describe a training step.
    """
    return _summable(graph_from_dict(read_object(path), source=str(path)), str(path))


def write_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write `graph` to the file `path`, whole or not at all.

    Raises:
        FormatError: the provenance has no JSON form.
        GraphError: it is one that ``read_graph`` refuses.
        OutputError: the file cannot be written.
    """
    write_text(path, layout(graph_to_dict(_summable(graph, str(path)))))


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in the file `path`. Whether it runs on a graph is for ``simulate`` to say.

    Raises:
        FormatError: the file is not a plan of a version this planner reads.
    """
    return plan_from_dict(read_object(path), source=str(path))


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to the file `path`, whole or not at all.

    Raises:
        FormatError: provenance, settings or versions have no JSON form, or a step has none.
        OutputError: the file cannot be written.
    """
    write_text(path, layout(plan_to_dict(plan)))


def read_graph_or_plan(path: str | os.PathLike[str]) -> Graph | Plan:
    """What the file `path` holds, for commands that take either.

    Raises:
        FormatError, GraphError: as ``read_graph`` and ``read_plan``.
    """
    data = read_object(path)
    if data.get("format") == PLAN_FORMAT:
        return plan_from_dict(data, source=str(path))
    return _summable(graph_from_dict(data, source=str(path)), str(path))


def graph_to_dict(graph: Graph) -> dict[str, object]:
    """`graph` as it stands in a file. Fields at their default are left out, and so are producers."""
    return {
        "format": GRAPH_FORMAT,
        "version": VERSION,
        "provenance": plain(graph.provenance, "provenance"),
        **({"pools": [_pool_to_dict(pool) for pool in others]} if (others := graph.pools[1:]) else {}),
        "tensors": [_tensor_to_dict(tensor) for tensor in graph.tensors],
        "ops": [_op_to_dict(op) for op in graph.ops],
        "kept": sorted(graph.kept),
    }


def graph_from_dict(data: object, *, source: str = "graph") -> Graph:
    """The graph that `data` describes; `source` names it in messages.

    Raises:
        FormatError, GraphError: as ``read_graph``.
    """
    fields = _header(data, GRAPH_FORMAT, source)
    provenance = fields.mapping("provenance")
    tensor_rows, op_rows = fields.array("tensors"), fields.array("ops")
    ops = tuple(_op_from(Fields(row, source=source, path=f"ops[{i}]"), i, len(tensor_rows)) for i, row in enumerate(op_rows))
    makers: dict[int, tuple[int, ...]] = {}
    for op in ops:
        for t in op.outputs:
            makers[t] = (*makers.get(t, ()), op.id)
    tensors = tuple(
        _tensor_from(Fields(row, source=source, path=f"tensors[{i}]"), i, makers.get(i, ())) for i, row in enumerate(tensor_rows)
    )
    pool_rows = fields.array("pools") if "pools" in fields else []
    others = tuple(_pool_from(Fields(row, source=source, path=f"pools[{i}]")) for i, row in enumerate(pool_rows))
    kept = fields.integers("kept", below=len(tensors))
    if len(set(kept)) < len(kept):
        fields.refuse("kept", "a list without repetition")
    fields.finish()
    try:
        return Graph(
            ops=ops, tensors=tensors, kept=frozenset(kept), provenance=provenance, pools=(Pool(DEVICE, COMPUTE), *others)
        )
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None


def plan_to_dict(plan: Plan) -> dict[str, object]:
    """`plan` as it stands in a file."""
    summary = plan.graph
    return {
        "format": PLAN_FORMAT,
        "version": VERSION,
        "graph": {
            "fingerprint": summary.fingerprint,
            "ops": summary.ops,
            "tensors": summary.tensors,
            "static_bytes": summary.static_bytes,
            "store_all_peak_bytes": summary.store_all_peak_bytes,
            "time_s": summary.time_s,
            "provenance": plain(summary.provenance, "graph.provenance"),
        },
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "time_s": plan.time_s,
        "bound_s": plan.bound_s,
        "status": str(plan.status),
        "solver": plan.solver,
        "seconds": plan.seconds,
        "settings": plain(plan.settings, "settings"),
        "versions": plain(plan.versions, "versions"),
        "measured_peak_bytes": plan.measured_peak_bytes,
        **({"pool_peaks_bytes": dict(plan.pool_peaks_bytes)} if plan.pool_peaks_bytes else {}),
        **({} if plan.graph_file is None else {"graph_file": plan.graph_file}),
        **({} if plan.eager is None else {"eager": plain(asdict(plan.eager), "eager")}),
        "steps": [_step_to_list(step) for step in plan.schedule.steps],
    }


def plan_from_dict(data: object, *, source: str = "plan") -> Plan:
    """The plan that `data` describes; `source` names it in messages.

    Raises:
        FormatError: as ``read_plan``.
    """
    fields = _header(data, PLAN_FORMAT, source)
    summary = _summary_from(Fields(fields.take("graph"), source=source, path="graph"))
    versions = fields.mapping("versions")
    if not all(isinstance(version, str) for version in versions.values()):
        fields.refuse("versions", "an object of strings")
    plan = Plan(
        graph=summary,
        schedule=Schedule(tuple(_step_from(step, i, summary, source) for i, step in enumerate(fields.array("steps")))),
        budget_bytes=fields.integer("budget_bytes"),
        peak_bytes=fields.integer("peak_bytes"),
        time_s=_seconds(fields, "time_s"),
        bound_s=None if fields.take("bound_s") is None else _seconds(fields, "bound_s"),
        status=fields.choice("status", PlanStatus).value,
        solver=fields.string("solver"),
        seconds=_seconds(fields, "seconds"),
        settings=fields.mapping("settings"),
        versions={name: str(version) for name, version in versions.items()},
        measured_peak_bytes=None if fields.take("measured_peak_bytes") is None else fields.integer("measured_peak_bytes"),
        pool_peaks_bytes=_peaks_from(fields) if "pool_peaks_bytes" in fields else {},
        graph_file=fields.string("graph_file") if "graph_file" in fields else None,
        eager=_eager_from(Fields(fields.take("eager"), source=source, path="eager")) if "eager" in fields else None,
    )
    fields.finish()
    if plan.peak_bytes > plan.budget_bytes:
        fields.refuse("peak_bytes", f"within budget_bytes, {plan.budget_bytes}")
    return plan


def _header(data: object, expected: str, source: str) -> Fields:
    """The fields of `data` once it is known to be what is expected, in a version this planner reads."""
    fields = Fields(data, source=source, path="")
    what = expected.removeprefix("remat-planner ")
    if "format" not in fields:
        raise FormatError(f'{source}: not a {what}: it has no field "format" (files of {_WRITER[expected]} have)')
    found = fields.take("format")
    if found != expected:
        kind = (
            f"a {found.removeprefix('remat-planner ')}"
            if isinstance(found, str) and found in _WRITER
            else f"format {shown(found)}"
        )
        raise FormatError(f"{source}: holds {kind}, but a {what} is expected, as written by {_WRITER[expected]}")
    version = fields.take("version")
    if isinstance(version, bool) or not isinstance(version, int):
        fields.refuse("version", "a whole number")
    if version != VERSION:
        raise FormatError(
            f"{source}: is a {what} of version {shown(version)}, this planner reads {VERSION}: make a new one with "
            f"{_WRITER[expected]}"
        )
    return fields


def _summable(graph: Graph, source: str) -> Graph:
    """`graph`, if it can be worked with."""
    try:
        check_sums(graph)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None
    return graph


def _pool_to_dict(pool: Pool) -> dict[str, object]:
    row: dict[str, object] = {"name": pool.name, "owner": pool.owner}
    if pool.capacity_bytes is not None:
        row["capacity_bytes"] = pool.capacity_bytes
    return row


def _pool_from(fields: Fields) -> Pool:
    pool = Pool(
        name=fields.string("name"),
        owner=fields.string("owner"),
        capacity_bytes=_bytes(fields, "capacity_bytes") if "capacity_bytes" in fields else None,
    )
    fields.finish()
    return pool


def _tensor_to_dict(tensor: Tensor) -> dict[str, object]:
    row: dict[str, object] = {"id": tensor.id, "name": tensor.name, "bytes": tensor.size_bytes, "kind": str(tensor.kind)}
    if tensor.shape:
        row["shape"] = list(tensor.shape)
    if tensor.dtype:
        row["dtype"] = tensor.dtype
    if tensor.view_of is not None:
        row["view_of"] = tensor.view_of
    if tensor.held_for is not None:
        row["held_for"] = tensor.held_for
    if tensor.pool != DEVICE:
        row["pool"] = tensor.pool
    return row


def _tensor_from(fields: Fields, position: int, producers: tuple[int, ...]) -> Tensor:
    tensor = Tensor(
        id=_own_id(fields, position),
        name=fields.string("name"),
        size_bytes=_bytes(fields, "bytes"),
        producers=producers,
        kind=fields.choice("kind", Kind),
        shape=fields.integers("shape") if "shape" in fields else (),
        dtype=fields.string("dtype") if "dtype" in fields else "",
        view_of=fields.integer("view_of") if "view_of" in fields else None,
        held_for=fields.integer("held_for") if "held_for" in fields else None,
        pool=fields.string("pool") if "pool" in fields else DEVICE,
    )
    fields.finish()
    return tensor


def _op_to_dict(op: Op) -> dict[str, object]:
    row: dict[str, object] = {
        "id": op.id,
        "name": op.name,
        "target": op.target,
        "phase": str(op.phase),
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
        "time_s": op.time_s,
    }
    if op.workspace_bytes:
        row["workspace_bytes"] = op.workspace_bytes
    if not op.recomputable:
        row["recomputable"] = False
    if op.random:
        row["random"] = True
    if op.mutates:
        row["mutates"] = list(op.mutates)
    if op.module:
        row["module"] = op.module
    if op.stream != COMPUTE:
        row["stream"] = op.stream
    if op.optional:
        row["optional"] = True
    if op.stands_for:
        row["stands_for"] = list(op.stands_for)
    if op.differs:
        row["differs"] = op.differs
    return row


def _op_from(fields: Fields, position: int, tensors: int) -> Op:
    op = Op(
        id=_own_id(fields, position),
        name=fields.string("name"),
        target=fields.string("target"),
        inputs=fields.integers("inputs", below=tensors),
        outputs=fields.integers("outputs", below=tensors),
        time_s=fields.number("time_s"),
        workspace_bytes=_bytes(fields, "workspace_bytes") if "workspace_bytes" in fields else 0,
        phase=fields.choice("phase", Phase),
        recomputable=fields.boolean("recomputable") if "recomputable" in fields else True,
        random=fields.boolean("random") if "random" in fields else False,
        mutates=fields.integers("mutates", below=tensors) if "mutates" in fields else (),
        module=fields.string("module") if "module" in fields else "",
        stream=fields.string("stream") if "stream" in fields else COMPUTE,
        optional=fields.boolean("optional") if "optional" in fields else False,
        stands_for=fields.integers("stands_for") if "stands_for" in fields else (),
        differs=fields.string("differs") if "differs" in fields else "",
    )
    fields.finish()
    return op


def _summary_from(fields: Fields) -> GraphSummary:
    summary = GraphSummary(
        fingerprint=fields.string("fingerprint"),
        ops=fields.integer("ops"),
        tensors=fields.integer("tensors"),
        static_bytes=fields.integer("static_bytes"),
        store_all_peak_bytes=fields.integer("store_all_peak_bytes"),
        time_s=_seconds(fields, "time_s"),
        provenance=fields.mapping("provenance"),
    )
    fields.finish()
    return summary


def _peaks_from(fields: Fields) -> dict[str, int]:
    peaks = Fields(fields.take("pool_peaks_bytes"), source=fields.source, path="pool_peaks_bytes")
    return {name: peaks.integer(name) for name in fields.mapping("pool_peaks_bytes")}


def _eager_from(fields: Fields) -> EagerComparison:
    rows = [
        Fields(row, source=fields.source, path=f"eager.differences[{i}]") for i, row in enumerate(fields.array("differences"))
    ]
    first = (
        None if fields.take("first_op") is None else Fields(fields.take("first_op"), source=fields.source, path="eager.first_op")
    )
    comparison = EagerComparison(
        differences=tuple(Difference(row.string("name"), _measure(row, "max_abs"), _measure(row, "relative")) for row in rows),
        first_op=None if first is None else DifferingOp(*map(first.string, ("name", "target", "module"))),
        reproducible=fields.boolean("reproducible"),
        peak_bytes=fields.integer("peak_bytes"),
        time_s=_seconds(fields, "time_s"),
        planned_time_s=_seconds(fields, "planned_time_s"),
        failure=fields.string("failure"),
    )
    for part in (*rows, *([] if first is None else [first]), fields):
        part.finish()
    return comparison


def _measure(fields: Fields, name: str) -> float | None:
    if fields.take(name) is None:
        return None
    if fields.number(name) < 0:
        fields.refuse(name, "0 or more")
    return fields.number(name)


def _step_to_list(step: Step) -> list[object]:
    match step:
        case Compute(op):
            return ["compute", int(op)]
        case Free(tensor):
            return ["free", int(tensor)]
        case _:
            raise FormatError(f"step {step!r} has no form in a plan of version {VERSION}")


def _step_from(value: object, index: int, graph: GraphSummary, source: str) -> Step:
    where = f"{source}: steps[{index}] is {shown(value)}"
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise FormatError(f'{where}: must be like ["compute", 12]')
    kind, target = value
    if kind not in ("compute", "free"):
        raise FormatError(f"{where}: a step is one of compute, free")
    what, count = ("ops", graph.ops) if kind == "compute" else ("tensors", graph.tensors)
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < count:
        raise FormatError(f"{where}: must name one of the {count} {what} of the graph")
    return Compute(target) if kind == "compute" else Free(target)


def _own_id(fields: Fields, position: int) -> int:
    if fields.integer("id", signed=True) != position:
        fields.refuse("id", f"its position in the list, {position}")
    return position


def _bytes(fields: Fields, name: str) -> int:
    """Bytes as a whole number; below zero is left to the graph to refuse, which knows the names."""
    return fields.integer(name, signed=True)


def _seconds(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if value < 0:
        fields.refuse(name, "seconds, 0 or more")
    return value
