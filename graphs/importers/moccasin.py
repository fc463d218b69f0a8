"""Node-link graphs of networkx as published with Moccasin: Checkmate's training graphs and random layered ones.

Every op has one output and nothing must be in memory at the end. The files give times without a unit: one
unit is taken as a microsecond, which changes no ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.errors import FormatError
from graphs.io.fields import Fields, shown
from graphs.ir import Graph, Kind, Op, Phase, Tensor

UNITS_PER_S = 1_000_000
LINK_KEYS = (("source", "target"), ("0", "1"))


@dataclass(frozen=True, slots=True)
class _Node:
    key: object
    name: str
    time: float
    size_bytes: int
    fixed_bytes: int
    backward: bool


def graph_from(data: Mapping[str, object], *, source: str, name: str) -> Graph:
    """The graph in `data`.

    Ops stand in the order that ``graph.order`` lists, else in that of their ids, which must be topological.

    Raises:
        FormatError: a field is missing or wrong, or the order is not topological.
    """
    fields = Fields(data, source=source, path="")
    if "directed" in fields and not fields.boolean("directed"):
        fields.refuse("directed", "true")
    about = Fields(fields.take("graph") if "graph" in fields else {}, source=source, path="graph")
    nodes = _ordered([_node(row, i, source) for i, row in enumerate(fields.array("nodes"))], about, source)
    place = {node.key: i for i, node in enumerate(nodes)}
    read: list[list[int]] = [[] for _ in nodes]
    for i, link in enumerate(fields.array("links")):
        giver, reader = _link(link, i, place, source)
        read[reader].append(giver)
    tensors = [Tensor(i, f"t{i}", node.size_bytes, (i,)) for i, node in enumerate(nodes)]
    fixed_bytes = sum(node.fixed_bytes for node in nodes)
    if fixed_bytes:
        tensors.append(Tensor(len(tensors), "parameters", fixed_bytes, (), Kind.PARAMETER))
    turn = next((i for i, node in enumerate(nodes) if node.backward), len(nodes))
    ops = [
        Op(
            id=i,
            name=node.name,
            target="moccasin",
            inputs=tuple(dict.fromkeys(sorted(read[i]))),
            outputs=(i,),
            time_s=node.time / UNITS_PER_S,
            phase=Phase.FORWARD if i < turn else Phase.BACKWARD,
        )
        for i, node in enumerate(nodes)
    ]
    model = about.take("name") if "name" in about else name
    return Graph(
        tuple(ops),
        tuple(tensors),
        frozenset(),
        {"imported": "node-link graph", "model": str(model), "time_unit": "not given: taken as 1 us"},
    )


def _node(row: object, position: int, source: str) -> _Node:
    fields = Fields(row, source=source, path=f"nodes[{position}]")
    key = fields.take("id" if "id" in fields or "name" not in fields else "name")
    if isinstance(key, bool) or not isinstance(key, int | str):
        fields.refuse("id" if "id" in fields else "name", "a whole number or a string")
    training = "cost_ram" in fields or "out_cost" not in fields
    time, size = ("cost_cpu", "cost_ram") if training else ("duration", "out_cost")
    if fields.number(time) < 0:
        fields.refuse(time, "0 or more")
    label = fields.take("name") if "name" in fields else key
    return _Node(
        key,
        label if isinstance(label, str) else f"op{label}",
        fields.number(time),
        fields.integer(size),
        fields.integer("param_cost") if "param_cost" in fields else 0,
        fields.boolean("backward") if "backward" in fields else False,
    )


def _ordered(nodes: list[_Node], about: Fields, source: str) -> list[_Node]:
    by_key = {node.key: node for node in nodes}
    if len(by_key) < len(nodes):
        keys = [node.key for node in nodes]
        raise FormatError(f"{source}: node {shown(next(k for k in keys if keys.count(k) > 1))} appears twice")
    if "order" not in about:
        return sorted(nodes, key=lambda node: (str(type(node.key)), node.key))
    order = about.array("order")
    if len(order) != len(nodes) or {_hashable(key) for key in order} != by_key.keys():
        about.refuse("order", f"a list of the {len(nodes)} nodes, each once")
    return [by_key[key] for key in order]


def _hashable(key: object) -> object:
    return key if isinstance(key, int | str) else repr(key)


def _link(row: object, position: int, place: Mapping[object, int], source: str) -> tuple[int, int]:
    fields = Fields(row, source=source, path=f"links[{position}]")
    keys = next((keys for keys in LINK_KEYS if keys[0] in fields), LINK_KEYS[0])
    for key in keys:
        if _hashable(fields.take(key)) not in place:
            fields.refuse(key, f"one of the {len(place)} nodes")
    giver, reader = (place[fields.take(key)] for key in keys)
    if giver >= reader:
        fields.refuse(keys[1], "a node after the one it reads, in graph.order or by id")
    return giver, reader
