"""The idea of the planner in one file: the fastest order of recomputation within a budget of memory, and the proof of it.

    python examples/tiny_planner.py        # a chain of six layers within 4 bytes
    python examples/tiny_planner.py 5      # within 5

A training step is a list of ops in program order. Op i reads results of earlier ops and makes one result, also called i. What
``planner solve`` has beyond this file: ops with several outputs and workspaces, windows instead of all stages, so that
thousands of ops are solved in seconds, and real memory, real kernels and a training loop around it.

The program is Checkmate's (Jain et al., MLSys 2020), which cuts a schedule into stages: stage t ends with the first run of op t,
and before it any earlier ops may run again, in program order. Checkmate follows the memory op by op with products of variables;
here a variable says whether result i is in memory while op k of stage t runs, which needs no products. Two things are weak: its
size, n * n * n / 2 of these variables for n ops, and that an op runs at most once in a stage, so that at the tightest budgets of
few graphs it finds no schedule where there is one (8 of 784 random cases; in the others it has the optimum).
"""

import sys
from typing import NamedTuple

import highspy


class Op(NamedTuple):
    """An op: its name, the numbers of the ops whose results it reads, its seconds, and the bytes of its result."""

    name: str
    reads: tuple[int, ...]
    time_s: float
    size_bytes: int


# Six layers: f1 to f6 forward, g6 to g1 backward; g of a layer reads the gradient above it and the result below the layer.
CHAIN = [
    Op("f1", (), 1, 1),
    *(Op(f"f{i + 1}", (i - 1,), 1, 1) for i in range(1, 6)),
    Op("g6", (4, 5), 1, 1),
    *(Op(f"g{i}", (i - 2, 12 - i - 1), 1, 1) for i in range(5, 1, -1)),
    Op("g1", (10,), 1, 1),
]


def solve(ops: list[Op], budget_bytes: int) -> tuple[list[int], float] | None:
    """Return the ops of the fastest schedule within the budget, in the order in which they run, and a lower bound of its time.

    None if no schedule fits. The last op's result is kept, as a loss or a gradient is.
    """
    program, last = highspy.Highs(), len(ops) - 1
    program.setOptionValue("output_flag", False)
    stages = range(len(ops))
    readers = {i: [k for k, op in enumerate(ops) if i in op.reads] for i in stages}
    # runs[t, i]: op i runs in stage t. kept[t, i]: result i is in memory when stage t begins, or, for t = n, at the end.
    runs = {(t, i): program.addBinary() for t in stages for i in range(t + 1)}
    kept = {(t, i): program.addBinary() for t in range(1, len(ops) + 1) for i in range(t)}
    for t in stages:
        program.addConstr(runs[t, t] == 1)
        for i in range(t + 1):
            there = [kept[t, i]] if i < t else []
            program.addConstr(kept[t + 1, i] <= sum(there, runs[t, i] + 0))  # kept from before, or made in this stage
            for j in ops[i].reads:
                program.addConstr(runs[t, i] <= runs[t, j] + kept[t, j])
        for k in range(t + 1):  # the memory while op k runs in stage t
            held = {i: program.addVariable(0, 1) for i in range(t + 1)}
            for i in range(t + 1):
                if i < k:  # made or kept before k, and read from k on, or kept for the next stage
                    needs = [runs[t, m] for m in readers[i] if k <= m <= t] + [kept[t + 1, i]]
                elif i == k:  # the result of k itself
                    needs = [runs[t, k]] + ([kept[t, k]] if k < t else [])
                else:  # it can only be there from the stages before
                    needs = [kept[t, i]] if i < t else []
                for need in needs:
                    program.addConstr(held[i] >= need)
            program.addConstr(sum((ops[i].size_bytes * held[i] for i in held), 0 * runs[t, t]) <= budget_bytes)
    program.addConstr(kept[len(ops), last] == 1)
    program.minimize(sum((ops[i].time_s * run for (_, i), run in runs.items()), 0 * runs[0, 0]))
    if program.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    order = [i for (_, i), run in runs.items() if program.val(run) > 0.5]  # by stages, and in them in program order
    return order, program.getInfo().mip_dual_bound


def judge(ops: list[Op], order: list[int]) -> tuple[float, int, list[str]]:
    """Return the time and the peak of running the ops in this order, and a line for each run, with the results in memory.

    It knows nothing of the program: a result is freed after its last read before it is made again, or before the end.

    Raises:
        ValueError: an op reads what is not in memory.
    """
    memory: set[int] = set()
    peak_bytes, lines, done = 0, [], set[int]()
    for position, i in enumerate(order):
        if missing := [ops[j].name for j in ops[i].reads if j not in memory]:
            raise ValueError(f"op {ops[i].name} reads {', '.join(missing)}, which is not in memory")
        memory.add(i)
        peak_bytes = max(peak_bytes, sum(ops[j].size_bytes for j in memory))
        lines.append(f"{ops[i].name}{'*' if i in done else ' '}  {' '.join(ops[j].name for j in sorted(memory))}")
        done.add(i)
        later = order[position + 1 :]
        for j in sorted(memory):
            until_made_again = later[: later.index(j)] if j in later else later
            if not any(j in ops[k].reads for k in until_made_again) and (j in later or j != len(ops) - 1):
                memory.remove(j)
    return sum(ops[i].time_s for i in order), peak_bytes, lines


def main() -> None:
    """Solve the chain for the budget on the command line, and print the schedule."""
    budget_bytes = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    if (solution := solve(CHAIN, budget_bytes)) is None:
        raise SystemExit(f"no schedule of the chain fits into {budget_bytes} bytes")
    order, bound_s = solution
    time_s, peak_bytes, lines = judge(CHAIN, order)
    print("op   in memory (* recomputed)", *lines, sep="\n")
    keep_s = sum(op.time_s for op in CHAIN)
    print(f"\n{peak_bytes} of {budget_bytes} bytes, {time_s:g} s; no schedule within them takes less than {bound_s:g} s")
    print(f"keeping everything takes {keep_s:g} s")


if __name__ == "__main__":
    main()
