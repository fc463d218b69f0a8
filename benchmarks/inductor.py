"""Our choice of what is kept against PyTorch's, both with Inductor's kernels: ``make bench-inductor`` writes results/inductor/.

PyTorch's ``activation_memory_budget`` runs first; the peak that it was measured to take is then the budget of the plan.
Times are medians of interleaved runs, of all methods on one model.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.common import PROVENANCE, command_line, one_thread, provenance, write
from graphs.capture.step import LossFn, TrainingStep
from graphs.torch_private.capture import inductor_config
from graphs.units import format_bytes
from graphs.zoo import build
from planner.report.tables import as_markdown
from planner.runtime.measure import Step
from planner.studies.baselines import Method, eager, memory_budget, own_code
from planner.studies.measured import Benchmark, Measured

# With dropout the gradients of PyTorch's memory budget are wrong.
MODELS = {
    "gpt2": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=500, batch=8, seq=128, dropout=0),
    "vit": partial(build, "vit", layers=4, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "resnet18": partial(build, "resnet18", width=16, size=64, classes=10, batch=8),
}
FRACTIONS = (1.0, 0.5, 0.0)
COLUMNS = ("model", "method", "budget_bytes", "peak_bytes", "time_s", "loss_and_gradients", "error", *PROVENANCE)


def planned(budget_bytes: int) -> Method:
    """The backend ``planner`` with Inductor's kernels."""

    def prepare(model: torch.nn.Module, loss_fn: LossFn | None) -> Step:
        options = {"budget": budget_bytes, "compile": "inductor", "time_limit": 30.0}
        step = own_code(TrainingStep(model, loss_fn))
        compiled = torch.compile(step, backend="planner", dynamic=False, fullgraph=True, options=options)

        def run(*batch: object) -> object:
            with inductor_config.patch(fallback_random=True):
                return compiled(*batch)

        return run

    return Method(f"planner {format_bytes(budget_bytes)}", prepare)


def compare(name: str, repeats: int) -> list[dict[str, object]]:
    """The rows of one model."""
    torch.manual_seed(0)
    benchmark = Benchmark(MODELS[name]())
    found: list[tuple[Measured, int | None]] = [(benchmark.enter(eager()), None)]
    for fraction in FRACTIONS:
        baseline = benchmark.enter(memory_budget(fraction, "inductor"))
        found.append((baseline, None))
        if baseline.peak_bytes is not None:
            found.append((benchmark.enter(planned(baseline.peak_bytes)), baseline.peak_bytes))
    times = benchmark.times([measured.method for measured, _ in found if measured.error is None], repeats=repeats)
    about = provenance()
    return [
        {
            "model": name,
            "method": measured.method,
            "budget_bytes": budget,
            "peak_bytes": measured.peak_bytes,
            "time_s": median(times[measured.method]) if measured.method in times else None,
            "loss_and_gradients": measured.exactness,
            "error": measured.error,
            **about,
        }
        for measured, budget in found
    ]


def table(rows: Sequence[dict[str, object]]) -> str:
    """Peak and time of each method; times as multiples of eager PyTorch."""
    cells = [("model", "method", "peak", "step time, of eager", "loss and gradients")]
    eager_s = {row["model"]: row["time_s"] for row in rows if row["method"] == "eager"}
    for row in rows:
        peak, time_s = row["peak_bytes"], row["time_s"]
        ratio = f"{float(str(time_s)) / float(str(eager_s[row['model']])):.2f}x" if time_s else str(row["error"])
        shown = format_bytes(int(str(peak))) if peak else "none"
        cells.append((str(row["model"]), str(row["method"]), shown, ratio, str(row["loss_and_gradients"] or "none")))
    return as_markdown(cells)


def main(words: Sequence[str] | None = None) -> None:
    """Measure all models; write rows and table."""
    parser = command_line(__doc__, models=MODELS, out="results/inductor")
    parser.add_argument("--repeats", type=int, default=15, help="steps timed of each method (default: %(default)s)")
    arguments = parser.parse_args(words)
    one_thread()
    rows = []
    for name in arguments.models:
        rows += compare(name, arguments.repeats)
        torch.compiler.reset()
    write(arguments.out, COLUMNS, rows, table(rows))


if __name__ == "__main__":
    main()
