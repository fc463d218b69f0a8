"""POET (Patil et al., ICML 2022): recomputation and paging by one program, in which paging takes energy and no time.

The program (``poet_program``) is solved by HiGHS. Published to minimise energy: computing costs its time and copying its time at
another power, of which a few are tried, the time for the step being no limit. What it decides is then carried out in time:
what is copied in during a stage is asked for when the stage has ended, what is copied out leaves from the beginning of its stage,
and the computation waits where memory or a tensor is wanted before its copy is done. The fastest is taken.

The program grows with the square of the ops: larger graphs are not tried.
"""

from dataclasses import asdict, dataclass

from graphs.schedule import Schedule
from solvers import highs
from solvers.clock import left
from solvers.highs.program import Floats, Outcome, Watch
from solvers.policies.offload.device import Device
from solvers.policies.offload.moves import Offer, offer_of, offloading_answer
from solvers.policies.offload.poet_program import MOST_COLUMNS, PoetProgram
from solvers.policies.replay import Candidate, answer, failure
from solvers.request import Request
from solvers.result import Reason, Result


@dataclass(frozen=True, slots=True)
class PoetParams:
    """What is tried.

    Attributes:
        powers: of copying, as parts of that of computing; the time is shared among them.
    """

    powers: tuple[float, ...] = (1.0, 0.1)


def solve(request: Request) -> Result:
    """As ``solvers.registry.Solver``; LIMIT when the program is too large, infeasible, or finds nothing in time.

    The parameters are ``PoetParams``.
    """
    params = request.params_of(PoetParams())
    offer = offer_of(request.graph)
    if offer is None:
        return offloading_answer(request, "poet", lambda _: (), what="POET", settings=asdict(params))
    trials: list[Candidate] = []
    for place, power in enumerate(params.powers):
        model = PoetProgram(offer, request.budget_bytes, power)
        program = model.build()
        if program is None:
            why = f"POET's program for {model.stages:,} ops has more than {MOST_COLUMNS:,} variables: use the solver windows"
            return failure(request, "poet", why, Reason.SIZE, settings=asdict(params))
        found = highs.solve_program(
            program,
            clock=request.clock.part(left(request.clock) / (len(params.powers) - place)),
            absolute_gap=request.tolerance.first * offer.program.time_s / model.time_unit,
            watch=Watch(should_stop=request.interrupted, interrupted=request.interrupted),
        )
        if found.values is not None:
            trials.append(Candidate(carried_out(model, found.values, request.budget_bytes), {"power": power}))
        elif found.outcome is Outcome.INFEASIBLE:
            why = "POET's program is infeasible at this budget: raise the budget, or use the solver windows"
            return failure(request, "poet", why, Reason.MEMORY, settings=asdict(params))
    if not trials:
        why = f"POET's program found nothing within {request.clock.amount(request.clock.limit)}: raise the time limit"
        return failure(request, "poet", why, Reason.TIME, settings=asdict(params))
    return answer(request, "poet", trials, what="POET", settings=asdict(params))


def carried_out(model: PoetProgram, values: Floats, budget_bytes: int) -> Schedule:
    """The steps of a solution."""
    offer: Offer = model.offer
    graph, device = offer.program, Device(offer, budget_bytes)

    def stays(t: int, x: int) -> bool:
        column = model.s(t, x)
        return column is not None and values[column] > 0.5

    def chosen(columns: dict[tuple[int, int], int], t: int) -> list[int]:
        return [x for (stage, x), column in columns.items() if stage == t and values[column] > 0.5]

    def let_go(x: int) -> None:
        if x in device.host:
            device.send(x)
        else:
            device.free(x)

    for t in range(model.stages):
        for x in chosen(model.fetched, t - 1):
            if stays(t, x) and x in device.host and x not in device.live:
                device.make_room(offer.size_bytes(x))
                device.fetch(x)
            device.recall(x)
        for x in chosen(model.sent, t):
            if device.can_send(x):
                device.send(x)
                device.recall(x)
        executed = [*sorted(chosen(model.R, t)), t]
        for place, i in enumerate(executed):
            op = graph.ops[i]
            for x in (*op.inputs, *op.outputs):
                device.recall(x)
            device.make_room(sum(map(offer.size_bytes, op.outputs)) + op.workspace_bytes)
            device.compute(i)
            wanted = {x for j in executed[place + 1 :] for x in graph.ops[j].inputs}
            for x in (*op.inputs, *op.outputs):
                over = not graph.tensors[x].static and x not in graph.kept and x not in wanted and not stays(t + 1, x)
                if over and x in device.live:
                    let_go(x)
        for x in sorted(device.live):
            if device.has(x) and x not in graph.kept and not stays(t + 1, x):
                let_go(x)
    return device.schedule
