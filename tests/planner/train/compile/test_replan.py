"""``replan=True``: a plan for what has changed, in the middle of training."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.step import LossFn
from planner.graphs.errors import TraceError
from planner.train.compile.compiler import Compiler
from tests.support.marks import slow
from tests.support.models.steps import MutatedBuffer
from tests.support.raised_warnings import raise_warnings


def settings_and_loss() -> tuple[SimpleNamespace, LossFn]:
    settings = SimpleNamespace(alpha=1.0)
    return settings, lambda output, target: F.mse_loss(output, target) * settings.alpha


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 48), torch.randn(rows, 3)


@pytest.mark.parametrize("dynamic", [False, *slow(True)])
def test_trains_as_eager_while_things_change(dynamic: bool) -> None:
    planned, eager = MutatedBuffer(), MutatedBuffer()
    eager.load_state_dict(planned.state_dict())
    settings, loss_fn = settings_and_loss()
    step = planner.compile(planned, loss_fn, batch_of(8), budget="100%", replan=True, dynamic=dynamic)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (planned, eager)]

    def compare(rows: int = 8) -> None:
        batch, states = batch_of(rows), []
        for model, run, optimizer in zip((planned, eager), (step, lambda x, y: loss_fn(eager(x), y)), optimizers, strict=True):
            torch.manual_seed(5)
            run(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append([*model.parameters(), *model.buffers(), torch.get_rng_state()])
        assert all(map(torch.equal, *states))

    compare()
    settings.alpha = 0.5
    with pytest.warns(UserWarning, match=r"captured again: settings.alpha was 1.0 .* and is 0.5 now"):
        compare()
    planned.outer.bias.requires_grad_(False), eager.outer.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"planned again: model.outer.bias.requires_grad was True"):
        compare()
    planned.outer.bias.requires_grad_(True), eager.outer.bias.requires_grad_(True)
    with raise_warnings(UserWarning):  # both plans are kept
        compare()
        settings.alpha = 1.0
        compare()


def test_the_second_plan_comes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, loss_fn = settings_and_loss()
    step = planner.compile(MutatedBuffer(), loss_fn, batch_of(8), budget="1MB", replan=True, cache=tmp_path)
    monkeypatch.setattr(Compiler, "solve", lambda *_: pytest.fail("solved again"))
    settings.alpha = 0.5
    with pytest.warns(UserWarning, match="captured again: settings.alpha"):
        step(*batch_of(8))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_module_that_is_replaced_and_a_batch_of_another_size() -> None:
    model = MutatedBuffer()
    step = planner.compile(model, F.mse_loss, batch_of(8), budget="1MB", replan=True)
    model.outer = nn.Sequential(nn.Linear(96, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match="planned again: model.outer was a .*Linear"):
        step(*batch_of(8)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.warns(UserWarning, match="planned again: input 0 of the batch is"):
        step(*batch_of(4))


@pytest.mark.parametrize("options", [{"dynamic": True}, {"replan": True}])
def test_evaluation_makes_no_plan(options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(48, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    step = planner.compile(model, F.mse_loss, batch_of(8), budget="1MB", **options)
    monkeypatch.setattr(Compiler, "solve", lambda *_: pytest.fail("solved again"))
    model.eval()
    x, y = batch_of(3)
    with torch.no_grad():
        assert torch.equal(step(x, y), F.mse_loss(model(x), y))


def encoded(rows: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, length, 16), torch.randn(rows, 3)


@pytest.mark.parametrize("replan", [True, *slow(False)])
def test_sizes_vary_without_planning_again(*, replan: bool) -> None:
    torch.manual_seed(0)
    # It does other ops for a batch of one, whose transposes are laid out otherwise.
    layer, out = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 3)
    model = FunctionModule(lambda m, x: m.out(m.layer(x).mean(1)), layer=layer, out=out)
    step = planner.compile(model, F.mse_loss, encoded(8), budget="1MB", dynamic=True, replan=replan, compare_eager=False)
    for rows in (1, 4):  # no warning says that it was planned again
        x, y = encoded(rows)
        assert torch.equal(step(x, y), F.mse_loss(model(x), y))


def test_the_plan_is_kept_where_only_numbers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, loss_fn = settings_and_loss()
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))
    step = planner.compile(model, loss_fn, batch_of(8), budget="1MB", replan=True, compare_eager=False)
    first = step.plan
    monkeypatch.setattr(Compiler, "profile", None)  # nothing is measured or solved again
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for settings.alpha in (0.5, 0.25, 0.125):
            loss = step(*batch_of(8))
            with torch.no_grad():
                assert torch.equal(loss, loss_fn(model(batch_of(8)[0]), batch_of(8)[1]))
            assert step.plan.schedule == first.schedule
    assert ["settings.alpha was 1.0" in str(warning.message) for warning in caught] == [True]


def test_replan_warning_names_the_change_only() -> None:
    step = planner.compile(MutatedBuffer(), F.mse_loss, batch_of(8), budget="1MB", replan=True)
    with pytest.warns(UserWarning, match="planned again: input 0") as caught:
        step(*batch_of(4))
    assert not any("drop_last" in str(warning.message) for warning in caught)


@pytest.mark.slow
def test_op_failing_on_a_batch_raises_with_the_pytorch_message() -> None:
    model = nn.Sequential(nn.Linear(48, 3), nn.BatchNorm1d(3))
    step = planner.compile(model, F.mse_loss, batch_of(8), budget="1MB", replan=True, compare_eager=False)
    with (
        pytest.warns(UserWarning, match="planned again"),
        pytest.raises(
            TraceError, match="an op of the step fails on this batch: ValueError: Expected more than 1 value per channel"
        ),
    ):
        step(*batch_of(1))
