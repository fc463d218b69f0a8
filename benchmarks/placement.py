"""Ops on two devices: ``make bench-placement`` writes results/placement/.

Small training steps on two kinds of pairs: a CPU and an integrated GPU by their rooflines, and one thread of this machine's CPU
beside two of them, measured. For each: the best on either device alone, XEngine's serial optimum, and the best for devices and
copies that work side by side, which begins with a serial optimum. First without a limit of memory, each op executed once; then
within a part of the peak of the step that keeps everything, in each memory. What is not proved optimal in the time says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.common import PROVENANCE, command_line, provenance, write
from graphs.capture.trace import capture
from graphs.cost.devices import Device, get_device
from graphs.cost.roofline import model_times
from graphs.ir import Graph
from graphs.options import with_options
from graphs.options.surroundings import Link, OtherDevice, Surroundings
from graphs.units import format_ratio, format_seconds
from planner import api
from planner.report.tables import as_markdown
from planner.solving import budget_in_bytes, summarize
from solvers.clock import WallClock
from solvers.registry import get_solver
from solvers.request import Request
from solvers.result import Result, Status
from solvers.tolerance import Tolerance
from solvers.xengine import XEngineParams

# No product: an integrated GPU of 1 TFLOP/s, which has the memory bus of the CPU of ``graphs.cost.devices`` to itself.
INTEGRATED = Device("integrated", 32 * 10**9, 51.2e9, 2e12, 1e12, 1e12, 10e-6, 0.70, 0.50, 0.40, 0.80)
MODELLED_BYTES_PER_S = 12e9  # of a copy from buffer to buffer on the same bus, both read and written
NO_LIMIT = "no limit"
BUDGETS = (NO_LIMIT, "90%")
METHODS = ("main device", "other device", "serial", "overlapped")
PAIRS = ("modelled", "measured")
LIMIT_S = 30.0
TOLERANCE = 1e-3
COLUMNS = (
    *("model", "pair", "ops", "budget", "method", "status", "time_s", "bound_s", "serial_s", "serial_bound_s", "seconds"),
    *("budget_bytes", "peak_bytes", "placed", "copied", *PROVENANCE),
)

Step = tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]


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


MODELS: Mapping[str, Callable[[], Step]] = {"chain": chain, "mlp": mlp, "resnet": resnet}


def pair_of(step: Step, pair: str) -> tuple[Graph, Graph, float]:
    """The step with the times of the main device, with those of the other, and bytes a second between them."""
    if pair == "modelled":
        captured = capture(*step)
        return model_times(captured, get_device("cpu")), model_times(captured, INTEGRATED), MODELLED_BYTES_PER_S
    graphs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            graphs.append(api.trace(*step, passes=9))
    finally:
        torch.set_num_threads(before)
    return graphs[0], graphs[1], _copied_bytes_per_s()


def _copied_bytes_per_s(size_bytes: int = 2**24) -> float:
    """Bytes a second of the fastest of some copies within memory, as the executor makes them."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    return max(size_bytes / _seconds(lambda: np.copyto(target, source)) for _ in range(9))


def _seconds(run: Callable[[], object]) -> float:
    clock = WallClock()
    run()
    return clock.seconds


def compare(
    name: str, pair: str, graphs: tuple[Graph, Graph, float], budgets: Sequence[str], *, limit_s: float
) -> Iterator[dict[str, object]]:
    """The rows of one model on one pair of devices."""
    about = provenance()
    main, other, bytes_per_s = graphs
    peak_bytes = summarize(main).store_all_peak_bytes
    times = tuple(op.time_s for op in other.ops)
    for budget in budgets:
        unlimited = budget == NO_LIMIT
        budget_bytes = budget_in_bytes("1000%" if unlimited else budget, peak_bytes)
        second = OtherDevice("other", times, bytes_per_s, None if unlimited else budget_bytes)
        both = with_options(main, ("placement",), Surroundings(Link.even(bytes_per_s), others=(second,)))
        for method, graph, solver in (
            (METHODS[0], main, "windows"),
            (METHODS[1], other, "windows"),
            (METHODS[2], both, "xengine"),
            (METHODS[3], both, "xengine-overlapped"),
        ):
            params = XEngineParams(again=not unlimited) if graph is both else None
            request = Request(graph, budget_bytes, Tolerance.of(TOLERANCE), WallClock(limit_s), params=params)
            result = get_solver(solver)(request)
            row = dict.fromkeys(COLUMNS) | about | _moved(graph, result)
            row |= {"model": name, "pair": pair, "ops": len(main.ops), "budget": budget, "method": method}
            row |= {"status": _status(result), "time_s": result.time_s, "bound_s": result.bound_s, "seconds": result.seconds}
            row |= {key: result.settings.get(key) for key in ("serial_s", "serial_bound_s")}
            yield row | {"budget_bytes": budget_bytes, "peak_bytes": result.peak_bytes}


def _status(result: Result) -> str:
    """The serial optimum is one of its sum, which is no bound on its makespan."""
    serial_s, bound_s = result.settings.get("serial_s"), result.settings.get("serial_bound_s")
    if result.bound_s is None and isinstance(serial_s, float) and isinstance(bound_s, float):
        return Status.OPTIMAL if serial_s <= bound_s * (1 + TOLERANCE) else Status.FEASIBLE
    return result.status


def _moved(graph: Graph, result: Result) -> dict[str, object]:
    computed = () if result.schedule is None else result.schedule.computed
    optional = [graph.ops[op] for op in computed if graph.ops[op].optional]
    placed = sum(bool(op.stands_for) for op in optional)
    return {"placed": placed, "copied": len(optional) - placed}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Time of each method, and what the best for both side by side gains over the serial optimum."""
    cells = [("model", "devices", "budget", *METHODS, "serial, side by side", "gain over serial", "bound on overlapped")]
    for model, pair, budget in dict.fromkeys((row["model"], row["pair"], row["budget"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["model"], row["pair"], row["budget"]) == (model, pair, budget)}
        times = {method: row["serial_s"] if method == METHODS[2] else row["time_s"] for method, row in found.items()}
        serial_s, overlapped_s = times.get(METHODS[2]), times.get(METHODS[3])
        side = found.get(METHODS[2], {}).get("time_s")
        bound = found.get(METHODS[3], {}).get("bound_s")
        gain = serial_s / overlapped_s - 1 if isinstance(serial_s, float) and isinstance(overlapped_s, float) else None
        cells.append(
            (
                *(str(value) for value in (model, pair, budget)),
                *(_cell(found.get(method), times.get(method)) for method in METHODS),
                format_seconds(side) if isinstance(side, float) else "",
                format_ratio(gain) if gain is not None else "",
                format_seconds(bound) if isinstance(bound, float) else "",
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
    rows: list[dict[str, object]] = []
    for pair in PAIRS:
        for name in arguments.models:
            torch.manual_seed(0)
            for row in compare(name, pair, pair_of(MODELS[name](), pair), BUDGETS, limit_s=LIMIT_S):
                rows.append(row)
                write(arguments.out, COLUMNS, rows, table(rows))


if __name__ == "__main__":
    main()
