"""Training with all that can be kept compressed in 8 and in 4 bits, beside exact training: ``make bench-compression``.

Plans rarely keep anything compressed on a CPU, where computing again is faster, so schedules are made that do
(``benchmarks.all_compressed``). All curves of a model have the same data, initial weights and random state, and take turns step
by step; one more, exact too, begins at other weights, to show what chance comes to. It fails if the loss of a first step is not
the exact one's to the last bit, or a loss is no finite number.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks.all_compressed import all_compressed
from benchmarks.common import columns_of, command_line, exit_code, one_thread, provenance, write
from benchmarks.compression_table import BITS, EXACT, OTHER_WEIGHTS, Row, failures, plot, table
from benchmarks.training_loop import Loop, Recipe
from graphs.options import without_options
from graphs.options.compress import VARIANCE
from graphs.schedule import Schedule, keep_everything
from graphs.simulate import simulate
from planner import options, tracing
from planner.capture.lowering.lower import Capture
from planner.capture.options import with_options
from planner.capture.signature import Batch
from planner.capture.step import TrainingStep
from planner.models import Workload, build
from planner.runtime import measure
from planner.runtime.executor import Executor
from planner.runtime.pool_memory import measured_peak
from planner.settings import TraceSettings

_VOCAB, _PERIOD = 64, 4
_CLASSES, _NOISE = 10, 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it learns.

    Attributes:
        recipe: how it is trained; its `make` is called with nothing.
        data: called with a batch, a count of batches and a seed: so many batches of the same shapes.
    """

    recipe: Recipe
    data: Callable[[Batch, int, int], Iterator[Batch]]


def patterns(like: Batch, count: int, seed: int) -> Iterator[Batch]:
    """Sequences that repeat _PERIOD random tokens, each with the tokens that follow: after one period all can be known."""
    size, seq = like[0].shape
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        pattern = torch.randint(_VOCAB, (size, _PERIOD), generator=generator)
        tokens = pattern[:, torch.arange(seq + 1) % _PERIOD]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def noisy_classes(like: Batch, count: int, seed: int) -> Iterator[Batch]:
    """Images with their classes: an image of each class, and normal noise on it that is _NOISE times as strong."""
    images, classes = like
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(_CLASSES, *images.shape[1:], generator=generator)
    for _ in range(count):
        target = torch.randint(_CLASSES, classes.shape, generator=generator)
        yield centers[target] + _NOISE * torch.randn(images.shape, generator=generator), target


# So small that 300 steps of all curves take one to two minutes, with most activations above the 2048 elements from which on a
# tensor can be kept compressed.
CASES = {
    "gpt2": Case(
        Recipe(partial(build, "gpt2", layers=2, width=64, heads=4, vocab=_VOCAB, batch=8, seq=32), "adamw", rate=1e-3), patterns
    ),
    "resnet18": Case(
        Recipe(partial(build, "resnet18", width=8, size=32, classes=_CLASSES, batch=32), "adamw", rate=3e-3), noisy_classes
    ),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One way to keep what the backward pass reads.

    Attributes:
        loop: at its beginning.
        predicted_peak_bytes, peak_bytes: of a step, as simulated and as measured; static bytes included.
        predicted_error, error: of the gradients of the first step, as a part of their norm, as predicted and as measured.
    """

    loop: Loop
    predicted_peak_bytes: int
    peak_bytes: int
    predicted_error: float
    error: float


def curves(name: str, case: Case, steps: int, seed: int) -> Iterator[Row]:
    """The rows of one model, `steps` for each of BITS and OTHER_WEIGHTS."""
    torch.manual_seed(seed)
    workload = case.recipe.make()
    data = list(case.data(workload.batch, steps, seed))
    workload = workload._replace(batch=data[0])
    begun = begin(workload, case.recipe, seed)
    turns = [{bits: curve.loop.timed(batch) for bits, curve in begun.items()} for batch in data]
    exact = begun[EXACT]
    for bits in (*BITS, OTHER_WEIGHTS):
        curve = begun[bits]
        for step, turn in enumerate(turns):
            loss, time_s, _ = turn[bits]
            exact_loss, exact_s, _ = turn[EXACT]
            yield Row(
                model=name,
                bits=bits,
                step=step,
                loss=loss,
                exact_loss=exact_loss,
                time_s=time_s,
                exact_s=exact_s,
                predicted_peak_bytes=curve.predicted_peak_bytes,
                peak_bytes=curve.peak_bytes,
                exact_peak_bytes=exact.peak_bytes,
                predicted_error=curve.predicted_error,
                error=curve.error,
                seed=seed,
                **provenance(),
            )


def begin(workload: Workload, recipe: Recipe, seed: int) -> dict[str, Curve]:
    """The curves of BITS, EXACT and OTHER_WEIGHTS, each with a model of its own; `workload` has the first batch."""
    captured = tracing.capture_profiled(workload, TraceSettings(optimizer=recipe.optimizer, passes=1, options=("compress",)))
    program = without_options(captured.graph)
    offered = with_options(captured.graph, ["compress:1"])  # the loosest limit: each form is within it
    keeping = replace(captured, graph=program), keep_everything(program)
    wanted = measure.outcome(executor(*keeping, workload), workload.model, workload.batch, seed=seed)
    ways = {EXACT: keeping, OTHER_WEIGHTS: keeping} | {
        bits: (replace(captured, graph=offered), all_compressed(offered, bits)) for bits in BITS
    }
    start = copy.deepcopy(workload.model.state_dict())
    torch.manual_seed(seed + 1)
    other_start = recipe.make().model.state_dict()
    begun = {}
    for bits, (capture, schedule) in ways.items():
        own = workload._replace(model=copy.deepcopy(workload.model))
        step = executor(capture, schedule, own)
        peak_bytes = measured_peak(capture, step, TrainingStep(own.model, own.loss_fn), own.batch).peak_bytes
        found = measure.outcome(step, own.model, own.batch, seed=seed)
        begun[bits] = Curve(
            loop=Loop(own.model, step, recipe, other_start if bits == OTHER_WEIGHTS else start, seed=seed),
            predicted_peak_bytes=simulate(capture.graph, schedule).peak_bytes,
            peak_bytes=peak_bytes,
            predicted_error=math.sqrt(capture.graph.used(VARIANCE, schedule.computed)),
            error=wanted.gradient_error(found),
        )
    return begun


def executor(capture: Capture, schedule: Schedule, workload: Workload) -> Executor:
    """What runs `schedule` with the model of `workload`."""
    return Executor(capture, schedule, workload.model, workload.loss_fn)


def main(words: Sequence[str] | None = None) -> int:
    """Train all models; write rows, table and figure. 1 if a loss is not what it must be."""
    parser = command_line(__doc__, models=CASES, out="results/compression")
    parser.add_argument("--steps", type=options.count, default=300, help="of each curve (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and random state (default: %(default)s)")
    arguments = parser.parse_args(words)
    one_thread()
    rows = [row for name in arguments.models for row in curves(name, CASES[name], arguments.steps, arguments.seed)]
    write(arguments.out, columns_of(Row), map(asdict, rows), table(rows))
    plot(rows, arguments.out / "curves.png")
    return exit_code(failures(rows))


if __name__ == "__main__":
    sys.exit(main())
