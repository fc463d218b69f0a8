"""References that a program holds beyond the last reader, as the logs of its steps have them."""

from dataclasses import dataclass

from graphs.ir import Graph


@dataclass(frozen=True, slots=True)
class Held:
    """A reference held beyond the last reader, as it stands in a graph.

    Attributes:
        storage: id of the tensor that the program went on to hold.
        tensor: id of the one that stands for it from then on.
        hold, release: ids of the ops that make and read that one.
    """

    storage: int
    tensor: int
    hold: int
    release: int


def held_storages(graph: Graph) -> tuple[Held, ...]:
    """What the program that `graph` records held beyond the last reader."""
    return tuple(
        Held(t.held_for, t.id, t.producers[0], graph.consumers[t.id][0])
        for t in graph.tensors
        if t.held_for is not None and not t.static
    )
