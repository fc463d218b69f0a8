"""Planned training in PyTorch Lightning: logs and parameters equal those without a plan."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from planner.capture.guards import later_calls
from planner.capture.guards.later_calls import is_metric
from planner.graphs.errors import EagerWarning, PlannerError, TraceError
from planner.lightning import PlannedTraining
from planner.plans.record import plan_line
from planner.train.compile.step import PlannedStep
from tests.support.budgets import HALF_WAY
from tests.support.integrations.lightning import QUICK, Module, batches, pl, trained
from tests.support.logs import lines_of
from tests.support.marks import slow
from tests.support.raised_warnings import raise_warnings

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("half_way")]


class Returning(Module):
    """Returns more than the loss, and takes no index."""

    seen: list[torch.Tensor]

    def training_step(self, batch: Any) -> Any:
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "best": logits.max()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = [*getattr(self, "seen", []), outputs["best"].clone()]


def test_a_run_logs_its_plan_once_and_its_numbers_and_frees_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gradients: list[bool] = []
    module, call = Module(), PlannedStep.__call__

    def noted(step: PlannedStep, *args: Any) -> Any:
        with_gradients.append(any(parameter.grad is not None for parameter in module.parameters()))
        return call(step, *args)

    monkeypatch.setattr(PlannedStep, "__call__", noted)
    callback = PlannedTraining(HALF_WAY, log_plan=True, **QUICK)
    with lines_of("lightning.pytorch.planner") as lines, warnings.catch_warnings():
        warnings.filterwarnings("error", message="captured again")  # no step reads its index
        _, logged = trained(module, tmp_path, callback)
    assert lines[0] == "planning: capturing the training step"
    assert lines[1].startswith(plan_line(callback.planned.history[0].plan))
    assert len(lines) == 2
    steps = [logs for logs in logged if "plan/budget_bytes" in logs]
    assert steps
    for name, number in callback.planned.scalars().items():
        assert steps[-1][name] == pytest.approx(number, rel=1e-6)  # loggers keep float32
    assert with_gradients == [False] * 6


class OtherOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters())


class Penalized(Module):
    """Computes gradients in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        (slope,) = torch.autograd.grad(loss, self.body[-1].weight, create_graph=True)
        return loss + slope.square().sum()


@pytest.mark.parametrize("make", [Module, Returning, OtherOptimizer, Penalized])
@pytest.mark.parametrize("more", [{}, *slow({"accumulate_grad_batches": 2, "precision": "bf16-mixed"})], ids=["plain", "mixed"])
def test_trains_as_lightning_alone(make: type, more: dict[str, Any], tmp_path: Path) -> None:
    eager, eager_logs = trained(make(), tmp_path, **more)
    callback = PlannedTraining(HALF_WAY, **QUICK)
    planned, planned_logs = trained(make(), tmp_path, callback, **more)
    assert planned_logs == eager_logs
    pairs = zip(planned.state_dict().items(), eager.state_dict().items(), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []
    if make is Returning:
        assert torch.equal(torch.stack(planned.seen), torch.stack(eager.seen))
    plan = callback.planned.plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert len(plan.schedule.computed) > plan.graph.ops
    assert plan.graph.provenance["optimizer"]["name"] == ("Rprop" if make is OtherOptimizer else "SGD")
    assert plan.graph.provenance["accumulate"] is bool(more)
    assert planned.training_step.__func__ is make.training_step  # as it was
    assert planned.log.__func__ is pl.LightningModule.log


class Small(Module):
    """Fewer ops, for what needs several captures."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 5))


class Weighted(Small):
    """Logs with the number of rows, by which Lightning weights the mean of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, batch_size=len(batch[0]))
        return loss


class Annealed(Small):
    """Reads and logs numbers that change in each epoch and in each step, and branches on one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = min(1.0, (self.current_epoch + 1) / 4)
        self.log("epoch", self.current_epoch)
        self.log("weight", weight, on_epoch=True)
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        logits = self(batch[0])
        spread = logits.square().mean() * 0.99**self.global_step
        return F.cross_entropy(logits, batch[1]) + weight * (spread if self.current_epoch else spread.sqrt())


def test_numbers_that_change_are_followed(tmp_path: Path) -> None:
    data = (batches(2), batches(1))
    eager, eager_logs = trained(Annealed(), tmp_path, data=data)
    planned, planned_logs = trained(Annealed(), tmp_path, PlannedTraining(HALF_WAY, **QUICK), data=data)
    assert planned_logs == eager_logs and planned_logs[-1]["epoch"] == 1
    pairs = zip(planned.state_dict().items(), eager.state_dict().items(), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []


def test_means_of_an_epoch_count_the_rows_of_a_smaller_last_batch(tmp_path: Path) -> None:
    whole, last = batches(2).dataset
    data = (DataLoader([whole, tuple(part[:3] for part in last)], batch_size=None), batches(1))
    _, eager_logs = trained(Weighted(), tmp_path, data=data)
    callback = PlannedTraining(HALF_WAY, **QUICK)
    _, planned_logs = trained(Weighted(), tmp_path, callback, data=data)
    assert planned_logs == eager_logs
    assert len(callback.planned.plans) == len(callback.batch_plans.steps.values()) == 1  # 3 rows fit with everything kept


@pytest.mark.slow
def test_recorded_logs_do_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained(Module(), tmp_path, PlannedTraining(HALF_WAY, **QUICK))
    assert not [str(warning.message) for warning in seen if "set by the step" in str(warning.message)]


@pytest.mark.slow
def test_gradients_used_by_hooks_stay_until_lightning_frees_them(tmp_path: Path) -> None:
    class Looking(Module):
        seen = 0

        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen += any(parameter.grad is not None for parameter in self.parameters())

    eager, _ = trained(Looking(), tmp_path)
    planned, _ = trained(Looking(), tmp_path, PlannedTraining("200%", **QUICK))
    assert planned.seen == eager.seen > 0


def test_lightning_training_with_offload_equals_eager(tmp_path: Path) -> None:
    eager, eager_logs = trained(Module(), tmp_path)
    asked = {**QUICK, "time_limit_s": 2.0, "options": ["offload"], "link": "1000GB/s", "host_budget": "1GB"}
    callback = PlannedTraining(HALF_WAY, **asked)
    planned, planned_logs = trained(Module(), tmp_path, callback)
    assert planned_logs == eager_logs
    assert all(torch.equal(a, b) for a, b in zip(planned.state_dict().values(), eager.state_dict().values(), strict=True))
    plan = callback.planned.plan
    assert plan.copied and plan.measured_peak_bytes <= plan.budget_bytes
    assert 0 < plan.pool_peaks_bytes["host"] <= 10**9


class Indexed(Small):
    """Computes with the index of the batch, counts its calls, and logs in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.log("index", float(batch_idx))
        loss = F.cross_entropy(self(batch[0]), batch[1]) * (1 + batch_idx / self.calls)
        if batch_idx % 2 == 0:
            self.log("even", loss, prog_bar=True)
        return loss


def test_the_index_of_the_batch_is_a_number_like_others(tmp_path: Path) -> None:
    data = (batches(3), batches(1))
    eager, eager_logs = trained(Indexed(), tmp_path, data=data, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned, planned_logs = trained(Indexed(), tmp_path, PlannedTraining(HALF_WAY, **QUICK), data=data, max_epochs=1)
    assert planned_logs == eager_logs and planned.calls == eager.calls
    pairs = zip(planned.state_dict().items(), eager.state_dict().items(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


class Metrics(Module):
    """Updates metrics of torchmetrics, and logs them in the ways that its users do."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        kind = {"task": "multiclass", "num_classes": 5}
        self.accuracy, self.recall, self.mean = (
            torchmetrics.Accuracy(**kind),
            torchmetrics.Recall(**kind),
            torchmetrics.MeanMetric(),
        )
        self.several = torchmetrics.MetricCollection([torchmetrics.Accuracy(**kind), torchmetrics.F1Score(**kind)])
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("recall", self.recall(logits, batch[1]), on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean)
        self.log_dict(self.several(logits, batch[1]), on_step=False, on_epoch=True)
        self.log_dict({"loss": loss, "half": 0.5, "number": loss.item()})
        self.log("percent", 100 * loss.item(), on_epoch=True)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen = [*getattr(self, "seen", []), torch.stack(self.losses)]
        self.losses.clear()


def test_metrics_are_updated_and_logged_as_by_lightning_alone(tmp_path: Path) -> None:
    eager, eager_logs = trained(Metrics(), tmp_path)
    with raise_warnings(EagerWarning):
        planned, planned_logs = trained(Metrics(), tmp_path, PlannedTraining(HALF_WAY, **{**QUICK, "compare_eager": True}))
    assert planned_logs == eager_logs and len(eager_logs[-1]) > 6
    assert all(map(torch.equal, planned.seen, eager.seen))
    assert all(map(torch.equal, planned.parameters(), eager.parameters()))


def test_tensors_and_numbers_are_no_metrics_whatever_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_calls, "sys", None)  # Dynamo would read the names of all modules in each capture
    assert not is_metric(torch.ones(())) and not is_metric(1.0)


class LogsText(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("kind", "training")
        return self(batch[0]).mean()


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (LogsText, TraceError, "training_step logs 'kind', which is str, neither a tensor, a number nor a metric"),
        (ByHand, PlannerError, "automatic_optimization=False is not planned"),
    ],
)
def test_unsupported_modules_raise(make: type, kind: type, message: str, tmp_path: Path) -> None:
    module = make()
    with pytest.raises(kind, match=message):
        trained(module, tmp_path, PlannedTraining(HALF_WAY, **QUICK), gradient_clip_val=None)
    assert module.training_step.__func__ is make.training_step
    assert module.log.__func__ is pl.LightningModule.log


class Wrapping(SingleDeviceStrategy):
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.model = nn.DataParallel(self.model)


def test_other_strategies_raise(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="strategy Wrapping is not planned: use a single device, strategy='ddp'"):
        trained(Module(), tmp_path, PlannedTraining(HALF_WAY, **QUICK), accelerator="auto", strategy=Wrapping("cpu"))


def test_another_module_gets_another_plan(tmp_path: Path) -> None:
    callback = PlannedTraining(HALF_WAY, **QUICK)
    first, _ = trained(Module(), tmp_path, callback)
    second, _ = trained(Module(), tmp_path, callback)
    assert first is not second
    assert all(map(torch.equal, second.parameters(), first.parameters()))


def test_a_resumed_run_trains_as_lightning_alone(tmp_path: Path) -> None:
    trained_to = {}
    for name, callbacks in (("alone", []), ("planned", [PlannedTraining(HALF_WAY, **QUICK)])):
        saved = pl.callbacks.ModelCheckpoint(tmp_path / name, save_last=True, save_on_train_epoch_end=True)
        for epochs, last in ((1, None), (2, tmp_path / name / "last.ckpt")):
            module, logged = trained(
                Module(), tmp_path, *callbacks, saved, max_epochs=epochs, enable_checkpointing=True, resumed_from=last
            )
        trained_to[name] = (logged, [*module.state_dict().values()])
    assert trained_to["planned"][0] == trained_to["alone"][0]
    assert all(map(torch.equal, trained_to["planned"][1], trained_to["alone"][1]))


def test_unknown_options_raise() -> None:
    with pytest.raises(PlannerError, match=r"unknown option 'buget' of planner\.compile.*: choose from accumulate, "):
        PlannedTraining(HALF_WAY, buget=1)
