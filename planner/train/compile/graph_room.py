"""Plans that leave room for the overhead of CUDA graph pools, predicted before anything is recorded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from planner.graphs.allocators.caching import Rules
from planner.graphs.errors import InfeasibleError
from planner.graphs.ir import Graph
from planner.graphs.options import remove_options
from planner.graphs.schedule import keep_everything
from planner.graphs.units import format_bytes, format_enough
from planner.memory.fit import Bracket, fit
from planner.memory.reserved import get_rules, predict_eager_bytes, predict_reserved_with_graphs
from planner.plans.plan import Plan
from planner.runtime.cuda.graph_pool import compute_pool_bytes
from planner.settings.budget import Budget, Bytes
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import apply_recorded_options

_TRIES = 6  # solves: segments are coarse, so a plan with a lower peak may keep the same memory


@dataclass(frozen=True, slots=True)
class GraphBudget:
    """A budget of a step that is replayed as CUDA graphs.

    Attributes:
        memory: kind of memory that the budget counts.
        eager_bytes: bytes of that memory that plain eager PyTorch needs.
        beside_bytes: part of the budget for memory besides static memory and the graphs' pool; the same for every schedule.
    """

    budget_bytes: int
    memory: CountedMemory
    eager_bytes: int
    beside_bytes: int

    @staticmethod
    def of(graph: Graph, budget: Budget, memory: CountedMemory) -> "GraphBudget":
        """Return a budget of reserved memory for `graph`, with its copies as static memory (``runtime.cuda.graphed_step``)."""
        whole_bytes = predict_eager_bytes(graph, memory)
        budget_bytes = budget.resolve(whole_bytes)
        outside_bytes = predict_reserved_with_graphs(graph, keep_everything(remove_options(graph)), memory, 0, 0).device_bytes
        if budget_bytes <= outside_bytes:
            raise InfeasibleError(
                f"budget {format_bytes(budget_bytes)} is no more than the {format_bytes(outside_bytes)} that are reserved "
                "outside of the pool of CUDA graphs, whatever the plan: static memory, copies of results and gradients, "
                "workspaces of libraries and temporaries of the optimizer. Raise the budget, or let it count only what tensors "
                f"take and the pool (memory={CountedMemory.ALLOCATED.value!r})"
            )
        return GraphBudget(budget_bytes, memory, whole_bytes, outside_bytes - graph.static_bytes)

    def explain(self, error: InfeasibleError) -> InfeasibleError:
        """Return `error`, of a solve for the allocated part, with the use of the rest of the budget added to its message."""
        rest = f"{format_bytes(self.beside_bytes)} are reserved beside the step, outside of the pool of CUDA graphs"
        return InfeasibleError(f"{error} Of the budget of {format_bytes(self.budget_bytes)}, {rest}")

    @property
    def allocated_bytes(self) -> int:
        """The part of the budget for static memory and the pool."""
        return self.budget_bytes - self.beside_bytes

    def plan_of(self, graph: Graph, plan: Plan, pool_bytes: int) -> Plan:
        """Return `plan`, solved for allocated bytes of `graph`, as one for this budget, replayed with a pool of `pool_bytes`."""
        if plan.reserved is None:
            return plan
        offered = apply_recorded_options(graph, plan.settings)
        reserved = predict_reserved_with_graphs(offered, plan.schedule, self.memory, self.eager_bytes, pool_bytes)
        return replace(plan, memory=self.memory, budget_bytes=self.budget_bytes, reserved=reserved)


def make_room_for_pool(
    graph: Graph, plan: Plan, libraries: Sequence[int], budget: GraphBudget, solve: Callable[[Bytes], Plan]
) -> Plan:
    """Return `plan`, or one whose tensors and pool together are within the budget of `plan`.

    Args:
        libraries: bytes of each workspace of libraries in the pool (``compute_pool_bytes``).
        budget: whose allocated part is the budget of `plan`.
        solve: solves `graph` for a budget of allocated bytes.

    Raises:
        InfeasibleError: none is found; with the budget that has room for the closest plan.
    """
    measure = partial(_count_kept_bytes, graph, libraries, get_rules(budget.memory))
    bracket = Bracket(plan.budget_bytes, graph.static_bytes)
    closest, closest_bytes = fit(plan, solve, measure, bracket, allocated=attrgetter("peak_bytes"), tries=_TRIES)
    if closest_bytes <= plan.budget_bytes:
        return closest
    pool, tensors = closest_bytes - graph.static_bytes, closest.peak_bytes - graph.static_bytes
    raise InfeasibleError(
        f"a CUDA graph keeps {format_bytes(pool)} for {format_bytes(tensors)} of tensors: whole segments of 2 or 20 MiB, and "
        f"{format_bytes(sum(libraries))} that libraries work in. With {format_bytes(graph.static_bytes + budget.beside_bytes)} "
        f"outside of it that is over the budget of {format_bytes(budget.budget_bytes)}, and no plan is found that keeps less: "
        f"raise the budget to {format_enough(closest_bytes + budget.beside_bytes)}, or leave out cuda_graph=True"
    )


def _count_kept_bytes(graph: Graph, libraries: Sequence[int], rules: Rules, plan: Plan) -> int:
    """Return the static memory that remains allocated once `plan` is recorded."""
    return graph.static_bytes + compute_pool_bytes(apply_recorded_options(graph, plan.settings), plan.schedule, libraries, rules)
