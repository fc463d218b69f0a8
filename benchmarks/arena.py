"""Steps in an arena beside the same steps without, and beside eager PyTorch: ``make bench-arena`` writes results/arena/.

The three take turns in a process with one thread, and the pages that the system gives them are counted (minor faults). Each row
comes twice: with the C library as it is, which returns large blocks to the system when they are freed, and set to keep them
(MALLOC_TOP_PAD_ and others), which no planned step needs and any process could. Ratios are medians within a turn.
"""

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import torch

import planner
from benchmarks.command import Main, Setting, limit_threads
from benchmarks.zoo_models import CPU_MODELS
from graphs.units import format_bytes
from planner.capture.options.traced import replace_graph
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import build
from planner.measure.steps import Isolated, Step, measure_outcome
from planner.plans.plan import Plan
from planner.runtime.allocator import measure_memory_rise
from planner.runtime.arena import SharedSlab
from planner.runtime.arena_allocator import keep_idle_pages
from planner.runtime.executor import Executor
from planner.settings.option_settings import apply_recorded_options
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, iterate_results
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, find_missing_keys, order_by
from planner.studies.tables import Column, share_column

MODELS = {
    "gpt2": partial(build, "gpt2", layers=4, width=64, heads=4, vocab=500, batch=8, seq=128, dropout=0),
    "unet": CPU_MODELS["unet"],
    "unet-wide": partial(build, "unet", channels=16, size=96, batch=4),
    "resnet50-wide": CPU_MODELS["resnet50-wide"],
    "mobilenet_v2": CPU_MODELS["mobilenet_v2"],
}
_EAGER, _PLAN, _ARENA = "eager", "plan", "arena"
BUDGETS = ("100%", "70%", "50%")
USUAL, KEPT = "as it is", "keeps memory"
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    USUAL: {},
    KEPT: {"MALLOC_TOP_PAD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}
_LIMIT_S = 600.0
_SOLVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRow(Made):
    """The measurements of a model at a budget."""

    model: str = declare_key()
    budget: str = declare_key("a share of the peak of keeping everything")
    library: str = declare_key("how the C library treats freed memory")
    peak_bytes: int = declare_column("of the plan, without static memory")
    arena_bytes: int = declare_column("the slab that the step runs in")
    outside_bytes: int = declare_column("the most that the step takes outside of it at once, as the arena counts")
    counted_bytes: int = declare_column("the same as PyTorch's profiler counts")
    identical: bool = declare_column("True if loss, gradients, buffers and random state in the arena are those of eager PyTorch")
    eager_s: float = declare_column("a step of eager PyTorch")
    plan_ratio: float = declare_column("steps of the plan without an arena, as multiples of eager PyTorch's")
    arena_ratio: float = declare_column("steps of the plan in an arena")
    eager_faults: int = declare_column("pages that the system gave in a step of eager PyTorch")
    plan_faults: int = declare_column("the same of the plan without an arena")
    arena_faults: int = declare_column("the same of the plan in an arena")
    repeats: int = declare_column("steps that are timed of each")


def measure(name: str, known: Sequence[ArenaRow], *, repeats: int) -> Iterator[ArenaRow]:
    """Yield the rows of a model that are not `known`, each measured in a process of its own."""
    missing = find_missing_keys(product(BUDGETS, _VARIABLES), known, "budget", "library")
    if not missing:
        return
    torch.manual_seed(0)
    graph = planner.trace(*MODELS[name]())
    plans = {budget: planner.solve(graph, budget, arena=True, time_limit_s=_SOLVE_S) for budget in dict(missing)}
    for budget, library in missing:
        variables = {**ALONE, **_VARIABLES[library]}
        yield from iterate_results(
            measure_plan, name, budget, library, plans[budget], repeats, variables=variables, limit_s=_LIMIT_S
        )


def measure_plan(name: str, budget: str, library: str, plan: Plan, repeats: int) -> Iterator[ArenaRow]:
    """Yield the row of a plan."""
    limit_threads()
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    captured = capture(model, loss_fn, batch)
    offered = replace_graph(captured, apply_recorded_options(captured.graph, plan.settings))
    in_arena = Executor(offered, plan.schedule, model, loss_fn)
    in_arena.use_arena(SharedSlab())
    arena = in_arena.arena
    assert arena is not None
    steps: dict[str, Step] = {
        _EAGER: TrainingStep(model, loss_fn),
        _PLAN: Executor(offered, plan.schedule, model, loss_fn),
        _ARENA: in_arena,
    }
    isolated = {each: Isolated(step, model, batch) for each, step in steps.items()}
    isolated[_ARENA].run()  # recorded
    outcomes = {each: measure_outcome(steps[each], model, batch, seed=0) for each in (_EAGER, _ARENA)}
    counted_bytes = measure_given_bytes(isolated[_ARENA].run)
    times_s, faults = _run_in_turns(isolated, repeats)
    assert arena.size_bytes is not None
    assert arena.outside_bytes is not None
    ratios = {each: median(a / b for a, b in zip(times_s[each], times_s[_EAGER], strict=True)) for each in steps}
    yield ArenaRow(
        model=name,
        budget=budget,
        library=library,
        peak_bytes=plan.peak_bytes - plan.graph.static_bytes,
        arena_bytes=arena.size_bytes,
        outside_bytes=arena.outside_bytes,
        counted_bytes=counted_bytes,
        identical=not outcomes[_EAGER].list_differences(outcomes[_ARENA]),
        eager_s=median(times_s[_EAGER]),
        plan_ratio=ratios[_PLAN],
        arena_ratio=ratios[_ARENA],
        eager_faults=int(median(faults[_EAGER])),
        plan_faults=int(median(faults[_PLAN])),
        arena_faults=int(median(faults[_ARENA])),
        repeats=repeats,
        **collect_provenance(),
    )


def _run_in_turns(steps: Mapping[str, Isolated], repeats: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Return the seconds and the page faults of the steps, which take turns, after one turn that is not counted."""
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    faults: dict[str, list[int]] = {name: [] for name in steps}
    with keep_idle_pages():
        for turn in range(repeats + 1):
            for name, step in steps.items():
                before, start = _count_faults(), time.perf_counter()
                step.run()
                if turn:
                    times_s[name].append(time.perf_counter() - start)
                    faults[name].append(_count_faults() - before)
    return times_s, faults


def _count_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure_given_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that PyTorch's allocator gives `run` at once."""
    return measure_memory_rise(run, torch.device("cpu")).peak_bytes


TABLE = (
    *("model", "budget"),
    Column("C library", "library"),
    Column("peak", "peak_bytes", format_bytes),
    share_column("arena", "arena_bytes", "peak_bytes", "{:.4f}x"),
    Column("outside", "counted_bytes", format_bytes),
    Column("bits", "identical", lambda same: "identical" if same else "DIFFERENT"),
    Column("eager step", "eager_s"),
    Column("plan", "plan_ratio"),
    Column("plan in an arena", "arena_ratio"),
    Column("page faults: eager", "eager_faults", "{:,}"),
    Column("plan", "plan_faults", "{:,}"),
    Column("arena", "arena_faults", "{:,}"),
)


STUDY = Study(
    ArenaRow, measure, whole=False, order=order_by(model=MODELS, budget=BUDGETS, library=_VARIABLES), pages={"table.md": TABLE}
)
main = Main(STUDY, MODELS, settings={"repeats": Setting(20, "steps timed of each")})
