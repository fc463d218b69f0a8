"""Summaries of graphs, by which a plan recognizes its own. Never imports torch."""

from planner.graphs.checks import check_sums
from planner.graphs.errors import MismatchError
from planner.graphs.ir import Graph
from planner.graphs.options import extract_eager_program
from planner.graphs.schedule import keep_everything
from planner.graphs.simulate import Simulation, simulate
from planner.plans.record import GraphSummary


def summarize(graph: Graph) -> GraphSummary:
    """Return the summary of a graph for its plans: its program as eager PyTorch runs it, without options.

    Raises:
        GraphError: its sizes or times sum to more than can be counted.
    """
    check_sums(graph)
    program = extract_eager_program(graph)
    whole = simulate(program, keep_everything(program))
    return GraphSummary(
        fingerprint=graph.fingerprint,
        ops=len(program.ops),
        tensors=len(program.tensors),
        static_bytes=graph.static_bytes,
        keep_everything_peak_bytes=whole.peak_bytes,
        time_s=graph.time_s,
        provenance=graph.provenance,
        optional_ops=len(graph.ops) - len(program.ops),
        optional_tensors=len(graph.tensors) - len(program.tensors),
        step_s=get_step_time(graph, whole),
        around_s=graph.around_s,
    )


def check_same_graph(planned: GraphSummary, found: GraphSummary) -> None:
    """Raise a MismatchError, with what differs, if a plan is for another graph."""
    if planned.fingerprint == found.fingerprint:
        return
    described = ("model", "inputs", "parameters", "parameter_dtype", "device", "torch")
    pairs = [(key, planned.provenance.get(key), found.provenance.get(key)) for key in described]
    pairs += [("ops", planned.ops, found.ops), ("tensors", planned.tensors, found.tensors)]
    differences = [f"{what} {wanted} there, {given} here" for what, wanted, given in pairs if wanted != given]
    raise MismatchError(
        f"the plan is for another graph ({planned.fingerprint[:12]}, here {found.fingerprint[:12]}): "
        f"{'; '.join(differences) or 'sizes or kinds of ops differ'}; trace and solve for this model, batch and device"
    )


def get_step_time(graph: Graph, simulation: Simulation) -> float | None:
    """Return the seconds of a step with the host's times; None if these are not known."""
    return simulation.step_s if graph.has_host_times or graph.around_s else None


def get_other_peaks(graph: Graph, simulation: Simulation) -> dict[str, int]:
    """Return the peak bytes of the pools other than the device, by the `simulation` of a schedule."""
    return {pool.name: peak for pool, peak in zip(graph.pools[1:], simulation.pool_peaks_bytes[1:], strict=True)}
