"""Importer of profiled training graphs with the costs that a commercial solver reached on Checkmate's program.

Every op has one output and nothing must be in memory at the end. Times are in units of 0.01 ms, sizes in KiB; the budgets of
the reference results do not include the fixed memory.
"""

from collections.abc import Mapping

from msgspec import UNSET, Struct, UnsetType

from planner.graphs.documents import Finite, Natural, convert_document, refuse
from planner.graphs.errors import FormatError
from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.provenance import Provenance

KIB = 1024
UNITS_PER_S = 100_000  # a unit of time is 0.01 ms
UNSOLVED_S = 86_400  # a reference solve that took this long was stopped


class _Reference(Struct):
    budget: Natural
    gurobi_cost: Natural
    gurobi_seconds: Finite


class _Instance(Struct):
    cost: tuple[Natural, ...]
    memory: tuple[Natural, ...]
    parents: tuple[tuple[Natural, ...], ...]
    loss: Natural
    fixed_memory: Natural
    name: str | UnsetType = UNSET
    reference: tuple[_Reference, ...] = ()


def read_graph(data: Mapping[str, object], *, source: str, name: str) -> Graph:
    """Return the graph in `data`, whose ops up to the loss are the forward pass.

    The provenance lists the `reference` results with budgets that include the fixed memory (``budget_bytes``), the step time
    (``time_s``), the seconds of the solve (``seconds``), and True if it was proved optimal (``solved``).

    Raises:
        FormatError: a field is missing or wrong.
    """
    read = convert_document(data, _Instance, source)
    fixed_bytes = read.fixed_memory * KIB
    for field, length in (("memory", len(read.memory)), ("parents", len(read.parents))):
        if length != len(read.cost):
            raise FormatError(f"{source}: {field} has {length} entries for the {len(read.cost)} in cost: must be one per op")
    if read.loss >= len(read.cost):
        refuse(source, "loss", read.loss, f"the index of one of the {len(read.cost)} ops")
    # Tensor i + 1 is the output of op i.
    tensors = [Tensor(0, "fixed_memory", fixed_bytes, (), Kind.PARAMETER)]
    ops = []
    for i, (time, size, parents) in enumerate(zip(read.cost, read.memory, read.parents, strict=True)):
        if max(parents, default=-1) >= i:
            refuse(source, f"parents[{i}]", parents, f"ops before it, below {i}" if i else "empty: the first op reads nothing")
        tensors.append(Tensor(i + 1, f"t{i}", size * KIB, (i,)))
        ops.append(
            Op(
                id=i,
                name="loss" if i == read.loss else f"op{i}",
                target="checkmate",
                inputs=tuple(dict.fromkeys(t + 1 for t in parents)),
                outputs=(i + 1,),
                time_s=time / UNITS_PER_S,
                phase=Phase.FORWARD if i <= read.loss else Phase.BACKWARD,
            )
        )
    provenance: dict[str, object] = {
        "imported": "Checkmate instance",
        "model": name if read.name is UNSET else read.name,
        "reference": [
            {
                "solver": "gurobi",
                "budget_bytes": row.budget * KIB + fixed_bytes,
                "time_s": row.gurobi_cost / UNITS_PER_S,
                "seconds": row.gurobi_seconds,
                "solved": row.gurobi_seconds < UNSOLVED_S,
            }
            for row in read.reference
        ],
    }
    return Graph(tuple(ops), tuple(tensors), frozenset(), Provenance.of(provenance))
