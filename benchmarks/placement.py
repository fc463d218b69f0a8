"""Ops on two devices: ``make bench-placement`` writes results/placement/.

Small training steps on three pairs: a CPU and an integrated GPU by their rooflines, and one thread of this machine's CPU with
another one, and with two, measured: their schedules are also run, in turn with keeping everything on the main device. For each:
the best on either device alone, XEngine's serial optimum, the same program for devices and copies that work in parallel, starting
from a serial optimum, and the best schedule of the exact solver for these. First without a limit on memory, where XEngine's
program executes each op once; then within a part of the peak of the step that keeps everything, in each memory. Results that are
not proved optimal in the time are marked. XEngine's program does not support steps as large as the transformer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from benchmarks.command import Main
from benchmarks.models.parts import Residual
from benchmarks.solves import TOLERANCE
from planner.capture.lowering.lower import Capture
from planner.capture.options import apply_options
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.ir import Graph
from planner.graphs.options.passes import order_by_passes
from planner.graphs.options.surroundings import OtherDevice, Surroundings
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.units import format_ratio, format_seconds
from planner.measure import tracing
from planner.measure.pool_memory import measure_other_peaks, measure_peak
from planner.measure.roofline import model_times
from planner.measure.steps import measure_median_times
from planner.plans.select_attributes import select_attributes
from planner.plans.summary import summarize
from planner.runtime.executor import Executor
from planner.settings.budget import read_budget
from planner.settings.devices import DeviceSpec, get_device
from planner.settings.other_devices import decode_devices
from planner.settings.plan import PlanSettings
from planner.solvers.baselines.xengine import XEngineParams
from planner.solvers.clock import WallClock
from planner.solvers.result import SOLVED, Result, decide_status
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_value, order_by
from planner.studies.solves import solve_allocated
from planner.studies.tables import ALL, Column, format_markdown, group_by, group_side_by_side

# No product: an integrated GPU of 1 TFLOP/s, which has the memory bus of the CPU of ``planner.settings.devices`` to itself.
INTEGRATED = DeviceSpec("integrated", 32 * 10**9, 51.2e9, 2e12, 1e12, 1e12, 10e-6, 0.70, 0.50, 0.40, 0.80)
MODELLED_BYTES_PER_S = 12e9  # of a copy from buffer to buffer on the same bus, both read and written
NO_LIMIT = "no limit"
BUDGETS = (NO_LIMIT, "90%")
SERIAL, BEST = "serial", "windows"
METHODS = ("main device", "other device", SERIAL, "overlapped", BEST)
_XENGINE = ("xengine", "xengine-overlapped")
MODELLED = "CPU, GPU modelled"
MEASURED = {"one thread, one": "cpu:1", "one thread, two": "cpu:2"}
PAIRS = (MODELLED, *MEASURED)
LIMIT_S = 8.0
REPEATS = 15


def build_regression(*layers: nn.Module, inputs: Sequence[int], targets: Sequence[int]) -> Workload:
    """Return a network with the loss of a regression."""
    return Workload(nn.Sequential(*layers), nn.MSELoss(), (torch.randn(*inputs), torch.randn(*targets)))


def build_chain() -> Workload:
    """Build two linear layers and GELU: a chain and its backward pass."""
    return build_regression(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), inputs=(2048, 256), targets=(2048, 256))


def build_mlp() -> Workload:
    """Build three linear layers with GELU and ReLU."""
    layers = nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
    return build_regression(*layers, inputs=(2048, 256), targets=(2048, 64))


def build_resnet() -> Workload:
    """Build a convolution and a residual block of two, as in ResNet-18, without normalisation."""
    conv = partial(nn.Conv2d, out_channels=32, kernel_size=3, padding=1)
    layers = conv(3), Residual(conv(32), nn.ReLU(), conv(32)), nn.ReLU()
    return build_regression(*layers, inputs=(16, 3, 32, 32), targets=(16, 32, 32, 32))


MODELS: Mapping[str, Callable[[], Workload]] = {
    "chain": build_chain,
    "mlp": build_mlp,
    "resnet": build_resnet,
    "transformer": partial(build, "gpt2", layers=2, width=128, heads=4, vocab=1000, batch=8, seq=128, dropout=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow(Made):
    """One method on one pair of devices."""

    model: str = declare_key()
    pair: str = declare_key()
    ops: int = declare_key("of the step")
    budget: str = declare_key("of each memory")
    method: str = declare_key()
    status: str = declare_column(
        "as in planner.solvers.result; of the serial optimum: of its sum, which is no bound on its makespan"
    )
    time_s: float | None = declare_value("the step")
    bound_s: float | None = declare_value("proved: no step takes less")
    serial_s: float | None = declare_value("the serial optimum, as XEngine counts it: the sum over both devices; and its bound")
    serial_bound_s: float | None = declare_value()
    seconds: float = declare_column("that the solve took")
    budget_bytes: int = declare_column()
    peak_bytes: int | None = declare_value("of the schedule, on the main device")
    placed: int = declare_column("executions on the other device")
    copied: int = declare_column("copies between the devices")
    predicted_s: float | None = declare_value("of what is executed")
    executed_s: float | None = declare_value("in turn with kept_s: keeping everything on the main device")
    kept_s: float | None = declare_value()
    executed_peak_bytes: int | None = declare_value()
    predicted_other_bytes: int | None = declare_value("peak on the other device, and as it is executed")
    executed_other_bytes: int | None = declare_value()

    @property
    def counted_s(self) -> float | None:
        """The time that the method minimizes."""
        return self.serial_s if self.method == SERIAL else self.time_s

    @property
    def counted_text(self) -> str:
        """The same, marked if it is not proved optimal; the reason if there is none."""
        mark = "" if self.status in SOLVED else " *"
        return self.status if self.counted_s is None else f"{format_seconds(self.counted_s)}{mark}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A step on two devices.

    Attributes:
        main: the step with the times of the main device.
        captured: the capture of the step, to run it; None where the times are modelled.
    """

    main: Graph
    second: OtherDevice
    captured: Capture | None = None

    @property
    def other(self) -> Graph:
        """The step with the times of the other device; ops that cannot run there keep their times."""
        times = zip(self.main.ops, self.second.times_s, strict=True)
        ops = tuple(op if time_s is None else replace(op, time_s=time_s) for op, time_s in times)
        return Graph(ops, self.main.tensors, self.main.kept, self.main.provenance)


def pair_of(step: Workload, pair: str) -> Pair:
    """Return the step on the two devices of `pair`."""
    if pair == MODELLED:
        captured = capture(*step)
        times = tuple(op.time_s for op in model_times(captured, INTEGRATED).ops)
        return Pair(model_times(captured, get_device("cpu")), OtherDevice("integrated", times, MODELLED_BYTES_PER_S))
    measured = tracing.capture_profiled(step, PlanSettings(passes=9, other_devices=(MEASURED[pair],)))
    (second,) = decode_devices(measured.graph.provenance)
    return Pair(measured.graph, second, measured)


def measure_schedule(step: Workload, pair: Pair, graph: Graph, schedule: Schedule) -> dict[str, float]:
    """Return the measurements of a schedule on `graph`, run in turn with keeping everything on the main device."""
    assert pair.captured is not None
    model, loss_fn, batch = step
    placed = Executor(replace(pair.captured, graph=graph), schedule, model, loss_fn)
    keeping = Executor(pair.captured, keep_everything(pair.main), model, loss_fn)
    whole = TrainingStep(model, loss_fn)
    times = measure_median_times({"placed": placed, "kept": keeping}, batch, parameters=list(model.parameters()), repeats=REPEATS)
    (other_bytes,) = measure_other_peaks(pair.captured, placed, whole, batch).values()
    return {
        "executed_s": times["placed"],
        "kept_s": times["kept"],
        "executed_peak_bytes": measure_peak(pair.captured, placed, whole, batch).peak_bytes,
        "executed_other_bytes": other_bytes,
    }


def compare(name: str, pair: str, step: Workload, devices: Pair, budget: str, *, limit_s: float) -> Iterator[PlacementRow]:
    """Yield the rows of one model, whose `step` is given, on one pair of devices at one budget."""
    unlimited = budget == NO_LIMIT
    budget_bytes = read_budget("1000%" if unlimited else budget).resolve(summarize(devices.main).keep_everything_peak_bytes)
    second = replace(devices.second, capacity_bytes=None if unlimited else budget_bytes)
    both = apply_options(devices.main, ("placement",), Surroundings(others=(second,)))
    graphs, solvers = (devices.main, devices.other, both, both, both), ("windows", "windows", *_XENGINE, "windows")
    for method, graph, solver in zip(METHODS, graphs, solvers, strict=True):
        params = XEngineParams(again=not unlimited) if solver in _XENGINE else None
        result = solve_allocated(graph, budget_bytes, WallClock(limit_s), solver, params=params)
        optional = [op for i in (result.schedule.computed if result.schedule else ()) if (op := graph.ops[i]).optional]
        placed = sum(bool(op.replaces) for op in optional)
        row = PlacementRow(
            model=name,
            pair=pair,
            ops=len(devices.main.ops),
            budget=budget,
            method=method,
            status=_format_status(result),
            **select_attributes(result, "time_s", "bound_s", "seconds", "budget_bytes", "peak_bytes"),
            serial_s=result.settings.serial_s,
            serial_bound_s=result.settings.serial_bound_s,
            placed=placed,
            copied=len(optional) - placed,
            **collect_provenance(),
        )
        if graph is both and result.schedule is not None and devices.captured is not None:
            schedule = order_by_passes(graph, result.schedule)
            predicted = simulate(graph, schedule)
            row = replace(row, predicted_s=predicted.time_s, predicted_other_bytes=predicted.pool_peaks_bytes[1])
            row = replace(row, **measure_schedule(step, devices, graph, schedule))
        yield row


def _format_status(result: Result) -> str:
    """Return the status; the serial optimum is one of the sum, which is no bound on its makespan."""
    serial_s, bound_s = result.settings.serial_s, result.settings.serial_bound_s
    if result.bound_s is None and serial_s is not None and bound_s is not None:
        return decide_status(serial_s, bound_s, TOLERANCE)
    return result.status


def format_table(rows: Sequence[PlacementRow]) -> str:
    """Return the time of each method, and the gain of the best parallel schedule over the serial optimum."""
    return format_markdown(group_side_by_side(rows, "method", "model", "pair", "budget"), TABLE)


def _compute_gain(found: Mapping[str, PlacementRow]) -> float | None:
    serial_s, best_s = (found[method].counted_s if method in found else None for method in (SERIAL, BEST))
    return None if serial_s is None or best_s is None else serial_s / best_s - 1


TABLE = (
    *("model", Column("devices", "pair"), "budget"),
    *(Column(method, "counted_text", at=method) for method in METHODS),
    Column("serial, side by side", "time_s", at=SERIAL),
    Column("gain over serial", _compute_gain, format_ratio, at=ALL),
    *(Column(title, name, at=BEST) for title, name in (("bound", "bound_s"), ("windows, run", "executed_s"))),
    Column("main device, run", "kept_s", at=BEST),
)


def measure(name: str, known: Sequence[PlacementRow]) -> Iterator[PlacementRow]:
    """Yield the rows of a model, where there are not all of a pair of devices and a budget."""
    made = group_by(known, "pair")
    for pair in [pair for pair in PAIRS if len(made.get(pair, ())) < len(BUDGETS) * len(METHODS)]:
        torch.manual_seed(0)
        step = MODELS[name]()
        devices = pair_of(step, pair)
        for budget in BUDGETS:
            yield from compare(name, pair, step, devices, budget, limit_s=LIMIT_S)


STUDY = Study(
    PlacementRow,
    measure,
    whole=False,
    order=order_by(pair=PAIRS, model=MODELS, budget=BUDGETS, method=METHODS),
    pages={"table.md": format_table},
)
main = Main(STUDY, MODELS)
