"""Profiled training graphs with the costs that a commercial solver reached on Checkmate's program.

Every op has one output and nothing must be in memory at the end. Times are in units of 0.01 ms, sizes in
KiB; the budgets of the reference results leave out the fixed memory.
"""

from collections.abc import Mapping

from graphs.errors import FormatError
from graphs.io.fields import Fields
from graphs.ir import Graph, Kind, Op, Phase, Tensor

KIB = 1024
UNITS_PER_S = 100_000  # a unit of time is 0.01 ms
UNSOLVED_S = 86_400  # a reference solve that took this long had not ended


def graph_from(data: Mapping[str, object], *, source: str, name: str) -> Graph:
    """The graph in `data`, whose ops up to the loss are the forward.

    The provenance lists the `reference` results with budgets that include the fixed memory (``budget_bytes``),
    the time reached (``time_s``), what that took (``seconds``), and whether it was proved optimal (``solved``).

    Raises:
        FormatError: a field is missing or wrong.
    """
    fields = Fields(data, source=source, path="")
    times, sizes = fields.integers("cost"), fields.integers("memory")
    parents, loss = fields.array("parents"), fields.integer("loss")
    fixed_bytes = fields.integer("fixed_memory") * KIB
    for field, length in (("memory", len(sizes)), ("parents", len(parents))):
        if length != len(times):
            raise FormatError(f"{source}: {field} has {length} entries for the {len(times)} in cost: must be one per op")
    if loss >= len(times):
        fields.refuse("loss", f"the index of one of the {len(times)} ops")
    # Tensor i + 1 is the output of op i.
    tensors = [Tensor(0, "fixed_memory", fixed_bytes, (), Kind.PARAMETER)]
    ops = []
    for i, time in enumerate(times):
        row = Fields({"parents": parents[i]}, source=source, path=f"op {i}")
        read = row.integers("parents", below=i) if i else ()
        if i == 0 and parents[0] != []:
            row.refuse("parents", "empty: the first op reads nothing")
        tensors.append(Tensor(i + 1, f"t{i}", sizes[i] * KIB, (i,)))
        ops.append(
            Op(
                id=i,
                name="loss" if i == loss else f"op{i}",
                target="checkmate",
                inputs=tuple(dict.fromkeys(t + 1 for t in read)),
                outputs=(i + 1,),
                time_s=time / UNITS_PER_S,
                phase=Phase.FORWARD if i <= loss else Phase.BACKWARD,
            )
        )
    provenance: dict[str, object] = {
        "imported": "Checkmate instance",
        "model": fields.string("name") if "name" in fields else name,
        "reference": _references(fields, source, fixed_bytes),
    }
    return Graph(tuple(ops), tuple(tensors), frozenset(), provenance)


def _references(fields: Fields, source: str, fixed_bytes: int) -> list[object]:
    if "reference" not in fields:
        return []
    results: list[object] = []
    for i, entry in enumerate(fields.array("reference")):
        row = Fields(entry, source=source, path=f"reference[{i}]")
        seconds = row.number("gurobi_seconds")
        results.append(
            {
                "solver": "gurobi",
                "budget_bytes": row.integer("budget") * KIB + fixed_bytes,
                "time_s": row.integer("gurobi_cost") / UNITS_PER_S,
                "seconds": seconds,
                "solved": seconds < UNSOLVED_S,
            }
        )
    return results
