"""Importer of networkx node-link graphs published with Moccasin: Checkmate's training graphs and random layered ones.

Every op has one output and nothing must be in memory at the end. The files give times without a unit: one unit is taken as a
microsecond, which changes no ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType, field

from planner.graphs.documents import Natural, Seconds, convert_document, refuse, shorten
from planner.graphs.errors import FormatError
from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.provenance import Provenance

UNITS_PER_S = 1_000_000


class _GraphAttributes(Struct, frozen=True):
    name: object = UNSET
    order: tuple[object, ...] | UnsetType = UNSET


class _File(Struct):
    nodes: tuple[dict[str, object], ...]
    links: tuple[dict[str, object], ...]
    graph: _GraphAttributes = _GraphAttributes()
    directed: bool = True


class _NodeFields(Struct):
    id: int | str | UnsetType = UNSET
    name: object = UNSET
    param_cost: Natural = 0
    backward: bool = False


class _TrainingNode(_NodeFields, kw_only=True):
    time: Seconds = field(name="cost_cpu")
    size_bytes: Natural = field(name="cost_ram")


class _LayeredNode(_NodeFields, kw_only=True):
    time: Seconds = field(name="duration")
    size_bytes: Natural = field(name="out_cost")


class _Link(Struct):
    source: object
    target: object


class _NumberedLink(Struct):
    source: object = field(name="0")
    target: object = field(name="1")


@dataclass(frozen=True, slots=True)
class _Node:
    key: object
    name: str
    time: float
    size_bytes: int
    fixed_bytes: int
    backward: bool


def read_graph(data: Mapping[str, object], *, source: str, name: str) -> Graph:
    """Return the graph in `data`.

    Ops have the order that ``graph.order`` lists, else that of their ids, which must be topological.

    Raises:
        FormatError: a field is missing or wrong, or the order is not topological.
    """
    read = convert_document(data, _File, source)
    if not read.directed:
        refuse(source, "directed", read.directed, "true")
    nodes = _order_nodes([_parse_node(row, i, source) for i, row in enumerate(read.nodes)], read.graph, source)
    position = {node.key: i for i, node in enumerate(nodes)}
    read_by: list[list[int]] = [[] for _ in nodes]
    for i, link in enumerate(read.links):
        producer, reader = _link(link, i, position, source)
        read_by[reader].append(producer)
    tensors = [Tensor(i, f"t{i}", node.size_bytes, (i,)) for i, node in enumerate(nodes)]
    fixed_bytes = sum(node.fixed_bytes for node in nodes)
    if fixed_bytes:
        tensors.append(Tensor(len(tensors), "parameters", fixed_bytes, (), Kind.PARAMETER))
    first_backward = next((i for i, node in enumerate(nodes) if node.backward), len(nodes))
    ops = [
        Op(
            id=i,
            name=node.name,
            target="moccasin",
            inputs=tuple(dict.fromkeys(sorted(read_by[i]))),
            outputs=(i,),
            time_s=node.time / UNITS_PER_S,
            phase=Phase.FORWARD if i < first_backward else Phase.BACKWARD,
        )
        for i, node in enumerate(nodes)
    ]
    model = name if read.graph.name is UNSET else read.graph.name
    return Graph(
        tuple(ops),
        tuple(tensors),
        frozenset(),
        Provenance.of({"imported": "node-link graph", "model": str(model), "time_unit": "not given: taken as 1 us"}),
    )


def _parse_node(row: Mapping[str, object], position: int, source: str) -> _Node:
    kind: type[_TrainingNode | _LayeredNode] = _TrainingNode if "cost_ram" in row or "out_cost" not in row else _LayeredNode
    path = f"nodes[{position}]"
    read = convert_document(row, kind, source, path=path)
    key = read.name if read.id is UNSET else read.id
    if key is UNSET:
        raise FormatError(f"{source}: {path} has neither id nor name")
    if isinstance(key, bool) or not isinstance(key, int | str):
        refuse(source, f"{path}.name", key, "a whole number or a string")
    label = key if read.name is UNSET else read.name
    name = label if isinstance(label, str) else f"op{label}"
    return _Node(key, name, read.time, read.size_bytes, read.param_cost, read.backward)


def _order_nodes(nodes: list[_Node], attributes: _GraphAttributes, source: str) -> list[_Node]:
    by_key = {node.key: node for node in nodes}
    if len(by_key) < len(nodes):
        keys = [node.key for node in nodes]
        raise FormatError(f"{source}: node {shorten(next(k for k in keys if keys.count(k) > 1))} appears twice")
    if attributes.order is UNSET:
        return sorted(nodes, key=lambda node: (str(type(node.key)), node.key))
    if len(attributes.order) != len(nodes) or {_make_hashable(key) for key in attributes.order} != by_key.keys():
        refuse(source, "graph.order", attributes.order, f"a list of the {len(nodes)} nodes, each once")
    return [by_key[key] for key in attributes.order]


def _make_hashable(key: object) -> object:
    return key if isinstance(key, int | str) else repr(key)


def _link(row: Mapping[str, object], index: int, position: Mapping[object, int], source: str) -> tuple[int, int]:
    path, numbered = f"links[{index}]", "source" not in row and "0" in row
    kind: type[_Link | _NumberedLink] = _NumberedLink if numbered else _Link
    link = convert_document(row, kind, source, path=path)
    keys = ("0", "1") if numbered else ("source", "target")
    for key, node in zip(keys, (link.source, link.target), strict=True):
        if _make_hashable(node) not in position:
            refuse(source, f"{path}.{key}", node, f"one of the {len(position)} nodes")
    producer, reader = position[link.source], position[link.target]
    if producer >= reader:
        refuse(source, f"{path}.{keys[1]}", link.target, "a node after the one it reads, in graph.order or by id")
    return producer, reader
