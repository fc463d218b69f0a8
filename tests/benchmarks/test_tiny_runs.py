"""Every benchmark on a tiny case, from its arguments to its table: its rows keep the promises of the committed ones."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks import compression, first_step, placement, reserved
from benchmarks.command import Main
from benchmarks.compiled_case import ATEN, IN_ARENA, OURS, PEAK_OF, REFERENCE, Settings
from benchmarks.gpu import host as gpu_host
from benchmarks.offload import METHODS as OFFLOAD_METHODS, Suite
from benchmarks.options_table import BUDGETS as OPTION_BUDGETS
from benchmarks.solve_suites import Instance, make_between
from benchmarks.training_loop import Recipe
from planner.capture.signature import Batch
from planner.capture.workload.models import Workload, build
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.settings.plan import PlanSettings
from planner.studies.baselines import build_memory_budget
from tests.support import first_step_tiny
from tests.support.cuda_device import cuda_device, on_device
from tests.support.eager.solves import SolvedWhenWaitedFor
from tests.support.models.steps import make
from tests.support.promises import PROMISES, find_broken

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="some benchmarks measure memory as on Linux")


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A benchmark on a case of its own.

    Attributes:
        folder: of its results, whose promises its rows keep.
        words: arguments.
        keys: the columns that its rows differ in, and their values, in the order of rows.
        changes: values of attributes, by names of modules.
        promises: more of them, which rows of a real machine need not keep.
        said: what the table says.
    """

    folder: str
    words: str
    keys: tuple[Sequence[str], Sequence[Sequence[str]]]
    changes: Mapping[str, Any] = field(default_factory=dict)
    promises: Sequence[str] = ()
    said: Sequence[str] = ()


def run_here(function: Callable[..., Iterator[Any]], *arguments: Any, **_: Any) -> Iterator[Any]:
    """Call a function in this process, whose modules are changed, in place of ``iterate_results``."""
    return function(*arguments)


def generate_points(like: Batch, count: int, seed: int) -> Iterator[Batch]:
    """Yield inputs, and classes that follow from them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(like[0].shape, generator=generator)
        yield x, x[:, :10].argmax(1)


def build_linear() -> Workload:
    return Workload(nn.Linear(4, 4), nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 4)))


def make_quick_pair(step: Workload, name: str) -> placement.Pair:
    """Return the devices, with one that takes next to no time."""
    pair = MEASURE_PAIR(step, name)
    times_s = tuple(time_s and 1e-9 for time_s in pair.second.times_s)
    return replace(pair, second=replace(pair.second, times_s=times_s, bytes_per_s=1e12, latency_s=0.0))


def build_on_device(*, device: str) -> Workload:
    return on_device(build("mlp", batch=64, layers=2, width=16, classes=3), f"{device}:0")


MEASURE_PAIR = placement.pair_of
RECIPE = Recipe(partial(build, "mlp", layers=2, width=32, batch=256, classes=10, dropout=0.1), "adamw", rate=1e-2)
GPT2 = "zoo:gpt2,layers={},width=32,heads=2,vocab=50,batch={},seq={}"
HALF = build_memory_budget(0.5, "inductor").name
SHARES = ("100%", "70%", "1%")
INSTANCE = Instance(
    "reference", "chain", partial(draw_training_step, 1, 5), (make_between(0.5),), ("windows", "checkmate"), time_limit_s=20.0
)
HOST_WAYS = [way for way in gpu_host.WAYS if way != gpu_host.COMPILED]  # Inductor compiles for a real device
ON_GPU = {"MODELS": {"tiny": build_on_device}}

RUNS = {
    "addresses": TinyRun(
        "addresses",
        "--models public,mlp",
        (("name", "budget"), [("mlp", "100%"), ("mlp", "80%")]),
        {"MODELS": {"mlp": GPT2.format(2, 8, 32)}, "BUDGETS": ("100%", "80%"), "INSTANCES": Path("none")},
    ),
    "arena_training": TinyRun(
        "arena_training",
        "--models vit --repeats 1",
        (("optimizer",), [("adamw, foreach",)]),
        {
            "MODELS": {"vit": partial(build, "mlp", batch=256, layers=3, width=64, classes=10, dropout=0)},
            "OPTIMIZERS": {"adamw, foreach": import_module("benchmarks.arena_training").OPTIMIZERS["adamw, foreach"]},
            "iterate_results": run_here,
        },
        ("plain_bytes <= slab_bytes + given_bytes",),
    ),
    "compression": TinyRun(
        "compression",
        "--models mlp --steps 3 --seed 5",
        (
            ("bits", "step"),
            [(bits, str(step)) for bits in (*compression.BITS, compression.OTHER_WEIGHTS) for step in range(3)],
        ),
        {"CASES": {"mlp": compression.LearningCase(RECIPE, generate_points)}},
    ),
    "eager": TinyRun(
        "eager",
        "--models tree --steps 1 --ways lru,planned",
        (
            ("share", "heuristic"),
            [("nothing evicted", "dtr"), ("nothing evicted, near", "dtr"), ("70%", "lru"), ("70%", "planned")],
        ),
        {
            "SHARES": (0.7,),
            "planner.train.eager.step_plans.BackgroundSolve": SolvedWhenWaitedFor,
            "planner.train.eager.step_plans.PlanSettings": partial(PlanSettings, work_limit=0.5),
        },
    ),
    "gpu.host": TinyRun(
        "gpu/host",
        f"--models tiny --ways {','.join(HOST_WAYS)}",
        (("way",), [(way,) for way in HOST_WAYS]),
        ON_GPU | {"_SHARE": "110MB", "_SOLVE_S": 2.0},  # a CUDA graph keeps whole segments
        (
            "forward_host_s > 0 and backward_host_s > 0 and step_s > 0 and allocated_bytes <= reserved_bytes",
            # The device has a clock of its own: what keeps it busy before is not counted.
            "0 < forward_device_s < 1e-3 and 0 < backward_device_s < 1e-3",
        ),
    ),
    "gpu.plans": TinyRun(
        "gpu/plans",
        "--models tiny --ways recompute,offload --shares 90%",
        (("way", "share"), [("eager", ""), ("recompute", "90%"), ("offload", "90%")]),
        ON_GPU | {"_SOLVE_S": 0.5, "_REPEATS": 2},
        ("bits and allocated_bytes <= budget_bytes",),
    ),
    "gpu.plans in a graph": TinyRun(
        "gpu/plans",
        "--models tiny --ways cuda-graph --shares 110MB",
        (("way",), [("eager",), ("cuda-graph",)]),
        ON_GPU | {"_SOLVE_S": 0.5, "_REPEATS": 2},
        ("bits and reserved_bytes + library_bytes <= budget_bytes",),
    ),
    "offload": TinyRun(
        "offload",
        "--models small --suites little",
        (("budget", "method"), list(product(("60%", "1%"), OFFLOAD_METHODS))),
        {
            "MODELS": {"small": "a random step"},
            "SUITES": {"little": Suite("h200", "2GB/s", {"small": ("60%", "1%")})},
            "HOST": "1GB",
            "LIMIT_S": 1.0,
            "build_graph": lambda *_: draw_training_step(5, 20),
        },
        (
            "budget == '60%' or method not in ('recompute only', 'both') or status == 'infeasible'",
            "budget == '1%' or method not in ('recompute only', 'offload only', 'both') or time_s > base_s",
            "method != 'recompute only' or recomputed > 0",
            "method != 'offload only' or copied > 0 and host_bytes > 0",
            "budget == '1%' or method != 'poet' or status != 'error'",
        ),
        ("Slower than either alone: 0.", "Methods below the bound: 0."),
    ),
    "options": TinyRun(
        "options",
        "--models small --options offload,chunks --work 0.1",
        (("options", "budget"), list(product(("none", "offload", "chunks", "offload+chunks"), OPTION_BUDGETS))),
        {"MODELS": {"small": "zoo:mlp,batch=64,width=32,layers=2,classes=2000"}},
        # The logits are most of the peak: without chunks they cannot be less.
        ("budget != '50%' or (status == 'infeasible') != options.str.contains('chunks')",),
        ("Schedules below a bound: 0.", "offload + chunks", "Worse with an option more, by over 0.1%: 0;"),
    ),
    "placement": TinyRun(
        "placement",
        "--models chain",
        (("budget", "method"), list(product(placement.BUDGETS, placement.METHODS))),
        {"LIMIT_S": 2.0, "PAIRS": placement.PAIRS[:1]},
    ),
    "reserved": TinyRun(
        "reserved",
        "--models mlp",
        (("counts", "budget"), list(product(reserved.COUNTS, reserved.BUDGETS))),
        {"MODELS": {"mlp": GPT2.format(1, 2, 16)}, "PLAN_LIMIT_S": 0.3},
        ("counts != 'reserved' or budget != '40%' or status.str.startswith('InfeasibleError')",),
    ),
    "resident": TinyRun(
        "resident",
        "--models unet",
        (("budget", "way"), [("95%", "plan"), ("95%", "arena")]),
        {"MODELS": {"unet": partial(make, "unet")}, "BUDGETS": ("95%",), "iterate_results": run_here},
    ),
    "solve": TinyRun(
        "solve",
        "--suites reference,moccasin --instances none",
        (("solver",), [("windows",), ("checkmate",)]),
        {"SUITES": {"reference": lambda published: iter([INSTANCE]), "moccasin": lambda published: iter(())}},
        ("status == 'optimal'",),
        ("costs agree in 1 of 1",),
    ),
}
SLOW_RUNS = {
    "compiled": TinyRun(
        "compiled",
        "--device cpu --models gpt2 --repeats 2",
        (
            ("method", "budget"),
            [
                *((REFERENCE, ""), *product((ATEN,), SHARES), (HALF, "")),
                *product((OURS,), (*SHARES, f"{PEAK_OF}{HALF}")),
                *product((IN_ARENA,), SHARES),
            ],
        ),
        {
            "MODELS": {"gpt2": partial(build, "gpt2", layers=2, width=32, heads=4, vocab=97, seq=24, batch=8)},
            "Settings": partial(Settings, shares=(1.0, 0.7, 0.01), fractions=(0.5,), time_limit_s=5.0),
        },
    ),
    "first_step": TinyRun(
        "first_step",
        f"--models {first_step_tiny.NAME}",
        (("way",), [(way,) for way in first_step.WAYS]),
        {"CASES": first_step_tiny.TINY},
        ("way != 'uncapped' or training_rss_bytes - ready_rss_bytes > 0.8 * eager_growth_bytes",),
    ),
    "placement": TinyRun(
        "placement",
        "--models chain",
        (("method",), [(method,) for method in placement.METHODS]),
        {
            "LIMIT_S": 2.0,
            "MODELS": {"chain": build_linear},
            "PAIRS": placement.PAIRS[1:2],
            "BUDGETS": placement.BUDGETS[:1],
            "pair_of": make_quick_pair,
        },
        ("predicted_other_bytes > 0 and executed_peak_bytes <= peak_bytes and executed_s > 0 and placed > 0",),
    ),
}

TO_RUN = ((RUNS, ()), (SLOW_RUNS, pytest.mark.slow))


@pytest.mark.parametrize(
    ("name", "run"),
    [pytest.param(name, run, marks=marks, id=name) for runs, marks in TO_RUN for name, run in runs.items()],
)
def test_a_tiny_case_has_rows_that_keep_their_promises(
    name: str, run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out = import_module(f"benchmarks.{name.partition(' ')[0]}"), tmp_path / "results"
    for attribute, value in run.changes.items():
        monkeypatch.setattr(*((attribute,) if "." in attribute else (module, attribute)), value)
    main = module.main
    if isinstance(main, Main):
        main = replace(main, models=run.changes.get("MODELS", run.changes.get("CASES", main.models)))
    columns, keys = run.keys
    with cuda_device() if name.startswith("gpu") else nullcontext():
        pages = []
        for _ in range(2):  # nothing is made again
            assert main([*run.words.split(), "--out", str(out)]) == 0
            pages.append((out / "rows.csv").read_text())
    assert pages[0] == pages[1]
    rows, table = pd.read_csv(out / "rows.csv"), (out / "table.md").read_text()
    assert [*rows[list(columns)].fillna("").astype(str).itertuples(index=False, name=None)] == [*map(tuple, keys)]
    broken = {promise: find_broken(rows, promise)[1] for promise in (*PROMISES.get(run.folder, ()), *run.promises)}
    assert not any(broken.values()), broken
    assert [line for line in run.said if line not in table] == []
