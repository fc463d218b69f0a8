"""One model under plans, beside eager PyTorch and checkpointing: run by benchmarks/try_models.py, in a process of its own.

Writes its rows as JSON, after each way to train it, so that those of a process that is ended are not lost.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import planner
from benchmarks.common import columns_of, one_thread
from benchmarks.runner import SEED, Runner, whole_step
from graphs.errors import PlannerError
from graphs.io.files import write_text
from planner import tracing
from planner.models import Workload
from planner.runtime.measure import turn_times
from planner.solving import order_for, summarize
from planner.studies import baselines
from planner.studies.blocks import block_levels
from solvers.clock import WallClock
from solvers.least import least_budget

SHARES = (0.7, 0.5, 0.3)  # of the way from the least budget to the peak
_LEAST_LIMIT_S = 5.0
_SOLVE_LIMIT_S = 10.0
_TOLERANCE = 0.01

EAGER, PLANNED, CHECKPOINTING, AT_ITS_PEAK = "eager", "planned", "checkpointing", "planned at its peak"
FIRST = ", from the first plan on"
RAN, REFUSED, FAILED, MISSING = "ran", "refused", "failed", "missing"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train one model; what is not known is None.

    Attributes:
        source, model: where it is from, and its name.
        way: EAGER, CHECKPOINTING, ``planned at 50%`` of the way from the least budget to the peak, AT_ITS_PEAK, or PLANNED
            where no budget is known to plan for. With FIRST at its end, from the first plan on that fits, while better ones
            are looked for; without it, by the last plan.
        status: RAN; REFUSED with one clear line; FAILED in another way; MISSING: a package is not installed.
        message: of what was refused or failed.
        ops: of the captured step.
        least_bytes, keeping_bytes: the least budget that is found, and the peak of keeping everything, as the planner says.
        budget_bytes: of the plan.
        storages_bytes: the most in storages at once, counted as they come and go.
        peak_bytes: the most of the allocator's, with what kernels take for themselves.
        different: how many of all losses, gradients, parameters, buffers and random states are not eager's to the last bit.
        first_difference: the name of one of them.
        swaps: how often a better plan took the place of another until then.
        time_s: median of a forward and backward pass.
        ratio: median of the multiples of eager's time in the same turn.
        ratio_of_checkpointing: the same, of checkpointing's time.
        seed: of weights, batches and random state.
    """

    source: str
    model: str
    way: str
    status: str
    message: str | None = None
    ops: int | None = None
    least_bytes: int | None = None
    keeping_bytes: int | None = None
    budget_bytes: int | None = None
    storages_bytes: int | None = None
    peak_bytes: int | None = None
    different: int | None = None
    first_difference: str | None = None
    swaps: int | None = None
    time_s: float | None = None
    ratio: float | None = None
    ratio_of_checkpointing: float | None = None
    seed: int = SEED


COLUMNS = columns_of(Row)


class Trial:
    """What is found out about one model, row by row.

    Args:
        make: the model with a loss function and a batch; random weights.
        row: what its rows have in common.
        on_row: called with every row.
        repeats: steps timed of each way, in turn.
    """

    def __init__(self, make: Callable[[], Workload], row: Row, on_row: Callable[[Row], None], *, repeats: int) -> None:
        self._make = make
        self._row = row
        self._on_row = on_row
        self._repeats = repeats
        self._rows: dict[str, Row] = {}
        self._runners: dict[str, Runner] = {}

    def run(self) -> None:
        """Train it in every way; then all that ran take turns for their times."""
        plain = self._fresh()
        self._batch = plain.batch
        eager = Runner(plain, whole_step(plain))
        self._reference = eager.train(self._batch)
        self._measured(EAGER, self._row, self._eager_again)
        if self._rows[EAGER].status != RAN:
            return
        workload = self._fresh()
        try:
            graph = tracing.trace(*workload, passes=1)
            least = least_budget(order_for(graph, "windows", reorder=None).graph, clock=WallClock(_LEAST_LIMIT_S)).found_bytes
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            self._say(PLANNED, _failed(self._row, error))
            return
        keeping = summarize(graph).keep_everything_peak_bytes
        self._row = replace(self._row, ops=len(graph.ops), least_bytes=least, keeping_bytes=keeping)
        for share in SHARES:
            self._planned(f"{PLANNED} at {share:.0%}", int(least + share * (keeping - least)))
        self._checkpointed()
        self._timed()

    def _eager_again(self) -> Runner:
        workload = self._fresh()
        return Runner(workload, whole_step(workload))

    def _planned(self, way: str, budget_bytes: int) -> None:
        """From the first plan on that fits, and by the last one that is found."""
        workload, first = self._fresh(), f"{way}{FIRST}"
        untrained = Runner(workload, whole_step(workload)).state()
        row = replace(self._row, budget_bytes=budget_bytes)

        def begun() -> Runner:
            limits: dict[str, Any] = {"tolerance": _TOLERANCE, "time_limit_s": _SOLVE_LIMIT_S}
            return Runner(workload, planner.compile(*workload, budget=budget_bytes, wait=0, **limits))

        def ended() -> Runner:
            runner = self._runners.pop(first)
            assert isinstance(runner.step, planner.PlannedStep)
            runner.step.wait()
            runner.restore(untrained)
            return runner

        self._measured(first, row, begun)
        if first in self._runners:
            self._measured(way, row, ended)
        else:
            self._say(way, self._rows[first])

    def _checkpointed(self) -> None:
        """Blocks of the level that takes the least memory, and a plan for as much; nothing where none saves any."""
        found: list[tuple[int, Runner]] = []
        for level in range(1, block_levels(self._fresh().model) + 1):
            workload = self._fresh()
            runner = Runner(workload, baselines.checkpoint_blocks(level).prepare(workload.model, workload.loss_fn))
            try:
                found.append((runner.peak_bytes(self._batch), runner))
            except Exception as error:  # noqa: BLE001 (of PyTorch's own: other levels may go)
                self._say(CHECKPOINTING, _failed(self._row, error))
        if not found:
            return
        peak_bytes, runner = min(found, key=lambda pair: pair[0])
        if peak_bytes >= (self._rows[EAGER].peak_bytes or 0):
            self._say(CHECKPOINTING, replace(self._row, status=REFUSED, message="checkpointing blocks saves no memory"))
            return
        self._measured(CHECKPOINTING, self._row, lambda: runner)
        self._planned(AT_ITS_PEAK, peak_bytes)

    def _measured(self, way: str, row: Row, make: Callable[[], Runner]) -> None:
        try:
            runner = make()
            outcome = runner.train(self._batch)
            differences = self._reference.differences(outcome)
            row = replace(
                row,
                status=RAN,
                different=len(differences),
                first_difference=differences[0] if differences else None,
                storages_bytes=runner.storages_bytes(self._batch),
                peak_bytes=runner.peak_bytes(self._batch),
                swaps=len(runner.step.history) - 1 if isinstance(runner.step, planner.PlannedStep) else None,
            )
            self._runners[way] = runner
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
            row = _failed(row, error)
        self._say(way, row)

    def _timed(self) -> None:
        steps = {way: runner.step for way, runner in self._runners.items()}
        parameters = [parameter for runner in self._runners.values() for parameter in runner.parameters]
        times = turn_times(steps, self._batch, parameters=parameters, repeats=self._repeats)
        for way in steps:
            row = replace(self._rows[way], time_s=median(times[way]), ratio=_ratio(times[way], times[EAGER]))
            if way == AT_ITS_PEAK:
                row = replace(row, ratio_of_checkpointing=_ratio(times[way], times[CHECKPOINTING]))
            self._say(way, row)

    def _say(self, way: str, row: Row) -> None:
        self._rows[way] = replace(row, way=way)
        self._on_row(self._rows[way])

    def _fresh(self) -> Workload:
        """The model and its batch, the same every time."""
        torch.manual_seed(SEED)
        return self._make()


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Others on the machine disturb both steps of a turn alike."""
    return median(own / other for own, other in zip(times, others, strict=True))


def _failed(row: Row, error: Exception) -> Row:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = line.replace(f"{Path(__file__).parent.parent}{os.sep}", "")  # the same wherever the repository lies
    if isinstance(error, PlannerError):
        return replace(row, status=REFUSED, message=line)
    return replace(
        row, status=MISSING if isinstance(error, ModuleNotFoundError) else FAILED, message=f"{type(error).__name__}: {line}"
    )


def sources() -> dict[str, Mapping[str, Callable[[], Workload]]]:
    """Models by name, by where they are from; no package is imported before one of its models is made."""
    from benchmarks.models import diffusers_models, handwritten, huggingface_models, peft_models, timm_models, torchvision_models

    torchvision_models.declare_torchvision_ops()  # others import it too
    return {
        "by hand": handwritten.MODELS,
        "transformers": huggingface_models.MODELS,
        "timm": timm_models.MODELS,
        "torchvision": torchvision_models.MODELS,
        "diffusers": diffusers_models.MODELS,
        "peft": peft_models.MODELS,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Try one model; write its rows into a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="file of rows, as JSON")
    parser.add_argument("--repeats", type=int, default=9, help="steps timed of each way (default: %(default)s)")
    arguments = parser.parse_args(words)
    one_thread()
    rows: dict[str, Row] = {}

    def keep(row: Row) -> None:
        rows[row.way] = row
        write_text(arguments.out, json.dumps([asdict(row) for row in rows.values()]))

    row = Row(arguments.source, arguments.model, EAGER, RAN)
    try:
        Trial(sources()[arguments.source][arguments.model], row, keep, repeats=arguments.repeats).run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a row)
        keep(_failed(row, error))


if __name__ == "__main__":
    main()
