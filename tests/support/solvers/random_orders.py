"""Random orders of executions, and programs with all their rows to try them on."""

import random

from planner.graphs.ir import Graph
from planner.solvers.clock import WallClock
from planner.solvers.highs import solve_program
from planner.solvers.highs.program import Answer
from planner.solvers.problem import Problem
from planner.solvers.windows.decoding.expand import Solution
from planner.solvers.windows.relaxation.discretization import Discretization, Model


def random_order(draw: random.Random, problem: Problem) -> list[int]:
    """Program order, with executions of earlier ops thrown in that may run again."""
    computed: list[int] = []
    for v in range(problem.ops):
        recomputable = [i for i in range(v) if problem.graph.ops[i].recomputable and problem.recompute_before[i] >= v]
        chosen = [i for i in recomputable if draw.random() < 0.5]
        if draw.random() < 0.3:
            chosen += draw.choices(recomputable, k=min(2, len(recomputable)))
            draw.shuffle(chosen)
        computed += [*chosen, v]
    return computed


def short_form(graph: Graph, computed: list[int]) -> list[int]:
    """Rules 1 and 2 of the page, for as long as they leave something out."""
    while (position := unnecessary(graph, computed)) is not None:
        computed = computed[:position] + computed[position + 1 :]
    return computed


def unnecessary(graph: Graph, computed: list[int]) -> int | None:
    for position, op in enumerate(computed):
        after = computed[position + 1 :]
        until = after[: after.index(op)] if op in after else after
        outputs = set(graph.ops[op].outputs)
        read = outputs & {t for reader in until for t in graph.ops[reader].inputs}
        if op in computed[:position]:
            if not read - graph.kept:
                return position
        elif op in after and not read and set(until) <= set(computed[:position]):
            return position
    return None


def everything(ends: tuple[int, ...]) -> Discretization:
    """Windows with all the rows there are."""
    ops = ends[-1] + 1
    recomputations = frozenset((end, x) for end in ends for x in range(end))
    return Discretization(ends, frozenset(range(ops)), recomputations)


def solve_with_choices(model: Model, solution: Solution) -> Answer:
    """Solve a model whose R, Q and S, and reloads, are those of `solution`: what is left are H and U."""
    program = model.program
    for columns, chosen in (
        (model.recomputed, solution.recomputed),
        (model.handed, solution.handed),
        (model.taken, solution.taken),
    ):
        for (k, i), column in columns.items():
            program.lower[column] = program.upper[column] = i in chosen[k]
    return solve_program(program, clock=WallClock(60))
