"""Training by a plan in PyTorch Lightning: what is logged and learnt equals that without a plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

from graphs.errors import PlannerError, TraceError  # noqa: E402
from planner.lightning import PlannedTraining  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = {"passes": 1, "tolerance": 0.05, "time_limit_s": 20.0, "compare_eager": False}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.GELU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": (logits.argmax(1) == y).float().mean()}, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Returning(Module):
    """Returns more than the loss, and takes no index."""

    seen: list[torch.Tensor]

    def training_step(self, batch: Any) -> Any:
        logits = self(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "best": logits.max()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = [*getattr(self, "seen", []), outputs["best"].clone()]


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def batches(count: int) -> DataLoader:
    draw = torch.Generator().manual_seed(1)
    made = [(torch.randn(8, 3, 16, 16, generator=draw), torch.randint(5, (8,), generator=draw)) for _ in range(count)]
    return DataLoader(made, batch_size=None)


def trained(
    module: Any, folder: Path, *callbacks: Any, data: tuple[DataLoader, ...] | None = None, **more: Any
) -> tuple[Any, list[dict[str, float]]]:
    recorder = Recorder()
    options = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    options = {**options, "enable_model_summary": False, "log_every_n_steps": 1, "gradient_clip_val": 1.0, **more}
    trainer = pl.Trainer(default_root_dir=folder, callbacks=[*callbacks, recorder], **options)
    torch.manual_seed(5)
    trainer.fit(module, *((batches(3), batches(1)) if data is None else data))
    return module, recorder.logged


@pytest.mark.parametrize("make", [Module, Returning])
@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}], ids=["plain", "mixed"])
def test_trains_as_lightning_alone(make: type, more: dict[str, Any], tmp_path: Path) -> None:
    eager, eager_logs = trained(make(), tmp_path, **more)
    callback = PlannedTraining("75%", **QUICK)
    planned, planned_logs = trained(make(), tmp_path, callback, **more)
    assert planned_logs == eager_logs
    pairs = zip(planned.state_dict().items(), eager.state_dict().items(), strict=True)
    assert [name for (name, a), (_, b) in pairs if not torch.equal(a, b)] == []
    if make is Returning:
        assert torch.equal(torch.stack(planned.seen), torch.stack(eager.seen))
    plan = callback.planned.plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert len(plan.schedule.computed) > plan.graph.ops
    assert plan.graph.provenance["optimizer"] == "momentum"
    assert plan.graph.provenance["accumulate"] is bool(more)
    assert planned.training_step.__func__ is make.training_step  # as it was
    assert planned.log.__func__ is pl.LightningModule.log


class Indexed(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).mean() * (batch_idx + 1)


class LogsNumber(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("epoch", self.current_epoch)
        return self(batch[0]).mean()


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OtherOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Rprop(self.parameters())


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (Indexed, TraceError, "batch_idx"),
        (LogsNumber, TraceError, "training_step logs 'epoch', which is no tensor but int"),
        (ByHand, PlannerError, "automatic_optimization=False is not planned"),
        (OtherOptimizer, PlannerError, "what memory Rprop takes is not known"),
    ],
)
def test_what_cannot_be_planned_is_said(make: type, kind: type, message: str, tmp_path: Path) -> None:
    module = make()
    with pytest.raises(kind, match=message):
        trained(module, tmp_path, PlannedTraining("75%", **QUICK), gradient_clip_val=None)
    assert module.training_step.__func__ is make.training_step
    assert module.log.__func__ is pl.LightningModule.log


class Wrapping(SingleDeviceStrategy):
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.model = nn.DataParallel(self.model)


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="strategy Wrapping is not planned: use a single device or strategy='ddp'"):
        trained(Module(), tmp_path, PlannedTraining("75%", **QUICK), accelerator="auto", strategy=Wrapping("cpu"))


def test_another_module_gets_another_plan(tmp_path: Path) -> None:
    callback = PlannedTraining("75%", **QUICK)
    first, _ = trained(Module(), tmp_path, callback)
    second, _ = trained(Module(), tmp_path, callback)
    assert first is not second
    assert all(map(torch.equal, second.parameters(), first.parameters()))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(PlannerError, match=r"unknown option 'buget' of planner\.compile: choose of accumulate, cache, "):
        PlannedTraining("75%", buget=1)
