"""Ops on two devices: ``make bench-placement`` writes results/placement/.

Small training steps on three pairs: a CPU and an integrated GPU by their rooflines, and one thread of this machine's CPU beside
another one, and beside two, measured: what is found there is also run, in turn with keeping everything on the main device. For
each: the best on either device alone, XEngine's serial optimum, the same program for devices and copies that work side by side,
which begins with a serial optimum, and the best that the exact solver finds for these. First without a limit of memory, where
XEngine's program executes each op once; then within a part of the peak of the step that keeps everything, in each memory. What is
not proved optimal in the time says so. XEngine's program does not take steps as large as the transformer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.common import PROVENANCE, command_line, one_thread, provenance, write
from graphs.ir import Graph
from graphs.options.passes import in_passes
from graphs.options.surroundings import Link, OtherDevice, Surroundings
from graphs.schedule import Schedule, keep_everything
from graphs.simulate import simulate
from graphs.units import format_ratio, format_seconds
from planner import tracing
from planner.budgets import budget_in_bytes
from planner.capture.lowering.lower import Capture
from planner.capture.options import with_options
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.models import Workload
from planner.profiling.devices import Device, get_device
from planner.profiling.other_devices import known_devices
from planner.profiling.roofline import model_times
from planner.report.tables import as_markdown
from planner.runtime.executor import Executor
from planner.runtime.measure import median_times
from planner.runtime.pool_memory import measured_peak, other_peaks_measured
from planner.settings import TraceSettings
from planner.solving import summarize
from planner.workload.workload import load, parse_spec
from solvers.baselines.xengine import XEngineParams
from solvers.clock import WallClock
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, Status
from solvers.tolerance import Tolerance

# No product: an integrated GPU of 1 TFLOP/s, which has the memory bus of the CPU of ``planner.profiling.devices`` to itself.
INTEGRATED = Device("integrated", 32 * 10**9, 51.2e9, 2e12, 1e12, 1e12, 10e-6, 0.70, 0.50, 0.40, 0.80)
MODELLED_BYTES_PER_S = 12e9  # of a copy from buffer to buffer on the same bus, both read and written
NO_LIMIT = "no limit"
BUDGETS = (NO_LIMIT, "90%")
METHODS = ("main device", "other device", "serial", "overlapped", "windows")
MODELLED = "CPU, GPU modelled"
MEASURED = {"one thread, one": "cpu:1", "one thread, two": "cpu:2"}
PAIRS = (MODELLED, *MEASURED)
LIMIT_S = 8.0
REPEATS = 15
TOLERANCE = 1e-3
COLUMNS = (
    *("model", "pair", "ops", "budget", "method", "status", "time_s", "bound_s", "serial_s", "serial_bound_s", "seconds"),
    *("budget_bytes", "peak_bytes", "placed", "copied", "predicted_s", "executed_s", "kept_s", "executed_peak_bytes"),
    *("predicted_other_bytes", "executed_other_bytes", *PROVENANCE),
)

Step = tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


class Residual(nn.Module):
    """Two convolutions beside the identity, as in ResNet-18, without normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the block makes of images[batch, width, height, width]."""
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def chain() -> Step:
    """Two linear layers and GELU: a chain and its backward pass."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    return model, nn.MSELoss(), (torch.randn(2048, 256), torch.randn(2048, 256))


def mlp() -> Step:
    """Three linear layers with GELU and ReLU."""
    layers = nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
    return nn.Sequential(*layers), nn.MSELoss(), (torch.randn(2048, 256), torch.randn(2048, 64))


def resnet() -> Step:
    """A convolution and a residual block."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), Residual(32))
    return model, nn.MSELoss(), (torch.randn(16, 3, 32, 32), torch.randn(16, 32, 32, 32))


def transformer() -> Step:
    """Two layers of a small GPT-2."""
    model, loss_fn, batch = load(parse_spec("zoo:gpt2,layers=2,width=128,heads=4,vocab=1000,batch=8,seq=128,dropout=0"))
    assert loss_fn is not None and isinstance(batch, tuple)
    return model, loss_fn, batch


MODELS: Mapping[str, Callable[[], Step]] = {"chain": chain, "mlp": mlp, "resnet": resnet, "transformer": transformer}


@dataclass(frozen=True, slots=True)
class Pair:
    """A step on two devices.

    Attributes:
        main: the step with the times of the main device.
        second: the other device.
        captured: how to run it; None where the times are modelled.
    """

    main: Graph
    second: OtherDevice
    captured: Capture | None = None

    @property
    def other(self) -> Graph:
        """The step with the times of the other device; what cannot run there takes as long as on the main one."""
        times = zip(self.main.ops, self.second.times_s, strict=True)
        ops = tuple(op if time_s is None else replace(op, time_s=time_s) for op, time_s in times)
        return Graph(ops, self.main.tensors, self.main.kept, self.main.provenance)

    def both(self, capacity_bytes: int | None) -> Graph:
        """The step with the choice, and so much of the other memory, None for no limit."""
        second = replace(self.second, capacity_bytes=capacity_bytes)
        return with_options(self.main, ("placement",), Surroundings(Link.even(1.0), others=(second,)))


def pair_of(step: Step, pair: str) -> Pair:
    """The step on the two devices that are called `pair`."""
    if pair == MODELLED:
        captured = capture(*step)
        times = tuple(op.time_s for op in model_times(captured, INTEGRATED).ops)
        return Pair(model_times(captured, get_device("cpu")), OtherDevice("integrated", times, MODELLED_BYTES_PER_S))
    measured = tracing.capture_profiled(Workload(*step), TraceSettings(passes=9, other_devices=(MEASURED[pair],)))
    (second,) = known_devices(measured.graph.provenance)
    return Pair(measured.graph, second, measured)


def executed(step: Step, pair: Pair, graph: Graph, schedule: Schedule) -> dict[str, object]:
    """What a schedule on `graph` takes where it is run, in turn with keeping everything on the main device."""
    assert pair.captured is not None
    model, loss_fn, batch = step
    placed = Executor(replace(pair.captured, graph=graph), schedule, model, loss_fn)
    keeping = Executor(pair.captured, keep_everything(pair.main), model, loss_fn)
    whole = TrainingStep(model, loss_fn)
    times = median_times({"placed": placed, "kept": keeping}, batch, parameters=list(model.parameters()), repeats=REPEATS)
    (other_bytes,) = other_peaks_measured(pair.captured, placed, whole, batch).values()
    return {
        "executed_s": times["placed"],
        "kept_s": times["kept"],
        "executed_peak_bytes": measured_peak(pair.captured, placed, whole, batch).peak_bytes,
        "executed_other_bytes": other_bytes,
    }


def compare(
    name: str, pair: str, step: Step, devices: Pair, budgets: Sequence[str], *, limit_s: float
) -> Iterator[dict[str, object]]:
    """The rows of one model, whose `step` is given, on one pair of devices."""
    about = provenance()
    peak_bytes = summarize(devices.main).keep_everything_peak_bytes
    for budget in budgets:
        unlimited = budget == NO_LIMIT
        budget_bytes = budget_in_bytes("1000%" if unlimited else budget, peak_bytes)
        both = devices.both(None if unlimited else budget_bytes)
        for method, graph, solver in (
            (METHODS[0], devices.main, "windows"),
            (METHODS[1], devices.other, "windows"),
            (METHODS[2], both, "xengine"),
            (METHODS[3], both, "xengine-overlapped"),
            (METHODS[4], both, "windows"),
        ):
            params = XEngineParams(again=not unlimited) if solver.startswith("xengine") else None
            request = Request(graph, budget_bytes, Tolerance.of(TOLERANCE), WallClock(limit_s), params=params)
            result = get_solver(solver)(request)
            row = dict.fromkeys(COLUMNS) | about | _moved(graph, result)
            row |= {"model": name, "pair": pair, "ops": len(devices.main.ops), "budget": budget, "method": method}
            row |= {"status": _status(result), "time_s": result.time_s, "bound_s": result.bound_s, "seconds": result.seconds}
            row |= {key: result.settings.get(key) for key in ("serial_s", "serial_bound_s")}
            row |= {"budget_bytes": budget_bytes, "peak_bytes": result.peak_bytes}
            if graph is both and result.schedule is not None and devices.captured is not None:
                schedule = in_passes(graph, result.schedule)
                predicted = simulate(graph, schedule)
                row |= {"predicted_s": predicted.time_s, "predicted_other_bytes": predicted.pool_peaks_bytes[1]}
                row |= executed(step, devices, graph, schedule)
            yield row


def _status(result: Result) -> str:
    """The serial optimum is one of its sum, which is no bound on its makespan."""
    serial_s, bound_s = result.settings.get("serial_s"), result.settings.get("serial_bound_s")
    if result.bound_s is None and isinstance(serial_s, float) and isinstance(bound_s, float):
        return Status.OPTIMAL if serial_s <= bound_s * (1 + TOLERANCE) else Status.FEASIBLE
    return result.status


def _moved(graph: Graph, result: Result) -> dict[str, object]:
    computed = () if result.schedule is None else result.schedule.computed
    optional = [graph.ops[op] for op in computed if graph.ops[op].optional]
    placed = sum(bool(op.replaces) for op in optional)
    return {"placed": placed, "copied": len(optional) - placed}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Time of each method, and what the best for both side by side gains over the serial optimum."""
    last = ("serial, side by side", "gain over serial", "bound", "windows, run", "main device, run")
    cells = [("model", "devices", "budget", *METHODS, *last)]
    for model, pair, budget in dict.fromkeys((row["model"], row["pair"], row["budget"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["model"], row["pair"], row["budget"]) == (model, pair, budget)}
        times = {method: row["serial_s"] if method == METHODS[2] else row["time_s"] for method, row in found.items()}
        serial_s, best_s = times.get(METHODS[2]), times.get(METHODS[4])
        side = found.get(METHODS[2], {}).get("time_s")
        bound = found.get(METHODS[4], {}).get("bound_s")
        ran = found.get(METHODS[4], {})
        run = bound, ran.get("executed_s"), ran.get("kept_s")
        gain = serial_s / best_s - 1 if isinstance(serial_s, float) and isinstance(best_s, float) else None
        cells.append(
            (
                *(str(value) for value in (model, pair, budget)),
                *(_cell(found.get(method), times.get(method)) for method in METHODS),
                format_seconds(side) if isinstance(side, float) else "",
                format_ratio(gain) if gain is not None else "",
                *(format_seconds(value) if isinstance(value, float) else "" for value in run),
            )
        )
    return as_markdown(cells)


def _cell(row: Mapping[str, object] | None, time_s: object) -> str:
    """A time, marked where it is not proved to be the best; why there is none."""
    if row is None:
        return ""
    return (
        f"{format_seconds(time_s)}{'' if row['status'] == 'optimal' else ' *'}"
        if isinstance(time_s, float)
        else str(row["status"])
    )


def main(words: Sequence[str] | None = None) -> None:
    """Solve, and write rows and table, after each row anew."""
    arguments = command_line(__doc__, models=MODELS, out="results/placement").parse_args(words)
    one_thread()
    rows: list[dict[str, object]] = []
    for pair in PAIRS:
        for name in arguments.models:
            torch.manual_seed(0)
            step = MODELS[name]()
            for row in compare(name, pair, step, pair_of(step, pair), BUDGETS, limit_s=LIMIT_S):
                rows.append(row)
                write(arguments.out, COLUMNS, rows, table(rows))


if __name__ == "__main__":
    main()
