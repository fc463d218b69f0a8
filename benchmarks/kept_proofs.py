"""The proof of a plan after each step of training: ``python -m benchmarks kept_proofs`` prints status, bound and gap.

Ops are timed in context while a loop trains, and better plans replace the first. What was proved must not get lost by that: there
is a bound from the first one on, and for the same costs the gap is never above the least that was shown before. For new costs it
is not either, unless it is within the tolerance.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import planner
from graphs.units import format_ratio, format_seconds
from planner.plans.plan import Plan
from solvers.result import SOLVED

_STEPS = 50
_ROUNDING = 1e-9
Note = Callable[[Plan], None]


@dataclass(frozen=True, slots=True)
class Proof:
    """What a plan shows after a step; the gap as a share, and the costs that it holds for."""

    step: int
    status: str
    bound_s: float | None
    gap: float | None
    costs: str = ""

    def __str__(self) -> str:
        bound = "none" if self.bound_s is None else format_seconds(self.bound_s)
        gap = "unknown" if self.gap is None else format_ratio(self.gap)
        return f"step {self.step}: {self.status}, bound {bound}, gap {gap}, costs {self.costs}"

    def is_lost_after(self, least: "Proof") -> bool:
        """Return True if this says less than `least`, the proof with the least gap before."""
        if self.bound_s is None or self.gap is None or least.gap is None:
            return True
        is_enough = self.costs != least.costs and self.status in SOLVED
        return self.gap > least.gap + _ROUNDING and not is_enough


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sequence after attention and two layers."""
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.feed(self.norm(x))


def train_in_loop(steps: int, note: Note) -> None:
    """Train a transformer in the loop of the README."""
    model = nn.Sequential(nn.Linear(32, 128), *(Block(128) for _ in range(6)), nn.Linear(128, 10))
    x, y = torch.randn(16, 64, 32), torch.randint(0, 10, (16,))
    optimizer = torch.optim.AdamW(model.parameters())
    step = planner.compile(
        model, lambda out, y: F.cross_entropy(out.mean(1), y), (x, y), budget="60%", optimizer=optimizer, on_progress=False
    )
    for _ in range(steps):
        step(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        note(step.plan)
    note(step.wait())


def train_bert(steps: int, note: Note) -> None:
    """Train a BERT in the Trainer."""
    import transformers

    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384, "vocab_size": 500}
    _train_by_trainer(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)), steps, note)


def train_t5(steps: int, note: Note) -> None:
    """Train a T5 in the Trainer."""
    import transformers

    sizes = {"d_model": 96, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 24, "vocab_size": 500}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    _train_by_trainer(transformers.T5ForConditionalGeneration(config), steps, note)


def _train_by_trainer(model: nn.Module, steps: int, note: Note) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from planner.huggingface import PlannedTrainer

    class Noting(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            note(trainer.planned.plan)

    data = [{name: torch.randint(1, 500, (64,)) for name in ("input_ids", "labels")} for _ in range(8 * steps)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        args = TrainingArguments(folder, per_device_train_batch_size=8, max_steps=steps, **options)
        trainer = PlannedTrainer(model, args, train_dataset=data, budget="70%", callbacks=[Noting()])
        trainer.train()


def train_by_lightning(steps: int, note: Note) -> None:
    """Train a perceptron with dropout in Lightning."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from planner.lightning import PlannedTraining

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))]
            self.layers = nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 10))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Noting(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert planned.planned is not None
            note(planned.planned.plan)

    planned, rows = PlannedTraining(budget="90%"), 512 * steps
    data = DataLoader(TensorDataset(torch.randn(rows, 64), torch.randint(0, 10, (rows,))), 512)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_steps=steps, callbacks=[planned, Noting()], accelerator="cpu", **quiet).fit(Module(), data)


LOOPS: dict[str, Callable[[int, Note], None]] = {
    "loop": train_in_loop,
    "bert": train_bert,
    "t5": train_t5,
    "lightning": train_by_lightning,
}


def collect_proofs(name: str, *, steps: int) -> list[Proof]:
    """Return what the plan of a loop shows after each of its steps."""
    torch.manual_seed(0)
    proofs: list[Proof] = []

    def note(plan: Plan) -> None:
        costs = str(plan.graph.provenance.get("times"))
        proofs.append(Proof(len(proofs) + 1, str(plan.status), plan.bound_s, plan.gap, costs))

    LOOPS[name](steps, note)
    return proofs


def list_lost(proofs: Sequence[Proof]) -> list[Proof]:
    """Return the proofs that say less than one before them."""
    least: Proof | None = None
    lost = []
    for proof in proofs:
        if least is not None and proof.is_lost_after(least):
            lost.append(proof)
        elif proof.gap is not None:
            least = proof
    return lost


def main(words: Sequence[str] | None = None) -> int:
    """Print the proofs of each loop where they change; return 1 if one was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loops", nargs="*", choices=[*LOOPS, []], help="default: all")
    parser.add_argument("--steps", type=int, default=_STEPS)
    given = parser.parse_args(words)
    lost = []
    for name in given.loops or LOOPS:
        proofs = collect_proofs(name, steps=given.steps)
        lines = [str(proofs[0]), *(str(b) for a, b in pairwise(proofs) if (a.status, a.gap) != (b.status, b.gap))]
        print("\n".join(f"{name}: {line}" for line in (*lines, f"{len(proofs)} plans shown")))
        lost += [f"{name}: lost at {proof}" for proof in list_lost(proofs)]
    print("\n".join(lost or ["no proof was lost"]))
    return bool(lost)
