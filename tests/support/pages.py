"""The pages of the documentation, and names that their blocks use."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[2]
Names = dict[str, Any]


def pages() -> list[Path]:
    """Return all pages that people read."""
    of_repository = (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    return sorted([*of_repository, *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def small(folder: Path) -> Names:
    """A network, its loss, and a loader of two batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5))
    loader = DataLoader(TensorDataset(torch.randn(16, 16), torch.randint(5, (16,))), batch_size=8)
    batch = tuple(next(iter(loader)))
    return {
        "F": F,
        "batch": batch,
        "folder": folder,
        "loader": loader,
        "loss_fn": F.cross_entropy,
        "mask": torch.ones(8, dtype=torch.bool),
        "model": model,
        "nn": nn,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "torch": torch,
        "x": batch[0],
        "y": batch[1],
    }


PAGES = pages()
