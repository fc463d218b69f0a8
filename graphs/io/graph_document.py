"""The JSON format of graphs, described in docs/formats.md."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from planner.graphs.documents import (
    GRAPH_FORMAT,
    VERSION,
    Finite,
    Natural,
    Size,
    build_struct,
    check_header,
    convert_document,
    convert_to_json_object,
    list_arguments,
    list_fields,
    refuse,
)
from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.pools import COMPUTE, DEVICE, Pool
from planner.graphs.provenance import Provenance
from planner.graphs.requests import MemoryRequest

_Ids: TypeAlias = tuple[Natural, ...]
_Amounts: TypeAlias = tuple[tuple[str, Finite], ...]


class _Pool(Struct, forbid_unknown_fields=True):
    name: str
    owner: str
    capacity_bytes: Size | UnsetType = UNSET


class _Tensor(Struct, forbid_unknown_fields=True):
    id: int
    name: str
    size_bytes: Size = field(name="bytes")
    kind: Kind
    shape: tuple[Natural, ...] = ()
    dtype: str = ""
    view_of: Natural | UnsetType = UNSET
    held_for: Natural | UnsetType = UNSET
    pool: str = DEVICE


class _Op(Struct, forbid_unknown_fields=True):
    id: int
    name: str
    target: str
    phase: Phase
    inputs: _Ids
    outputs: _Ids
    time_s: Finite
    workspace_bytes: Size = 0
    recomputable: bool = True
    random: bool = False
    mutates: _Ids = ()
    module: str = ""
    stream: str = COMPUTE
    optional: bool = False
    replaces: _Ids = ()
    differs: str = ""
    overwrites: tuple[tuple[Natural, Natural], ...] = ()
    uses: _Amounts = ()
    requests: tuple[MemoryRequest, ...] = ()
    host_s: Finite = 0.0


class _Graph(Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    version: int
    provenance: dict[str, object]
    pools: tuple[_Pool, ...] = ()
    tensors: tuple[_Tensor, ...]
    ops: tuple[_Op, ...]
    kept: _Ids
    limits: _Amounts = ()
    around_s: Finite = 0.0


def convert_to_dict(graph: Graph) -> dict[str, object]:
    """Return `graph` in the format of files, without producers and without fields at their default.

    Raises:
        FormatError: the provenance has no JSON form.
    """
    return list_fields(
        _Graph(
            format=GRAPH_FORMAT,
            version=VERSION,
            provenance=convert_to_json_object(graph.provenance, "provenance"),
            pools=tuple(build_struct(pool, _Pool) for pool in graph.pools[1:]),
            tensors=tuple(build_struct(tensor, _Tensor) for tensor in graph.tensors),
            ops=tuple(build_struct(op, _Op) for op in graph.ops),
            kept=tuple(sorted(graph.kept)),
            limits=graph.limits,
            around_s=graph.around_s,
        )
    )


def build_from_dict(data: Mapping[str, object], *, source: str = "graph") -> Graph:
    """Return the graph in `data`; `source` names it in messages.

    Raises:
        FormatError: `data` is no graph of a version that this planner reads.
        GraphError: it is, but does not describe a training step.
    """
    check_header(data, GRAPH_FORMAT, source)
    read = convert_document(data, _Graph, source)
    provenance = Provenance.of(convert_to_json_object(read.provenance, f"{source}: provenance"), source)
    _check_ids(read, source)
    producers: dict[int, tuple[int, ...]] = {}
    for op in read.ops:
        for t in op.outputs:
            producers[t] = (*producers.get(t, ()), op.id)
    try:
        return Graph(
            ops=tuple(Op(**list_arguments(op)) for op in read.ops),
            tensors=tuple(Tensor(producers=producers.get(tensor.id, ()), **list_arguments(tensor)) for tensor in read.tensors),
            kept=frozenset(read.kept),
            provenance=provenance,
            pools=(Pool(DEVICE, COMPUTE), *(Pool(**list_arguments(pool)) for pool in read.pools)),
            limits=read.limits,
            around_s=read.around_s,
        )
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None


def _check_ids(read: _Graph, source: str) -> None:
    """Raise an error for ids that are not positions, and for ids of unknown tensors."""
    rows: Sequence[tuple[str, Sequence[_Tensor | _Op]]] = (("tensors", read.tensors), ("ops", read.ops))
    for name, entries in rows:
        for i, row in enumerate(entries):
            if row.id != i:
                refuse(source, f"{name}[{i}].id", row.id, f"its position in the list, {i}")
    for op in read.ops:
        for name, ids in (("inputs", op.inputs), ("outputs", op.outputs), ("mutates", op.mutates)):
            if ids and max(ids) >= len(read.tensors):
                refuse(source, f"ops[{op.id}].{name}", ids, f"ids of tensors, below {len(read.tensors)}")
    if read.kept and max(read.kept) >= len(read.tensors):
        refuse(source, "kept", read.kept, f"ids of tensors, below {len(read.tensors)}")
    if len(set(read.kept)) < len(read.kept):
        refuse(source, "kept", read.kept, "a list without repetition")
