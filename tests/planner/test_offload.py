"""The option offload, from what a user says to a plan in a file."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from planner import solve
from planner.capture.options import apply_options
from planner.graphs.errors import BudgetError, GraphError, InfeasibleError, MismatchError
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.pools import HOST
from planner.graphs.provenance import Provenance
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.plans.document import write_plan
from planner.plans.plan import read_plan
from planner.plans.plan_check import check_plan, check_sizes, check_with_its_graph
from planner.settings.link import MEASURED_LINK, LinkProfile, LinkRates
from planner.settings.option_settings import LINK, RECOMPUTATION, KnownLink, LinkSource, build_option_settings
from planner.show.facts.graph import collect_graph_facts
from planner.solvers.order.reorder import find_order
from planner.solvers.result import SolveSettings
from tests.support.cli import call, refused

GB = 10**9


@pytest.fixture(scope="module")
def step() -> Graph:
    return draw_training_step(5, 30)


def once(graph: Graph) -> Graph:
    """The same step where no op may run again: memory is won by the host alone."""
    ops = tuple(replace(op, recomputable=False) for op in graph.ops)
    return Graph(ops, graph.tensors, graph.kept, graph.provenance)


@pytest.mark.slow
def test_a_plan_with_both_is_faster_than_with_either(step: Graph) -> None:
    recomputing = solve(step, "40%", work_limit=4)
    both = solve(step, "40%", options=["offload"], link=10e9, host_budget=GB * 64, work_limit=4)
    sending = solve(once(step), "40%", options=["offload"], link=10e9, host_budget=GB * 64, work_limit=4)
    assert both.time_s < min(recomputing.time_s, sending.time_s)
    assert both.copied and both.recomputed and not recomputing.copied
    assert sending.recomputed == 0 < recomputing.recomputed
    assert both.bound_s <= both.time_s
    offered = apply_options(step, ["offload"], Surroundings(Link.even(10e9), GB * 64))
    simulation = check_plan(offered, both)
    assert simulation.peak_bytes == both.peak_bytes <= both.budget_bytes
    assert both.pool_peaks_bytes == {HOST: simulation.pool_peaks_bytes[1]}
    assert 0 < both.pool_peaks_bytes[HOST] <= GB * 64
    assert (both.graph.ops, both.graph.tensors) == (len(step.ops), len(step.tensors))
    assert both.graph.optional_ops == 2 * both.graph.optional_tensors == len(offered.ops) - len(step.ops)
    assert both.settings["options"] == ["offload"]
    assert (
        both.settings["link"] == {**asdict(Link.even(10e9)), "source": "given"} and both.settings["host_budget_bytes"] == GB * 64
    )


def test_graph_with_offload_options_is_solved_unchanged(step: Graph) -> None:
    offered = apply_options(step, ["offload"], Surroundings(Link.even(50e9)))
    plan = solve(offered, "60%", work_limit=2)
    assert plan.copied
    check_plan(offered, plan)


@pytest.mark.slow
def test_a_slower_link_is_worse(step: Graph) -> None:
    times = [solve(step, "60%", options=["offload"], link=f"{rate}GB/s", work_limit=4).time_s for rate in (50, 10, 1)]
    assert times[0] <= times[1] * 1.005 and times[1] < times[2]


@pytest.mark.slow
def test_a_host_without_room_is_none(step: Graph) -> None:
    plan = solve(step, "60%", options=["offload"], link=50e9, host_budget=0, work_limit=2)
    assert plan.copied == 0 and plan.pool_peaks_bytes == {HOST: 0}
    little = solve(step, "60%", options=["offload"], link=50e9, host_budget=10**8, work_limit=2)
    assert little.pool_peaks_bytes[HOST] <= 10**8


def test_the_same_work_gives_the_same_plan(step: Graph) -> None:
    plans = [solve(step, "60%", options=["offload"], link=50e9, host_budget=GB, work_limit=2) for _ in range(2)]
    assert plans[0].schedule == plans[1].schedule and plans[0].bound_s == plans[1].bound_s


def test_budget_below_every_schedule_is_proved_infeasible(step: Graph) -> None:
    with pytest.raises(InfeasibleError, match="least any schedule of this graph"):
        solve(step, "1%", options=["offload"])


@pytest.mark.slow
def test_infeasible_budget_error_names_the_budget_with_offload(step: Graph) -> None:
    single = once(step)
    least = collect_graph_facts(single).least_budget_offload_found_bytes
    with pytest.raises(
        InfeasibleError, match=r"With the option offload a schedule is known for ([\d.]+ .?B), with .* on the host"
    ):
        solve(single, least)
    plan = solve(single, least, options=["offload"], link=1e9, host_budget=GB * 64, work_limit=4)
    assert plan.peak_bytes <= least
    with pytest.raises(InfeasibleError, match=r"A schedule is known for") as refused:
        solve(single, "1%", options=["offload"], link=1e9, host_budget=GB * 64)
    assert "option offload" not in str(refused.value)


def test_reordering_keeps_optional_ops(step: Graph) -> None:
    offered = apply_options(step, ["offload"], Surroundings(Link.even(1e9)))
    order = find_order(offered)
    n = len(step.ops)
    assert order.original[:n] == find_order(step).original and order.original[n:] == tuple(range(n, len(offered.ops)))
    assert order.graph.ops[n:] == offered.ops[n:] and order.graph.pools == offered.pools


def test_facts_have_the_least_budget_with_and_without(step: Graph) -> None:
    facts = collect_graph_facts(once(step))
    assert facts.least_budget_offload_bytes <= facts.least_budget_offload_found_bytes < facts.least_budget_bytes
    assert facts.least_budget_bytes <= facts.least_budget_found_bytes and facts.least_budget_offload_host_bytes > 0
    offered = apply_options(once(step), ["offload"], Surroundings(Link.even(1e9)))
    assert replace(collect_graph_facts(offered), summary=facts.summary) == facts


def test_defaults_are_half_of_the_free_memory_and_a_modest_link() -> None:
    options = build_option_settings(["offload"])
    assert options.host_bytes == pytest.approx(psutil.virtual_memory().available / 2, rel=0.1)
    assert options.link(Provenance()) == KnownLink(Link.even(25e9), LinkSource.DEFAULT) and LINK == "25GB/s"
    assert build_option_settings([]) == RECOMPUTATION and not RECOMPUTATION.as_json


def test_given_link_precedes_measured_and_published_links() -> None:
    rates = LinkRates(20e9, 30e9, 19e9)
    measured = LinkProfile(rates, rates, 2e-5)
    there = Provenance.of({"device": "NVIDIA H100 80GB HBM3", MEASURED_LINK: measured.recorded})
    given, found = build_option_settings(["offload"], "50GB/s"), build_option_settings(["offload"])
    assert given.link(there) == KnownLink(Link.even(50e9), LinkSource.GIVEN)
    assert found.link(there) == KnownLink(Link(20e9, 30e9, 2e-5), LinkSource.MEASURED)
    there = there.remove(MEASURED_LINK)
    assert found.link(there) == KnownLink(Link.even(25.6e9, 1e-5), LinkSource.PUBLISHED)
    assert found.link(Provenance.of({"device": "a card of tomorrow"})).source is LinkSource.DEFAULT


def test_the_link_of_a_graph_is_used_said_and_checked(step: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = LinkRates(20e9, 30e9, 10e9)
    link = LinkProfile(rates, rates, 2e-5)
    graph_file, plan_file = tmp_path / "model.json", tmp_path / "plan.json"
    write_graph(replace(step, provenance={MEASURED_LINK: link.recorded}), graph_file)
    assert "20.00 GB/s out, 30.00 GB/s in, 10.00 GB/s each at once beside the step" in call(capsys, "info", graph_file).out
    asked = ("--budget", "60%", "--options", "offload", "--work-limit", "2", "--quiet")
    said = call(capsys, "solve", graph_file, *asked, "-o", plan_file)
    line = "10.00 GB/s each way, 20 us a transfer, measured"  # both directions at once are slower, and share a figure
    assert said.code == 0 and line in said.out and line in call(capsys, "info", plan_file).out
    assert read_plan(plan_file).settings["link"] == {**asdict(link.link), "source": "measured"}
    for wrong in (
        "fast",
        {"alone": 1},
        {**link.recorded, "latency_s": -1.0},
        {**link.recorded, "alone": {**asdict(rates), "in_bytes_per_s": 0}},
    ):
        write_graph(replace(step, provenance={MEASURED_LINK: wrong}), graph_file)
        refused(call(capsys, "solve", graph_file, *asked), 1, "its link to the host in a way that no trace does")
        refused(call(capsys, "info", graph_file), 1, "--link 25GB/s")
    assert call(capsys, "solve", graph_file, *asked, "--link", "25GB/s").code == 0


def test_invalid_options_and_links_raise(step: Graph) -> None:
    for link in ("25GB", "25/s", "50%/s", "fast"):
        with pytest.raises(BudgetError, match=r"25GB|unit"):
            solve(step, "60%", options=["offload"], link=link)
    with pytest.raises(GraphError, match="must be above 0"):
        solve(step, "60%", options=["offload"], link=0)


def test_the_command_writes_a_plan_that_is_read_and_checked(
    step: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph_file, plan_file = tmp_path / "model.json", tmp_path / "plan.json"
    write_graph(step, graph_file)
    asked = ("--options", "offload", "--link", "50GB/s", "--host-budget", "1GB", "--work-limit", "2", "--quiet")
    said = call(capsys, "solve", graph_file, "--budget", "60%", *asked, "-o", plan_file)
    assert said.code == 0 and " copies" in said.out and "host memory" in said.out
    plan = read_plan(plan_file)
    assert plan.copied and plan.settings["host_budget_bytes"] == GB
    data = json.loads(call(capsys, "info", plan_file, "--json").out)
    assert (data["copied"], data["recomputed"], data["pool_peaks_bytes"]) == (plan.copied, plan.recomputed, plan.pool_peaks_bytes)
    assert "with offload" in call(capsys, "info", graph_file).out
    # Edited figures and settings are found out: the graph in the file is given what the settings say.
    write_plan(replace(plan, pool_peaks_bytes={HOST: 1}), plan_file)
    refused(call(capsys, "info", plan_file), 1, "other pools")
    with pytest.raises(MismatchError, match="no solve records"):
        check_with_its_graph(replace(plan, settings=SolveSettings(options={**plan.settings.options, "link": "fast"})), plan_file)
    for name, value in (("link", {**asdict(Link.even(1.0)), "source": "heard"}), ("link", {}), ("host_budget_bytes", "all")):
        write_plan(replace(plan, settings=SolveSettings(options={**plan.settings.options, name: value})), plan_file)
        refused(call(capsys, "info", plan_file), 1, "no solve records")


def test_offload_plans_are_checked_before_they_run(step: Graph) -> None:
    plan = solve(step, "60%", options=["offload"], link=50e9, work_limit=2)
    check_sizes(step, plan)
    for wrong, why in (
        (replace(plan, pool_peaks_bytes={HOST: 1}), "in other pools"),
        (replace(plan, peak_bytes=plan.peak_bytes // 2), "a peak of"),
        (replace(plan, settings=SolveSettings()), "the plan is for another graph"),
    ):
        with pytest.raises(MismatchError, match=why):
            check_sizes(step, wrong)
