"""Steps that repeat run by their plans: same bits, the plan's evictions, other steps, and the replay of what was recorded."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.storages import LiveStorages
from planner.cli.main import main
from planner.graphs.errors import UsageError
from planner.graphs.io.formats import read_graph
from planner.plans.background import BackgroundSolve
from planner.runtime.allocator import record_cpu_allocations
from planner.solvers.baselines.common.online import OnlineRun
from planner.solvers.online.heuristics import make_heuristic
from planner.train.eager import step_plans
from planner.train.eager.session import Rematerialization, rematerialize
from planner.train.eager.step_follower import StepFollower
from tests.support.eager.solves import SolvedWhenWaitedFor
from tests.support.eager.tensors import existing, other_bytes
from tests.support.marks import slow

ROOM = 560_000  # beside parameters and input; a step of 8 layers takes about twice as much
_PATIENCE_S = 600.0


@contextmanager
def within(budget: int, solve: type = SolvedWhenWaitedFor) -> Iterator[Rematerialization]:
    """A block whose steps have the same plans on any machine."""
    with pytest.MonkeyPatch.context() as patch, rematerialize(other_bytes() + budget) as session:
        patch.setattr(step_plans, "BackgroundSolve", solve)
        session.plans.settings = replace(session.plans.settings, work_limit=0.1)
        yield session


def network(layers: int = 8, *, dropout: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1 if dropout else 0.0)) for _ in range(layers))
    return nn.Sequential(*blocks)


class Loop:
    """A training loop over inputs, with what came out of it."""

    def __init__(
        self, forward: Callable[[nn.Module, Tensor, int], Tensor] = lambda model, x, i: model(x).square().mean()
    ) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.forward = forward
        self.losses: list[float] = []

    def step(self, x: Tensor, i: int) -> None:
        loss = self.forward(self.model, x, i)
        loss.backward()
        self.losses.append(float(loss.detach().item()))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        return [*(p.detach().clone() for p in self.model.parameters()), torch.get_rng_state(), torch.tensor(self.losses)]


class Watched:
    """The storages that were evicted, by their numbers in the step, and how many of them the heuristic chose."""

    def __init__(self) -> None:
        self.evicted: list[int] = []
        self.chosen = 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    evict, end = StepFollower.evict_one, StepFollower.end

    def evict_planned(follower: StepFollower) -> bool:
        planned = evict(follower)
        found.chosen -= planned
        return planned

    def end_step(follower: StepFollower) -> None:
        if (log := follower.memory.log) is not None:
            found.evicted += log.evicted
            found.chosen += len(log.evicted)
        end(follower)

    monkeypatch.setattr(StepFollower, "evict_one", evict_planned)
    monkeypatch.setattr(StepFollower, "end", end_step)
    return found


def plainly(inputs: list[Tensor], forward: Callable[[nn.Module, Tensor, int], Tensor] | None = None) -> list[Tensor]:
    """What plain eager PyTorch ends with."""
    loop = Loop() if forward is None else Loop(forward)
    torch.manual_seed(1)
    for i, x in enumerate(inputs):
        loop.step(x, i)
    return loop.state()


def planned(session: Rematerialization) -> int:
    return session.plans.planned_steps


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.usefixtures("solves_at_once")
def test_a_static_net_is_planned_in_its_third_step(watched: Watched) -> None:
    x = torch.randn(256, 64)
    expected = plainly([x] * 4)
    loop = Loop()
    torch.manual_seed(1)
    with within(ROOM, BackgroundSolve) as session:
        for i in range(4):
            watched.evicted.clear()
            watched.chosen = 0
            loop.step(x, i)
            assert session.peak_bytes <= session.budget_bytes
            if i < 2:
                assert watched.chosen > 0
            else:
                (plan,) = session.plans.plans
                assert watched.chosen == 0
                evicted = [action.storage for before in plan.actions for action in before if action.evict]
                assert watched.evicted and set(watched.evicted) <= set(evicted)
            session.wait_for_plans(_PATIENCE_S)
    assert planned(session) == 2
    assert same(loop.state(), expected)


def test_an_op_that_differs_in_the_middle_falls_back(watched: Watched) -> None:
    def forward(model: nn.Module, x: Tensor, i: int) -> Tensor:
        x = model[:6](x)
        if i == 2:
            x = x.sin()
        return model[6:](x).square().mean()

    x = torch.randn(256, 64)
    expected = plainly([x] * 4, forward)
    loop = Loop(forward)
    torch.manual_seed(1)
    with within(ROOM) as session:
        for i in range(4):
            watched.chosen = 0
            loop.step(x, i)
            assert (watched.chosen > 0) == (i < 3)
            session.wait_for_plans(_PATIENCE_S)
        assert session.peak_bytes <= session.budget_bytes
    assert (planned(session), session.plans.left_steps) == (1, 1)
    assert same(loop.state(), expected)


def test_each_recurring_size_has_a_plan(watched: Watched) -> None:
    sizes = [256, 224, 256, 224, 224, 256, 224]
    inputs = [torch.randn(256, 64)[:size] for size in sizes]
    expected = plainly(inputs)
    loop = Loop()
    torch.manual_seed(1)
    with within(ROOM) as session:
        for i, x in enumerate(inputs):
            watched.chosen = 0
            loop.step(x, i)
            assert (watched.chosen > 0) == (i < 2)  # both are solved when the second has ended
            session.wait_for_plans(_PATIENCE_S)
    assert len(session.plans.plans) == 2
    assert planned(session) == 5
    assert same(loop.state(), expected)


# --- sizes that vary ------------------------------------------------------------------------------


def test_other_sizes_borrow_the_plan_of_the_next_larger(watched: Watched) -> None:
    sizes = [256, 250, 244, 238, 256, 64, 262]  # 64 fits
    inputs = [torch.randn(262, 64)[:size] for size in sizes]
    expected = plainly(inputs)
    loop = Loop()
    torch.manual_seed(1)
    borrowed, evicted = [], []
    with LiveStorages(existing()) as live, within(ROOM) as session, unit_times(session):
        for i, x in enumerate(inputs):
            watched.evicted.clear()
            watched.chosen = 0
            loop.step(x, i)
            evicted.append(list(watched.evicted))
            borrowed.append(session.plans.borrowed_steps)
            assert (watched.chosen > 0) == (i < 2)
            if i == 1:
                session.wait_for_plans(_PATIENCE_S)
        (plan,) = session.plans.plans  # it serves 250 too
    assert borrowed == [0, 0, 1, 2, 2, 2, 3]
    assert (planned(session), session.plans.left_steps) == (1, 1)  # that of 64 began by the plan
    by_plan = [action.storage for before in plan.actions for action in before if action.evict]
    assert evicted[5] == []
    for one in (2, 3, 4, 6):
        assert set(evicted[one]) <= set(by_plan)
        assert evicted[one]
    assert live.peak_bytes <= session.budget_bytes
    assert same(loop.state(), expected)
    assert "1 steps by their own plan, 3 by a plan for other sizes; 1 plans" in str(session)


def test_by_a_borrowed_plan_less_is_recomputed_than_by_the_heuristic() -> None:
    def recomputed(sizes: list[int]) -> int:
        """The ops that are recomputed in the last step; those before the last are solved."""
        torch.manual_seed(0)
        model = network(16)
        with within(900_000) as session, unit_times(session):
            for i, size in enumerate(sizes):
                if i == len(sizes) - 1:
                    session.wait_for_plans(_PATIENCE_S)
                before = session.recomputed_ops
                model(torch.ones(size, 64)).square().mean().backward()
                model.zero_grad()
        assert session.plans.borrowed_steps == (len(sizes) > 1)
        return session.recomputed_ops - before

    assert recomputed([256, 250, 244]) < 0.8 * recomputed([244])


def encoder_decoder() -> tuple[nn.Module, Callable[[int, int], Tensor]]:
    model = nn.Transformer(64, 4, 2, 2, 128, 0.1, batch_first=True)
    source, target = torch.randn(4, 96, 64), torch.randn(4, 96, 64)
    return model, lambda n, k: model(source[:, :n], target[:, :k]).square().mean()


def images() -> tuple[nn.Module, Callable[[int, int], Tensor]]:
    """Convolutions with batch normalization, writes in place and dropout."""
    blocks = (
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)) for _ in range(6)
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks)
    pixels = torch.randn(4, 3, 96, 96)
    return model, lambda n, k: model(pixels[:, :, :n, :k]).square().mean()


@pytest.mark.parametrize("build", [images, *slow(encoder_decoder)])
def test_random_sizes_by_borrowed_plans_have_the_bits_of_eager(
    build: Callable[[], tuple[nn.Module, Callable[[int, int], Tensor]]],
) -> None:
    draw = random.Random(0)
    sizes = [(96, 96), *((draw.randrange(40, 97), draw.randrange(40, 97)) for _ in range(9))]

    def train(session: Rematerialization | None = None) -> list[Tensor]:
        torch.manual_seed(0)
        model, loss_of = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses = []
        for i, size in enumerate(sizes):
            loss = loss_of(*size)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if session is not None and i == 3:
                session.wait_for_plans(_PATIENCE_S)
        return [*(t.clone() for t in model.state_dict().values()), torch.get_rng_state(), torch.stack(losses)]

    others = other_bytes()
    with LiveStorages(existing()) as live:
        expected = train()
    room = int(0.45 * (live.peak_bytes - others))
    with LiveStorages(existing()) as live, within(room) as session:
        results = train(session)
    assert same(results, expected)
    assert live.peak_bytes <= session.budget_bytes
    assert session.plans.borrowed_steps > 0


# --- the recorded graph ---------------------------------------------------------------------------


def test_the_recorded_step_is_a_graph_for_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop, x = Loop(), torch.randn(256, 64)
    with within(ROOM) as session:
        for i in range(2):
            loop.step(x, i)
    path = tmp_path / "step.json"
    session.save_graph(path)
    graph = read_graph(path)
    assert graph.static_bytes >= sum(p.numel() * 4 for p in loop.model.parameters())
    assert (
        main(["solve", str(path), "--budget", "70%", "--tolerance", "5%", "--json", "--quiet", "-o", str(tmp_path / "plan.json")])
        == 0
    )
    assert main(["compare", str(path), "--budgets", "70%", "--methods", "dtr,lru", "-o", str(tmp_path / "rows")]) == 0
    capsys.readouterr()


def test_tensors_saved_by_a_retained_graph_are_released() -> None:
    x = torch.linspace(-1, 1, 1000, requires_grad=True)
    with rematerialize("1GB") as session:
        loss = x.exp().sin().cos().sum()
        loss.backward(retain_graph=True)
        doubled = x.detach() * 2
        del loss
    step = session.plans.longest_step
    assert len(doubled) == 1000
    assert all(step.graph.tensors[t].static for t in step.graph.ops[-1].inputs)


@contextmanager
def unit_times(session: Rematerialization) -> Iterator[None]:
    """Let each op last one second."""
    seconds = itertools.count()
    session.debug.memory.clock = lambda: float(next(seconds))
    yield


def linear() -> tuple[nn.Module, Tensor]:
    layers = (layer for i in range(10) for layer in (nn.Linear(64, 64), nn.GELU() if i % 2 else nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(256, 64)


def normalized() -> tuple[nn.Module, Tensor]:
    layers = (layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()))
    return nn.Sequential(*layers), torch.randn(128, 64)


def convolutional() -> tuple[nn.Module, Tensor]:
    layers = (layer for i in range(6) for layer in (nn.Conv2d(4 + 2 * i, 6 + 2 * i, 3, padding=1), nn.Softplus()))
    return nn.Sequential(*layers), torch.randn(4, 4, 12, 12)


def large() -> tuple[nn.Module, Tensor]:
    """Activations of 2 MiB: MegEngine's rule evicts nothing below 1 MiB."""
    layers = (layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(2**14, 32)


def random_numbers() -> tuple[nn.Module, Tensor]:
    layers = (layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)))
    return nn.Sequential(*layers), torch.randn(2**14, 32)


@cache
def peak_bytes(build: Callable[[], tuple[nn.Module, Tensor]]) -> int:
    """The most bytes that a step takes besides parameters and input."""
    model, x = build()
    others = other_bytes()
    with LiveStorages(existing()) as live:
        model(x).square().mean().backward()
    return live.peak_bytes - others


_HEURISTICS = ("dtr", "dtr-full", "dtr-local", "lru", "largest", "msps", "dtr-random")


@pytest.mark.parametrize(
    ("build", "name", "share"),
    [
        *itertools.product((linear, convolutional), _HEURISTICS, (0.8, 0.6, 0.5)),
        *itertools.product((normalized,), _HEURISTICS, (0.8, 0.6)),
        *itertools.product((large,), ("megengine",), (0.9, 0.8, 0.6)),
    ],
)
def test_runtime_evictions_equal_those_of_the_replayed_trace(
    build: Callable[[], tuple[nn.Module, Tensor]], name: str, share: float, watched: Watched
) -> None:
    budget = int(share * peak_bytes(build))
    torch.manual_seed(0)
    model, x = build()
    with rematerialize(other_bytes() + budget, heuristic=name, max_recomputation=100) as session, unit_times(session):
        # While allocations are recorded, they are not measured: a replay knows the memory of kernels from the start.
        record_cpu_allocations(lambda: model(x).square().mean().backward())
    step = session.plans.longest_step
    replay = OnlineRun(step.graph, session.budget_bytes, make_heuristic(name))
    replayed: list[int] = []
    choose = replay.ledger.choose_victim

    def note(now_s: float) -> int | None:
        victim = choose(now_s)
        assert victim is not None
        replayed.append(step.storages[replay.tensor[victim]])
        return victim

    replay.ledger.choose_victim = note
    replay.run()
    assert watched.evicted == replayed
    assert replayed


@pytest.mark.parametrize(("name", "draws_again"), [("dtr", True), ("megengine", False)])
def test_megengine_never_evicts_random_numbers(name: str, draws_again: bool, watched: Watched) -> None:
    budget = int(0.75 * peak_bytes(random_numbers))
    torch.manual_seed(0)
    model, x = random_numbers()
    with rematerialize(other_bytes() + budget, heuristic=name) as session, unit_times(session):
        model(x).square().mean().backward()
    assert watched.evicted
    assert ("aten.bernoulli_.float" in session.debug.recomputation.by_operator) is draws_again


@pytest.mark.slow
def test_the_report_shows_the_plan_or_the_heuristic(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    model, x = network(), torch.randn(256, 64)
    with within(ROOM) as session:
        with pytest.raises(UsageError, match="no step has ended"):
            session.report(tmp_path / "none.html")
        model(x).square().mean().backward()
        session.wait_for_plans(0.0)
        assert session.recomputed_ops > 0
        session.report(tmp_path / "heuristic.html", trace=tmp_path / "trace.json")
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        session.wait_for_plans(_PATIENCE_S)
        session.report(tmp_path / "plan.html")
    heuristic, plan = ((tmp_path / name).read_text() for name in ("heuristic.html", "plan.html"))
    assert "windows" in plan and "windows" not in heuristic and "Sequential.3" in heuristic
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
