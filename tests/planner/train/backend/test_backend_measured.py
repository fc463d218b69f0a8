"""Under ``torch.compile(model, backend="planner")`` the budget holds, measured: one graph, several, and a second model."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.graphs.errors import InfeasibleError, PlannerError
from planner.graphs.schedule import count_kept_bytes, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.measure import profile
from planner.memory.least_budget import find_least_budget
from planner.settings.budget import Bytes
from planner.solvers.clock import WallClock
from planner.solvers.eviction.least_peak import find_least_evicting_schedule
from planner.train.backend import joint_planning
from planner.train.backend.rest_of_step import add_rest, find_lean_schedule
from planner.train.backend.step_memory import PassStorages, compute_bytes_of_others, find_unread
from tests.support.marks import slow
from tests.support.models.backend import (
    Apart,
    Masked,
    Queued,
    Thirds,
    assert_same_state,
    batch_of,
    compiled,
    in_steps,
    measured_bytes,
    only_budget,
    stack,
    step_of,
    tight,
    wav2vec2,
)
from tests.support.raised_warnings import raise_warnings

pytestmark = [pytest.mark.usefixtures("fresh_compiler"), pytest.mark.filterwarnings("ignore")]


_SCALARS = 64  # the loss and its gradient are made outside of the model


@pytest.mark.parametrize(("make", "graphs"), [(Masked, 1), *slow((Apart, 3), (Thirds, 3), (wav2vec2, 2))])
def test_measured_peak_is_within_the_budget(make: Callable[[], nn.Module], graphs: int) -> None:
    torch.manual_seed(0)
    model = make()
    batch = batch_of(model)
    whole = max(in_steps(copy.deepcopy(model), batch, "100%"))
    assert len(only_budget().known_graphs) == graphs  # as Dynamo captures it: none, and nothing here would be planned
    twin, budget, peaks = tight(model, batch, whole)
    assert max(peaks) <= budget + _SCALARS
    torch.manual_seed(1)
    step_of(model, batch)()
    assert_same_state(model, twin)


def test_parameters_are_seen_before_their_graph_is_reached() -> None:
    early, late = nn.Linear(3, 5), nn.Linear(7, 11)
    runs = [PassStorages.of([torch.randn(2, 3), *early.parameters()])]
    behind = find_unread([*early.parameters(), *late.parameters()], runs)
    assert behind is not None
    assert compute_bytes_of_others([*runs, behind], 0, [0]) == 2 * 4 * (7 * 11 + 11)  # they, and their gradients
    assert find_unread(early.parameters(), runs) is None


def test_all_graphs_are_planned_together_after_the_first_step() -> None:
    torch.manual_seed(0)
    model = Thirds()
    batch = batch_of(model)
    step = step_of(compiled(model, "1MB"), batch)
    kept, gradients = [], []
    for _ in range(3):
        model.zero_grad()
        step()
        runs = only_budget().forward_runs
        kept.append([run.graph.kept_bytes for run in runs])
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    # At first, those that others follow keep little; with room for all, nothing is computed again.
    assert kept[0][0] < kept[1][0] and kept[0][1] < kept[1][1]
    assert (
        kept[1]
        == kept[2]
        == [count_kept_bytes(run.graph.captured.graph, keep_everything(run.graph.captured.graph)) for run in runs]
    )
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def test_a_backward_pass_runs_by_the_plan_of_its_forward_pass() -> None:
    torch.manual_seed(0)
    model, x = stack(3), torch.randn(64, 32)
    run = compiled(model, "1MB")
    (wanted,) = torch.autograd.grad(run(x).sum(), model[0][0].weight)
    (graph,) = only_budget().known_graphs
    lean = find_lean_schedule(graph.captured.graph, graph.tangents, 10**6, time_limit_s=5.0)
    assert lean is not None
    loss = run(x).sum()
    before = graph.kept_bytes
    graph.schedule = lean
    assert graph.kept_bytes < before
    for later in (loss, run(x).sum()):
        assert torch.equal(torch.autograd.grad(later, model[0][0].weight)[0], wanted)


def test_a_graph_fits_a_budget_at_which_no_rule_of_eviction_fits() -> None:
    graph = draw_training_step(5, 6)
    roomy = add_rest(graph, (), 0).graph
    budget_bytes = find_least_budget(roomy, reorders=False).found_bytes
    by_rules = find_least_evicting_schedule(roomy, WallClock(5.0))
    assert simulate(roomy, by_rules).peak_bytes > budget_bytes
    lean = find_lean_schedule(graph, (), budget_bytes, time_limit_s=5.0)
    assert simulate(graph, lean).peak_bytes <= budget_bytes
    assert find_lean_schedule(graph, (), budget_bytes - 1, time_limit_s=5.0) is None


def test_infeasible_budget_of_several_graphs_reports_what_each_keeps() -> None:
    torch.manual_seed(0)
    model = Thirds()
    step = step_of(compiled(model, "1MB"), batch_of(model))
    step()
    only_budget().budget = Bytes(150_000)
    with pytest.raises(
        InfeasibleError, match=r"150.00 kB is too small for the 3 graphs .* to graph \d[^?]*, and no schedule was found"
    ) as refused:
        step()
    known = re.search(r"Schedules are known for ([\d.]+ kB), (\d+)% of what eager PyTorch takes", str(refused.value))
    for budget in (known[1], f"{known[2]}%"):
        torch._dynamo.reset()
        step = step_of(compiled(model, budget), batch_of(model))
        for _ in range(3):
            step()


def test_copies_of_inputs_that_were_written_stay_when_graphs_are_planned_together() -> None:
    torch.manual_seed(0)
    model = Queued()
    batch = batch_of(model)
    whole = max(in_steps(copy.deepcopy(model), batch, "100%"))
    twins = [copy.deepcopy(model) for _ in range(3)]
    for twin, part in zip(twins, (12, 16, 24), strict=True):
        torch._dynamo.reset()
        budget = whole - whole // part
        assert max(in_steps(twin, batch, budget)) <= budget + _SCALARS
    for _ in range(3):  # as the twins were trained
        model.zero_grad()
        step_of(model, batch)()
    for twin in twins:
        assert_same_state(model, twin)


def test_known_schedules_stay_where_rules_find_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Thirds()
    batch = batch_of(model)
    _, budget, _ = tight(model, batch)
    torch._dynamo.reset()
    step = step_of(compiled(model, budget), batch)
    step()
    for find in ("find_lean_schedule", "find_least_evicting_schedule"):
        monkeypatch.setattr(joint_planning, find, lambda *_, **__: None)
    step()  # in which the graphs are planned together
    assert measured_bytes(model, batch, step) <= budget + _SCALARS


def test_ops_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_COSTS", {})
    measured: list[object] = []
    measure = profile._Profiler._execute_or_model
    monkeypatch.setattr(
        profile._Profiler, "_execute_or_model", lambda of, key, *rest: measured.append(key) or measure(of, key, *rest)
    )
    torch.manual_seed(0)
    model, x = stack(3), torch.randn(64, 32)
    compiled(model, "1MB")(x).sum().backward()
    first = len(measured)
    assert first == len(set(measured)) > 0  # three equal blocks, each op once
    torch._dynamo.reset()
    compiled(stack(3), "1MB")(x).sum().backward()
    assert len(measured) == first
    compiled(stack(3), "1MB", roofline="h100")(torch.randn(32, 32)).sum().backward()
    assert len(measured) == first


def test_measuring_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 3))
    before = copy.deepcopy(model)
    torch.manual_seed(5)
    run = compiled(model, "100MB")
    x = torch.randn(8, 16)
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        wanted = before(x)
    torch.set_rng_state(state)
    assert torch.equal(run(x), wanted)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True))


def test_a_second_model_with_the_same_options_has_a_budget_of_its_own(solves: list[object]) -> None:
    options = {"budget": "1MB", "time_limit_s": 10, "tolerance": 0.1}
    x, runs = torch.randn(64, 32), [torch.compile(stack(n), backend="planner", dynamic=False, options=options) for n in (2, 3)]
    with raise_warnings(UserWarning):
        for _ in range(2):
            losses = [run(x).sum() for run in runs]  # the first model's tensors are still there
            for loss in losses:
                loss.backward()
    assert solves == [10**6, 10**6]


def test_storages_beside_a_graph_are_counted_once() -> None:
    x, weight, other = torch.randn(10), torch.randn(20, requires_grad=True), torch.randn(30, requires_grad=True)
    hidden = torch.randn(40)
    first, second = PassStorages.of([x, weight]), PassStorages.of([hidden, other, weight])
    first.add_outputs([hidden])
    # Forward and backward of the first: the second's parameter, and gradients of both of its parameters.
    assert compute_bytes_of_others([first, second], 0, [1000, 1000]) == 4 * (30 + 30 + 20)
    # Of the second: what the first keeps, in which `hidden` is, and its batch.
    assert compute_bytes_of_others([first, second], 1, [1000, 1000]) == 1000 - 4 * 40 + 4 * 10


def test_tensors_saved_by_eager_ops_are_counted() -> None:
    x = torch.randn(50, requires_grad=True)
    between = x.exp().sin()  # holds what it is the sine of, and exp its result: the same tensor
    assert sum(PassStorages.of([between]).held.values()) == 4 * 50


def test_the_rest_of_the_step_needs_its_room() -> None:
    model, x = stack(3), torch.randn(64, 32)
    compiled(model, "1MB")(x).sum().backward()
    (graph,) = only_budget().known_graphs
    captured = graph.captured.graph
    roomy = add_rest(captured, graph.tangents, 10**6)
    assert len(roomy.graph.ops) == len(captured.ops) + 1
    assert roomy.map_back(keep_everything(roomy.graph)).computed == keep_everything(captured).computed
    assert all(not roomy.graph.tensors[t].static for t in graph.tangents)


def test_second_derivatives_by_functional_say_what_breaks_the_graph() -> None:
    class Curved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hvp = torch.autograd.functional.hvp(lambda rows: self.inner(rows).sum(), x, torch.ones_like(x), create_graph=True)
            return hvp[1].square().mean()

    with pytest.raises(PlannerError, match=r"by torch.autograd.grad or .* \(torch.autograd.functional breaks the graph\)"):
        compiled(Curved(), "1MB")(torch.randn(64, 32)).backward()


class FromLeaf(nn.Module):
    """A piece that no gradient flows through, before a planned one: a copy of the input that gradients are computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        hidden = self.inner(x)
        (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return hidden + slope


class WithTeacher(nn.Module):
    """A piece without gradients that makes targets, before a planned one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.teacher = stack(2), stack(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        torch._dynamo.graph_break()
        found = self.inner(x[:, :32].clone())
        return found - target


class WithUnplannedHead(nn.Module):
    """A piece without a plan that reads tensors and parameters of its own, after a planned one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = stack(2), nn.Linear(32, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        torch._dynamo.graph_break()
        found = self.head(hidden)
        return torch.cond(y.sum() > 0, lambda f, y: f * y, lambda f, y: f - y, (found, y)).sum()


@pytest.mark.parametrize(
    ("make", "shapes"), [(WithTeacher, ((512, 32),)), (WithUnplannedHead, ((64, 32), (64, 256))), *slow((FromLeaf, ((512, 32),)))]
)
def test_memory_of_graphs_without_a_plan_is_in_the_budget(
    make: Callable[[], nn.Module], shapes: tuple[tuple[int, ...], ...]
) -> None:
    torch.manual_seed(0)
    model = make()
    _, budget, peaks = tight(model, tuple(torch.randn(shape) for shape in shapes))
    assert max(peaks) <= budget + _SCALARS
