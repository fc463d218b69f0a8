"""Suites of ``benchmarks.solve``: training graphs, each at some budgets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from benchmarks.solves import build_graph
from planner.graphs.importers import import_graph
from planner.graphs.ir import Graph
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.plans.summary import summarize
from planner.solvers.clock import WallClock
from planner.solvers.least import bracket_least_budget

PUBLISHED = ("checkmate-24h", "moccasin")  # suites that are other people's graphs alone
REFERENCE_LIMIT_S = 600.0
_LEAST_LIMIT_S = 10.0

ZOO = {
    "gpt2-12": "zoo:gpt2,layers=12,batch=8,dtype=bfloat16",
    "gpt2-24": "zoo:gpt2,layers=24,batch=8,dtype=bfloat16",
    "gpt2-48": "zoo:gpt2,layers=48,batch=8,dtype=bfloat16",
    "gpt2-96": "zoo:gpt2,layers=96,batch=8,dtype=bfloat16",
    "llama-32": "zoo:llama,layers=32,batch=8,dtype=bfloat16",
    "vit-l": "zoo:vit,layers=24,width=1024,heads=16,batch=64,dtype=bfloat16",
    "resnet50": "zoo:resnet50,batch=64",
    "resnet152": "zoo:resnet152,batch=64",
    "unet": "zoo:unet,batch=4",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=64",
    "densenet121": "zoo:densenet121,batch=64",
}
ZOO_SHARES = (0.75, 0.5, 0.25, 0.1, 0.03)
GROWTH = {f"gpt2-{n}": f"zoo:gpt2,layers={n},batch=8,dtype=bfloat16" for n in (6, 12, 24, 48, 96)}

# Instances that the reference solves in a minute or two, three times each.
REFERENCE_PUBLISHED = {"vgg16-176": (10,)}
REFERENCE_SYNTHETIC: dict[str, Callable[[], Graph]] = {
    "random-1-10": partial(draw_training_step, 1, 10),
    "random-2-15": partial(draw_training_step, 2, 15),
    "random-3-20": partial(draw_training_step, 3, 20),
}


class Landmarks:
    """The budgets of a graph between which others are chosen, in bytes; each found when first asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return summarize(self._graph).keep_everything_peak_bytes

    @cached_property
    def least_bytes(self) -> int:
        """The least that a schedule was found for in some seconds."""
        return bracket_least_budget(self._graph, clock=WallClock(_LEAST_LIMIT_S)).found_bytes

    def compute_share_bytes(self, share: float) -> int:
        """Return `share` of the peak."""
        return int(share * self.peak_bytes)

    def compute_between_bytes(self, share: float) -> int:
        """Return the budget at `share` of the way from the least budget to the peak."""
        return int(self.least_bytes + share * (self.peak_bytes - self.least_bytes))

    def find_half_way_bytes(self, shares: tuple[float, ...]) -> int:
        """Return the budget half way from the lowest feasible one of `shares` of the peak to the least budget."""
        budgets = map(self.compute_share_bytes, (1.0, *shares))
        return (self.least_bytes + min(budget for budget in budgets if budget >= self.least_bytes)) // 2


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget by name, and the published result at it: seconds of the step, and seconds of its solve."""

    label: str
    bytes_at: Callable[[Landmarks], int]
    reference_time_s: float | None = None
    reference_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph of a suite, built by `make` (in another process: torch stays out of this one), and its solves.

    Attributes:
        make: builds the graph; can be pickled.
        solvers: each solves each budget, one after the other.
        runs: of each, for the median of their times.
    """

    suite: str
    graph: str
    make: Callable[[], Graph]
    budgets: tuple[Budget, ...]
    solvers: tuple[str, ...] = ("windows",)
    runs: int = 1
    time_limit_s: float = 60.0


def list_checkmate_24h(published: Path) -> Iterator[Instance]:
    """Yield the instances published with Gurobi's results."""
    for file in sorted((published / "checkmate-24h").glob("*.json")):
        yield Instance("checkmate-24h", file.stem, partial(import_graph, file), _read_published_budgets(file), runs=3)


def list_reference(published: Path) -> Iterator[Instance]:
    """Yield small graphs for Checkmate's program as published, by the same HiGHS, and the exact solver in turns."""
    for name, make in REFERENCE_SYNTHETIC.items():
        yield _make_reference_instance(name, make, (make_between(0.5), make_between(0.25)))
    for name, sizes in REFERENCE_PUBLISHED.items():
        file = published / "checkmate-24h" / f"{name}.json"
        if file.exists():
            asked = {f"{size} GiB" for size in sizes}
            budgets = tuple(budget for budget in _read_published_budgets(file) if budget.label in asked)
            yield _make_reference_instance(name, partial(import_graph, file), budgets[::-1])


def list_growth(published: Path) -> Iterator[Instance]:
    """Yield one model with more and more layers."""
    for name, spec in GROWTH.items():
        yield Instance("growth", name, partial(build_graph, spec), (make_between(0.5),), runs=3)


def list_zoo(published: Path) -> Iterator[Instance]:
    """Yield models traced for an H200."""
    for name, spec in ZOO.items():
        yield Instance("zoo", name, partial(build_graph, spec), tuple(map(make_between, ZOO_SHARES)))


def list_moccasin(published: Path) -> Iterator[Instance]:
    """Yield training graphs at shares of their peak and below, and random layered graphs."""
    for file in sorted((published / "moccasin").glob("*.json")):
        shares = (0.9, 0.8) if file.stem.startswith("random") else (0.9, 0.8, 0.7, 0.6, 0.5)
        budgets = tuple(map(make_share_of_peak, shares))
        if not file.stem.startswith("random"):
            budgets += (Budget("half way to least", methodcaller("find_half_way_bytes", shares)),)
        yield Instance("moccasin", file.stem, partial(import_graph, file), budgets)


def make_share_of_peak(share: float) -> Budget:
    """Return the budget at `share` of the peak without recomputation."""
    return Budget(f"{share:.0%} of peak", methodcaller("compute_share_bytes", share))


def make_between(share: float) -> Budget:
    """Return the budget at `share` of the way from the least budget to the peak."""
    return Budget(f"least + {share}", methodcaller("compute_between_bytes", share))


def _make_reference_instance(name: str, make: Callable[[], Graph], budgets: tuple[Budget, ...]) -> Instance:
    return Instance("reference", name, make, budgets, ("windows", "checkmate"), runs=3, time_limit_s=REFERENCE_LIMIT_S)


def _read_published_budgets(file: Path) -> tuple[Budget, ...]:
    """Return the budgets with known results of Gurobi, named by the size of the device."""
    known: Any = import_graph(file).provenance["reference"]
    sizes = [(entry["budget_bytes"], entry["time_s"], entry["seconds"]) for entry in known]
    return tuple(Budget(f"{size_bytes / 2**30:g} GiB", partial(_get_fixed, size_bytes), *found) for size_bytes, *found in sizes)


def _get_fixed(size_bytes: int, at: Landmarks) -> int:
    return size_bytes


# Each takes the folder of other people's graphs.
SUITES: dict[str, Callable[[Path], Iterator[Instance]]] = {
    "checkmate-24h": list_checkmate_24h,
    "reference": list_reference,
    "growth": list_growth,
    "zoo": list_zoo,
    "moccasin": list_moccasin,
}
