"""Steps with something to pack, and schedules that pack it, written down without a solver."""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import nn

from planner.capture.workload.models import Workload
from planner.graphs.ir import Graph, Op, Phase
from planner.graphs.schedule import Schedule, schedule_of


class Mixed(nn.Module):
    """Activations of each kind, in sizes that are no multiples of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.Conv2d(7, 9, 3)
        self.third, self.fourth, self.fifth = nn.Conv2d(9, 9, 1), nn.Conv2d(9, 9, 3, padding=1), nn.Conv2d(9, 9, 1)
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.second(torch.relu(self.norm(x)) + x)
        x = self.third(F.leaky_relu(x, 0.1) + x)
        x = F.dropout(self.fourth(F.relu6(x)), 0.3, self.training)
        x = self.fifth(F.hardsigmoid(x) + x)
        return self.head(x.mean((2, 3)))


def mixed(*, channels_last: bool = False) -> Workload:
    """The same every time."""
    torch.manual_seed(7)
    model, x, target = Mixed(), torch.randn(5, 3, 17, 15), torch.randint(5, (5,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return Workload(model, nn.CrossEntropyLoss(), (x, target))


def does(graph: Graph, what: str) -> list[Op]:
    """The ops of ``pack`` that do that, and those that make what they read."""
    found = [op for op in graph.ops if op.target == f"pack.{what}"]
    own = _program_tensors(graph)
    return [*found, *(graph.ops[p] for op in found for t in op.inputs if t not in own for p in graph.tensors[t].producers)]


def packing(graph: Graph, chosen: Collection[Op]) -> Schedule:
    """Each op of the program in its order, with those `chosen`: packing at once, unpacking as late as can be."""
    instead = {p: op.id for op in chosen for p in op.replaces}
    own = _program_tensors(graph)
    unpacks = [op for op in chosen if not op.replaces and set(op.outputs) <= own]
    packs = [op for op in chosen if not set(op.outputs) <= own]
    computed: list[int] = []
    for op in graph.program:
        if op.phase is Phase.BACKWARD:
            computed += [other.id for other in unpacks if other.id not in computed and set(other.outputs) & set(op.inputs)]
        computed.append(instead.get(op.id, op.id))
        computed += [other.id for other in packs if set(other.inputs) & set(op.outputs)]
    return schedule_of(graph, computed)


def _program_tensors(graph: Graph) -> set[int]:
    return {t for op in graph.program for t in op.outputs}
