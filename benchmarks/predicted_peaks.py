"""Predicted peaks of eager training steps: ``python -m benchmarks predicted_peaks`` writes results/predicted_peaks/.

Beside the measured peak (tensors and workspaces; parameters, gradients and inputs included) stand that of the captured graph and
that of torch-kitsune (``pip install torch-kitsune``), which adds up parameters, gradients, outputs of modules, and 15% of these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.command import Main
from benchmarks.zoo_models import CPU_MODELS as MODELS
from planner.capture.signature import list_leaves
from planner.measure.tracing import trace
from planner.plans.summary import summarize
from planner.studies.baselines import build_eager
from planner.studies.experiment import Study
from planner.studies.measured import Benchmark
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, order_by
from planner.studies.tables import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow(Made):
    """The peaks of a model, in bytes."""

    model: str = declare_key()
    measured_bytes: int = declare_column("peak of a step of eager PyTorch")
    planner_bytes: int = declare_column("as the captured graph predicts it")
    kitsune_bytes: int = declare_column("as torch-kitsune predicts it")


def measure(name: str, known: Sequence[PeakRow]) -> Iterator[PeakRow]:
    """Yield the row of a model."""
    from kitsune.predict import predict_memory

    torch.manual_seed(0)
    built = MODELS[name]()
    graph = trace(*built, passes=1)
    first = next(leaf for leaf in list_leaves(built.batch) if isinstance(leaf, torch.Tensor))
    predicted = predict_memory(built.model, tuple(first.shape[1:]), batch_size=first.shape[0], optimizer="none")
    yield PeakRow(
        model=name,
        measured_bytes=Benchmark(built).enter(build_eager()).peak_bytes or 0,
        planner_bytes=summarize(graph).keep_everything_peak_bytes,
        kitsune_bytes=predicted.total_bytes,
        **collect_provenance(),
    )


TABLE = (
    "model",
    Column("measured", lambda row: row.measured_bytes / 1e6, "{:.2f} MB"),
    Column("this project predicts", lambda row: row.planner_bytes / row.measured_bytes - 1, "{:+.1%}"),
    Column("torch-kitsune predicts", lambda row: row.kitsune_bytes / row.measured_bytes - 1, "{:+.1%}"),
)

STUDY = Study(PeakRow, measure, order=order_by(model=MODELS), pages={"table.md": TABLE})
main = Main(STUDY, MODELS)
