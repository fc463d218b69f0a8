"""What the executor itself costs: ``make bench-executor`` writes results/executor/.

The schedule that keeps everything, eager PyTorch, and ``torch.compile(mode="lite")`` (ATen's ops in program order too) take
turns; ratios are medians of those within a turn, so that what disturbs the machine disturbs both. Beside them: what it takes
to check, before each step, that all is as it was planned for.
"""

import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.common import PROVENANCE, command_line, one_thread, provenance, write
from graphs.schedule import keep_everything
from graphs.units import format_seconds
from planner.capture.frontend.unchanged import unchanged
from planner.capture.signature import Batch, call
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.models import Workload, build
from planner.report.tables import as_markdown
from planner.runtime.executor import Executor
from planner.runtime.measure import Step, loss_of, turn_times
from planner.studies.baselines import own_code

# Those of results/compare/cpu, and the convolutional ones at sizes whose ops take longer.
MODELS = {
    "gpt2": partial(build, "gpt2", layers=12, width=64, heads=4, vocab=500, batch=8, seq=128, dropout=0),
    "vit": partial(build, "vit", layers=12, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "unet": partial(build, "unet", channels=8, size=96, batch=4),
    "resnet50": partial(build, "resnet50", width=8, size=64, classes=10, batch=16),
    "resnet50-wide": partial(build, "resnet50", width=16, size=64, classes=10, batch=16),
    "mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=16, dropout=0),
    "mobilenet_v2-wide": partial(build, "mobilenet_v2", multiplier=0.5, size=96, classes=10, batch=16, dropout=0),
}
COLUMNS = ("model", "ops", "eager_s", "executor_ratio", "lite_ratio", "check_s", "repeats", *PROVENANCE)
_CHECKS = 500


def measure(name: str, workload: Workload, repeats: int) -> dict[str, object]:
    """One row."""
    model, loss_fn, batch = workload
    captured = capture(model, loss_fn, batch)
    eager = TrainingStep(model, loss_fn)
    executor = Executor(captured, keep_everything(captured.graph), model, loss_fn)
    steps: dict[str, Step] = {"eager": eager, "executor": executor}
    lite = torch.compile(own_code(eager), mode="lite", dynamic=False, fullgraph=True)
    with unchanged(model, batch):
        if runs(lite, batch):
            steps["lite"] = lite
        times = turn_times(steps, batch, parameters=list(model.parameters()), repeats=repeats)

    def ratio(step: str) -> float | None:
        return median(own / other for own, other in zip(times[step], times["eager"], strict=True)) if step in times else None

    return {
        "model": name,
        "ops": len(captured.graph.ops),
        "eager_s": median(times["eager"]),
        "executor_ratio": ratio("executor"),
        "lite_ratio": ratio("lite"),
        "check_s": check_seconds(executor, batch),
        "repeats": repeats,
        **provenance(),
    }


def check_seconds(executor: Executor, batch: Batch) -> float:
    """How long the executor looks, before each step, whether all is as it was planned for: guards and batch; the median."""
    times = []
    for _ in range(_CHECKS):
        start = time.perf_counter()
        call(executor.check, batch)
        times.append(time.perf_counter() - start)
    return median(times)


def runs(step: Step, batch: Batch) -> bool:
    """Whether PyTorch's own mode gets through a step: on ResNet it does not (torch 2.13), for it expects other strides."""
    try:
        loss_of(call(step, batch)).backward()
    except AssertionError as error:
        print(f"lite fails: {str(error).splitlines()[0]}")
        return False
    return True


def table(rows: Sequence[dict[str, object]]) -> str:
    """Step times as multiples of eager PyTorch's."""
    cells = [("model", "ops", "eager step", "per op", "executor", 'torch.compile(mode="lite")', "guards, each step")]
    for row in rows:
        eager_s, ops = float(str(row["eager_s"])), int(str(row["ops"]))
        found = [row[column] for column in ("executor_ratio", "lite_ratio")]
        ratios = ["fails" if ratio is None else f"{float(str(ratio)):.3f}x" for ratio in found]
        check = f"{float(str(row['check_s'])) * 1e6:.0f} µs"
        cells.append((str(row["model"]), str(ops), format_seconds(eager_s), format_seconds(eager_s / ops), *ratios, check))
    return as_markdown(cells)


def main(words: Sequence[str] | None = None) -> None:
    """Measure all models; write rows and table."""
    parser = command_line(__doc__, models=MODELS, out="results/executor")
    parser.add_argument("--repeats", type=int, default=40, help="steps timed of each (default: %(default)s)")
    arguments = parser.parse_args(words)
    one_thread()
    torch.manual_seed(0)
    rows = [measure(name, MODELS[name](), arguments.repeats) for name in arguments.models]
    write(arguments.out, COLUMNS, rows, table(rows))


if __name__ == "__main__":
    main()
