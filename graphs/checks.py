"""Checks of graphs: conditions on every graph when it is built, and conditions of functions that accept only some graphs.

Solvers and the judge rely on these conditions and do not ask again. Each has to take linear time: checks that compared ops with
ops took two minutes for the 12,000 ops of a GRU over 400 steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.graphs.errors import GraphError
from planner.graphs.pools import COMPUTE, DEVICE
from planner.graphs.requests import WORKSPACE

if TYPE_CHECKING:
    from planner.graphs.ir import Graph, Op

_TOO_MUCH = 2**63  # bytes, or seconds


def check_graph(graph: "Graph") -> None:
    """Raise a GraphError, with the part and what would be valid, unless the parts of `graph` describe a training step."""
    _check_seconds("the graph", "time around its ops", graph.around_s)
    _check_pools(graph)
    _check_tensors(graph)
    _check_ops(graph)
    _check_producers(graph)
    written = {t: op.name for op in graph.program for t in op.mutates}
    for op in graph.ops:
        _check_optional_op(graph, op, written)
    _check_views(graph)
    _check_kept(graph)
    _check_overwrites(graph)
    _check_capacities(graph)
    _check_amounts("the graph", "allows", graph.limits)


def check_sums(graph: "Graph") -> None:
    """Raise a GraphError if a sum overflows: solvers count bytes in 64 bits and seconds in floating point."""
    total_bytes = sum(t.size_bytes for t in graph.tensors) + sum(op.workspace_bytes for op in graph.ops)
    if total_bytes >= _TOO_MUCH:
        raise GraphError(f"the sizes of its tensors and workspaces sum to {total_bytes} bytes: must be below 2^63")
    total_s = sum(op.time_s for op in graph.ops)
    if total_s >= _TOO_MUCH:
        raise GraphError(f"the times of its ops sum to {total_s:g} s: must be below 2^63")


def check_plain(graph: "Graph") -> None:
    """Raise a GraphError for several pools or streams, or optional ops, which only the exact solver supports."""
    if graph.plain:
        return
    optional = len(graph.ops) - len(graph.program)
    raise GraphError(
        f"the graph has {len(graph.pools)} pools, {len(graph.streams)} streams and {optional} optional ops: only graphs with "
        "one of each and without optional ops are supported here; leave the options out of the graph"
    )


def _check_pools(graph: "Graph") -> None:
    if not graph.pools or (graph.pools[0].name, graph.pools[0].owner) != (DEVICE, COMPUTE):
        raise GraphError(f"the first pool of a graph is {DEVICE!r}, which the stream {COMPUTE!r} owns")
    if graph.pools[0].capacity_bytes is not None:
        raise GraphError(f"pool {DEVICE!r} has capacity {graph.pools[0].capacity_bytes!r}: its capacity is the budget of a solve")
    names: set[str] = set()
    for pool in graph.pools:
        if pool.name in names:
            raise GraphError(f"pool {pool.name!r} appears twice: names must be unique")
        names.add(pool.name)
        if not pool.name or not pool.owner:
            raise GraphError(f"pool {pool.name!r} is owned by the stream {pool.owner!r}: both need a name")
        if pool.capacity_bytes is not None and (not isinstance(pool.capacity_bytes, int) or pool.capacity_bytes < 0):
            raise GraphError(f"pool {pool.name!r} has capacity {pool.capacity_bytes!r}: sizes are whole bytes, 0 or more")


def _check_tensors(graph: "Graph") -> None:
    pools = {pool.name for pool in graph.pools}
    names: set[str] = set()
    for position, tensor in enumerate(graph.tensors):
        where = f"tensor {tensor.name!r}"
        if tensor.id != position:
            raise GraphError(f"{where} has id {tensor.id} but stands at position {position}")
        if tensor.name in names:
            raise GraphError(f"{where} appears twice: names must be unique")
        names.add(tensor.name)
        if not isinstance(tensor.size_bytes, int) or tensor.size_bytes < 0:
            raise GraphError(f"{where} has size {tensor.size_bytes!r}: sizes are whole bytes, 0 or more")
        for producer in tensor.producers:
            if not 0 <= producer < len(graph.ops):
                raise GraphError(f"{where} has producer {producer}, which is not one of the {len(graph.ops)} ops")
        if tensor.pool not in pools:
            raise GraphError(f"{where} is in the pool {tensor.pool!r}: the graph has {', '.join(map(repr, sorted(pools)))}")


def _check_seconds(where: str, what: str, seconds: float) -> None:
    if not math.isfinite(seconds) or seconds < 0:
        raise GraphError(f"{where} has {what} {seconds!r}: times are finite seconds, 0 or more")


def _check_ops(graph: "Graph") -> None:
    if not graph.ops:
        raise GraphError("the graph has no ops")
    if graph.ops[0].optional:
        raise GraphError(f"op {graph.ops[0].name!r} is optional and comes first: the program's ops come before optional ones")
    owners = {pool.owner for pool in graph.pools}
    names: set[str] = set()
    before: Op | None = None
    for position, op in enumerate(graph.ops):
        where = f"op {op.name!r}"
        if op.id != position:
            raise GraphError(f"{where} has id {op.id} but stands at position {position}")
        if op.name in names:
            raise GraphError(f"{where} appears twice: names must be unique")
        names.add(op.name)
        _check_seconds(where, "time", op.time_s)
        _check_seconds(where, "host time", op.host_s)
        if not isinstance(op.workspace_bytes, int) or op.workspace_bytes < 0:
            raise GraphError(f"{where} has workspace {op.workspace_bytes!r}: sizes are whole bytes, 0 or more")
        _check_amounts(where, "uses", op.uses)
        _check_requests(where, op)
        if not op.stream:
            raise GraphError(f"{where} runs on a stream without a name")
        if op.workspace_bytes and op.stream not in owners and (op.optional or not op.is_transfer):
            raise GraphError(
                f"{where} has a workspace of {op.workspace_bytes} bytes, but its stream {op.stream!r} owns no pool to take it "
                "from: make it an output, which is freed when the op is done"
            )
        _check_order(before, op)
        _check_op_tensors(graph, op)
        before = op


def _check_requests(where: str, op: "Op") -> None:
    """Raise an error unless each request is for one of the outputs, once, or a workspace that is freed later."""
    outputs = [request.output for request in op.requests if request.output != WORKSPACE]
    if len(set(outputs)) < len(outputs) or not all(0 <= position < len(op.outputs) for position in outputs):
        raise GraphError(f"{where} requests memory for outputs {outputs}: each of its {len(op.outputs)} at most once")
    for index, request in enumerate(op.requests):
        if request.output == WORKSPACE and (request.size_bytes <= 0 or not index < request.until <= len(op.requests)):
            raise GraphError(f"{where} has the request {tuple(request)} at {index}: it must be above 0 bytes, and freed later")


def _check_amounts(where: str, does: str, amounts: Sequence[tuple[str, float]]) -> None:
    """Raise an error unless each resource has a name and one finite amount."""
    for resource, amount in amounts:
        if not resource or [name for name, _ in amounts].count(resource) > 1:
            raise GraphError(f"{where} {does} {resource!r} twice, or without a name: name each resource once")
        if not math.isfinite(amount) or amount < 0:
            raise GraphError(f"{where} {does} {amount!r} of {resource!r}: must be finite, 0 or more")


def _check_order(before: "Op | None", op: "Op") -> None:
    """Raise an error unless phases are in order and optional ops come last."""
    if before is None or op.optional:
        return
    if before.optional:
        raise GraphError(f"op {op.name!r} comes after the optional op {before.name!r}: optional ops come after the program's")
    if op.phase.place < before.phase.place:
        raise GraphError(f"op {op.name!r} is {op.phase} but comes after a {before.phase} op: ops must be in program order")


def _check_op_tensors(graph: "Graph", op: "Op") -> None:
    where = f"op {op.name!r}"
    for t in (*op.inputs, *op.outputs, *op.mutates):
        if not 0 <= t < len(graph.tensors):
            raise GraphError(f"{where} names tensor {t}, which does not exist: the graph has {len(graph.tensors)}")
    if len(set(op.inputs)) < len(op.inputs) or len(set(op.outputs)) < len(op.outputs):
        raise GraphError(f"{where} lists a tensor twice")
    for t in op.inputs:
        producers = graph.tensors[t].producers
        if producers and producers[0] >= op.id:
            raise GraphError(
                f"{where} reads {graph.tensors[t].name!r}, which op {graph.ops[producers[0]].name!r} makes at or after it: "
                "ops must be in a topological order (is there a cycle?)"
            )
    for t in op.mutates:
        if not graph.tensors[t].static:
            raise GraphError(f"{where} mutates {graph.tensors[t].name!r}, which is not static")


def _check_producers(graph: "Graph") -> None:
    producers: dict[int, list[int]] = {}
    for op in graph.ops:
        for t in op.outputs:
            earlier = producers.setdefault(t, [])
            if earlier and not op.optional:
                both = f"{graph.ops[earlier[0]].name!r} and {op.name!r}"
                raise GraphError(f"tensor {graph.tensors[t].name!r} is an output of both {both}, and neither is optional")
            earlier.append(op.id)
    for tensor in graph.tensors:
        listing = tuple(producers.get(tensor.id, ()))
        if tensor.producers != listing:
            raise GraphError(
                f"tensor {tensor.name!r} has producers {tensor.producers}, but it is an output of the ops {listing}, in this "
                "order"
            )


def _check_optional_op(graph: "Graph", op: "Op", written: Mapping[int, str]) -> None:
    """Raise an error for invalid fields of `op`; `written` maps tensors written in place to the name of an op that does."""
    where = f"op {op.name!r}"
    if not op.optional:
        if op.replaces or op.differs or op.uses:
            what = f"uses {op.uses[0][0]!r}" if op.uses else f"differs from the program ({op.differs})"
            what = "replaces other ops" if op.replaces else what
            raise GraphError(f"{where} {what}, but is not optional")
        return
    for t in set(op.inputs).intersection(op.outputs):
        raise GraphError(f"{where} both reads and makes {graph.tensors[t].name!r}")
    for p in op.replaces:
        if not 0 <= p < len(graph.program):
            raise GraphError(f"{where} replaces op {p}, which is not one of the {len(graph.program)} of the program")
    if list(op.replaces) != sorted(set(op.replaces)):
        raise GraphError(f"{where} replaces {op.replaces}: each op once, in ascending order")
    replaced = [graph.ops[p] for p in op.replaces]
    if set(op.mutates) != {t for p in replaced for t in p.mutates}:
        raise GraphError(f"{where} is optional, and must write in place exactly what the ops that it replaces write in place")
    if op.random != any(p.random for p in replaced):
        raise GraphError(f"{where} is optional, and must be random if one of the ops that it replaces is, and only then")
    for t in op.inputs:
        if t in written and not op.replaces:
            raise GraphError(
                f"{where} is optional and reads {graph.tensors[t].name!r}, which {written[t]!r} writes in place: name the op "
                "that it replaces, which decides whether it runs before or after the write"
            )


def _check_kept(graph: "Graph") -> None:
    for t in graph.kept:
        if not 0 <= t < len(graph.tensors):
            raise GraphError(f"kept tensor {t} does not exist: the graph has {len(graph.tensors)} tensors")
        tensor = graph.tensors[t]
        if tensor.static:
            raise GraphError(f"kept tensor {tensor.name!r} has no producer: static tensors are not listed as kept")
        if graph.ops[tensor.producers[0]].optional:
            raise GraphError(
                f"kept tensor {tensor.name!r} is produced by optional ops only: an op of the program must produce it"
            )


def _check_capacities(graph: "Graph") -> None:
    for pool in graph.pools[1:]:
        static_bytes = graph.static_bytes_by_pool[pool.name]
        if pool.capacity_bytes is not None and static_bytes > pool.capacity_bytes:
            raise GraphError(
                f"pool {pool.name!r} has a capacity of {pool.capacity_bytes} bytes, but its static tensors take {static_bytes}"
            )


def _check_views(graph: "Graph") -> None:
    for tensor in graph.tensors:
        where = f"tensor {tensor.name!r}"
        for other in (tensor.view_of, tensor.held_for):
            if other is not None and (not 0 <= other < len(graph.tensors) or other == tensor.id or tensor.static):
                raise GraphError(
                    f"{where} is a view of, or held for, tensor {other}: it must be produced by an op, and "
                    f"{other} be another tensor of the graph"
                )
        if tensor.held_for is None:
            continue
        if graph.ops[tensor.producers[0]].inputs or len(graph.consumers[tensor.id]) != 1:
            raise GraphError(f"{where} is held for another: its op must read nothing, and exactly one op must read it")


def _check_overwrites(graph: "Graph") -> None:
    """Raise an error unless each overwritten input has the output's size, is freed by the op, and shares no memory."""
    shared = {other for t in graph.tensors for other in (t.view_of, t.held_for)}
    owned = {(pool.name, pool.owner) for pool in graph.pools}
    for op in graph.ops:
        pairs = op.overwrites
        if pairs and op.optional:
            raise GraphError(f"op {op.name!r} writes over an input: optional ops must not")
        if len({o for o, _ in pairs}) < len(pairs) or len({t for _, t in pairs}) < len(pairs):
            raise GraphError(f"op {op.name!r} lists a tensor twice among those that it overwrites")
        for o, t in pairs:
            if o not in op.outputs or t not in op.inputs:
                raise GraphError(
                    f"op {op.name!r} writes tensor {o} over {t}: the first must be an output of it, the second an input"
                )
            made, read = graph.tensors[o], graph.tensors[t]
            where = f"op {op.name!r} writes {made.name!r} over {read.name!r}"
            if read.static or t in graph.kept:
                raise GraphError(f"{where}, which must stay in memory")
            if {(made.pool, op.stream), (read.pool, op.stream)} - owned:
                raise GraphError(f"{where}: both must be in a pool of the stream {op.stream!r}, on which it runs")
            if made.size_bytes != read.size_bytes:
                raise GraphError(f"{where}: they have {made.size_bytes} and {read.size_bytes} bytes: sizes must be equal")
            if shared & {o, t} or any(x is not None for x in (made.view_of, made.held_for, read.view_of, read.held_for)):
                raise GraphError(f"{where}, but one of them shares its memory with another tensor, or is held for one")
