"""Lightning on a small model, with and without a plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")


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
    module: Any,
    folder: Path,
    *callbacks: Any,
    data: tuple[DataLoader, ...] | None = None,
    resumed_from: Path | None = None,
    **more: Any,
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
    trainer.fit(module, *((batches(3), batches(1)) if data is None else data), ckpt_path=resumed_from)
    return module, recorder.logged
