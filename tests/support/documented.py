"""The Python blocks of the documentation, and the names that each page takes for given: a small model, its batch, its loop."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner

ROOT = Path(__file__).parents[2]
Names = dict[str, Any]


def pages() -> list[Path]:
    """Return all pages that people read."""
    of_repository = (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    return sorted([*of_repository, *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def first_line(block: str) -> str:
    """Return the line that a block is known by: the first that is no import."""
    lines = [line for line in block.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    return lines[0] if lines else block.splitlines()[0]


@dataclass(frozen=True)
class Surroundings:
    """What a page takes for given.

    Attributes:
        names: what its blocks may use.
        then: called with the names after each block.
        apart: whether each block begins with the same names, in place of going on with those of the blocks before.
    """

    names: Callable[[Path], Names]
    then: Callable[[Names], object] = lambda _: None
    apart: bool = False


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
        "planner": planner,
        "torch": torch,
        "x": batch[0],
        "y": batch[1],
    }


def with_accelerate(folder: Path) -> Names:
    accelerate = pytest.importorskip("accelerate")
    return small(folder) | {"accelerator": accelerate.Accelerator(cpu=True)}


def with_transformers(folder: Path) -> Names:
    from tests.support.trainer import arguments, model, sentences

    data = sentences(8)
    loader = DataLoader(data, batch_size=4)
    names = {
        "args": arguments(folder, max_steps=2),
        "batch": next(iter(loader)),
        "data": data,
        "loader": loader,
        "model": model(),
    }
    return small(folder) | names


def with_lightning(folder: Path) -> Names:
    from tests.support.lightning_loop import Module, batches, pl

    # Of Lightning, where a loader has no workers.
    warnings.filterwarnings("ignore", ".*does not have many workers")

    def trainer(**options: Any) -> Any:
        quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False, "enable_model_summary": False}
        return pl.Trainer(accelerator="cpu", max_steps=2, default_root_dir=str(folder), **quiet, **options)

    return small(folder) | {"Trainer": trainer, "module": Module(), "loader": batches(2)}


def with_devices(folder: Path) -> Names:
    """The graph of a step, and the same measured on another device."""
    names = small(folder)
    step = names["model"], names["loss_fn"], names["batch"]
    graph = planner.trace(*step, passes=1, options=["in-place", "pack"])
    return names | {"graph": graph, "on_gpu": planner.trace(*step, passes=1)}


def with_plan(folder: Path) -> Names:
    """A plan in a file, as the command leaves it."""
    names = small(folder)
    graph = planner.trace(names["model"], names["loss_fn"], names["batch"], passes=1)
    planner.solve(graph, "100%").save(folder / "plan.json", graph=folder / "model.json")
    return names


def step_of(names: Names) -> None:
    """A step of the loop, by what a block has compiled."""
    x, y = names["batch"]
    loss = names["step"](x, y) if "step" in names else names["loss_fn"](names["model"](x), y)
    loss.backward()


def fit(names: Names) -> None:
    """Train by the trainer that a block has made."""
    names["trainer"].fit(names["module"], names["loader"], names["loader"])


SURROUNDINGS = {
    "docs/guides/accelerate.md": Surroundings(with_accelerate),
    "docs/guides/huggingface.md": Surroundings(with_transformers),
    "docs/guides/lightning.md": Surroundings(with_lightning, fit),
    "docs/guides/torch-compile.md": Surroundings(small, step_of, apart=True),
    "docs/placement.md": Surroundings(with_devices),
    "docs/report.md": Surroundings(with_plan),
}


@contextmanager
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, what blocks write to their home or where they are lands in `folder`."""
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.chdir(folder)
        yield
