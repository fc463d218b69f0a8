"""The programs, each a list of families of rows. docs/formulation.md proves the rows.

Ops are numbered in program order, which is the order of their first executions. Windows split them into runs; op e_k is the last
one of window k. Window k lasts from the end of the first execution of e_(k-1) to the end of that of e_k. With an op per window
this is Checkmate's formulation (Jain et al., MLSys 2020); with fewer windows it is smaller, and its optimum is still a lower
bound.

Objective: minimise the sum of c_i over R and Q, plus the waits of the compute stream, plus the time of other devices after its
end.
"""

from collections.abc import Callable
from functools import partial

from planner.solvers.problem import Problem
from planner.solvers.windows.relaxation.availability import (
    add_beginnings_of_circles,
    add_hand_over,
    add_inputs_of_new,
    add_inputs_of_recomputed,
)
from planner.solvers.windows.relaxation.devices import add_kept, add_makespan, add_memory_elsewhere
from planner.solvers.windows.relaxation.discretization import Discretization, Model
from planner.solvers.windows.relaxation.draft import Family, ModelDraft
from planner.solvers.windows.relaxation.executed import add_executed_at_all
from planner.solvers.windows.relaxation.memory import add_memory_at_end, add_memory_inside, add_memory_of_recomputations
from planner.solvers.windows.relaxation.merged_windows import add_merged_windows
from planner.solvers.windows.relaxation.resources import add_resources
from planner.solvers.windows.relaxation.transfers import add_channels, add_offloads
from planner.solvers.windows.relaxation.variables import list_ops, write_variables


def build_relaxation(problem: Problem, discretization: Discretization, should_stop: Callable[[], bool] | None = None) -> Model:
    """Build the relaxation of all schedules of `problem`: rows 1 to 21, as far as `discretization` requests them.

    Raises:
        BuildStoppedError: `should_stop`, which is polled, returned True.
    """
    return compose(
        ModelDraft(problem, discretization, should_stop=should_stop),
        partial(write_variables, list_ops),
        add_offloads,
        write_window_rows,
        add_merged_windows,
        add_memory_inside,
        add_memory_of_recomputations,
        add_channels,
        add_executed_at_all,
        add_resources,
        add_makespan,
    )


def compose(draft: ModelDraft, *families: Family) -> Model:
    """Build the model with these families of rows."""
    for add in families:
        add(draft)
    return draft.model()


def write_window_rows(draft: ModelDraft) -> None:
    """Write rows 1 to 5 of every program, and 16 and 17 with other devices, window by window."""
    for k in range(draft.windows):
        for add in (
            *(add_inputs_of_new, add_inputs_of_recomputed, add_beginnings_of_circles, add_hand_over, add_kept),
            *(add_memory_at_end, add_memory_elsewhere),
        ):
            add(draft, k)
