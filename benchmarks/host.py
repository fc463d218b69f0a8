"""The time that the host takes for a step: ``make bench-host`` writes results/host/, ``make bench-executor`` results/executor/.

Tensors are tiny, so that kernels take next to nothing and a step takes as long as what launches them; those of the models whose
names begin with ``cpu-`` are larger, which shows the overhead of the executor beside kernels that take time. Eager PyTorch,
checkpointing by blocks, ``torch.compile`` (default, and ``mode="lite"``) and planned steps take turns of two steps on one thread,
in a random order; the second is timed, and ratios are medians within a turn. Plans have budgets of 100, 70 and 50% of the peak,
or 1.1 times the least where that is more; a plan that is the same for less memory is run once. The plan at 100% runs in Python
too, to compare both kinds of passes, and a plan of Inductor's kernels, beside ``torch.compile``'s own calls. Of the plan at 100%
in addition: the time to check, before each step, that it still applies, and the measured time of steps as a multiple of the one
that plans predict after the first steps, whose ops are timed, in turns with those.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch

import planner
from benchmarks.command import Main, Setting
from benchmarks.models.dense import recommender
from benchmarks.models.huggingface_models import build_image_model, build_token_model
from benchmarks.models.sequences import lstm_tagger
from benchmarks.zoo_models import CPU_MODELS
from planner.capture.lowering.lower import Capture
from planner.capture.signature import Batch, call
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.measure.observation import OpTimer
from planner.measure.steps import Step, compute_ratio, get_loss, turn_times
from planner.measure.timing import compute_typical
from planner.measure.tracing import profile_capture
from planner.native.library import wait_for_library
from planner.native.passes import use_python_passes
from planner.plans.solve import solve
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.executor import Executor
from planner.settings.plan import PlanSettings
from planner.solvers.bounds import bound_least_budget
from planner.solvers.order.peak import keep_everything_peak_bytes
from planner.studies.baselines import build_checkpoint_blocks, copy_code
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_value, order_by
from planner.studies.tables import Column

_LAYERS, _WIDTH, _HEADS = 12, 8, 2
SHARES = (1.0, 0.7, 0.5)
WHOLE = "planned at 100%"
IN_PYTHON = "planned at 100%, in Python"
INDUCTOR = "planned at 200%, Inductor's kernels"  # whose workspaces may take more than eager PyTorch's
_ROOM = 1.1  # above the least budget
_SOLVE_S = 20.0
_WARM_UP = 3  # steps of each that are not timed
_CHECKS = 500
_TIMED = 3  # steps whose ops are timed, as in training, and as many beside them


_BERT = {"hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "intermediate_size": 16}
_IMAGE = {"image_size": 16, "patch_size": 8}
# As narrow, with more tokens, activations take more than parameters: there is something to plan.
_TOKENS = {"batch": 2, "length": 16, "vocabulary": 64}
_GPT2 = {"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "use_cache": False}
_T5 = {"d_model": _WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 6, "num_heads": _HEADS, "decoder_start_token_id": 0}
TINY: dict[str, Callable[[], Workload]] = {
    "gpt2": partial(build_token_model, "GPT2Config", "GPT2LMHeadModel", **_TOKENS, **_GPT2),
    "bert": partial(build_token_model, "BertConfig", "BertForMaskedLM", **_TOKENS, **_BERT),
    "t5": partial(build_token_model, "T5Config", "T5ForConditionalGeneration", **_TOKENS, **_T5, use_cache=False),
    "llama": partial(build_token_model, "LlamaConfig", "LlamaForCausalLM", **_TOKENS, **_BERT, use_cache=False),
    "vit": partial(build_image_model, "ViTConfig", "ViTForImageClassification", batch=8, size=16, **_IMAGE, **_BERT),
    "resnet50": partial(build, "resnet50", width=8, size=32, classes=10, batch=2),
    "unet": partial(build, "unet", channels=4, depth=4, size=32, batch=1),
    "mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=32, classes=10, batch=2),
    "lstm": partial(lstm_tagger, rows=1),
    "dlrm": partial(recommender, rows=2),
}
MODELS = TINY | {f"cpu-{name}": make for name, make in CPU_MODELS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow(Made):
    """The times of one way to run a model."""

    model: str = declare_key()
    way: str = declare_key()
    ops: int = declare_column("of the captured step")
    eager_s: float = declare_column("a step of eager PyTorch")
    ratio: float | None = declare_column("steps, as multiples of eager PyTorch's; unknown where the way fails")
    forward_ratio: float | None = declare_column("the same of forward passes")
    backward_ratio: float | None = declare_column("the same of backward passes")
    around_ratio: float | None = declare_column(
        "what a planned step takes besides its passes: guards, lookups, checks, its autograd function; as a share of eager "
        "PyTorch's step"
    )
    gradients_ratio: float | None = declare_column(
        "what autograd takes after the backward pass to give gradients to parameters, which it does for eager PyTorch too"
    )
    predicted_ratio: float | None = declare_value("steps, as multiples of what plans predict from ops timed in such steps")
    check_s: float | None = declare_value("to look, before each step, whether all is as it was planned for")
    repeats: int = declare_column("steps that are timed")


class PassTimes:
    """A stage of a step that adds up the seconds of its passes.

    Attributes:
        seconds: those so far.
        end: when the last backward pass ended.
    """

    def __init__(self) -> None:
        self.seconds = self.end = 0.0

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass; see ``planner.runtime.code.Stage``."""
        start = time.perf_counter()
        returned = run(static)
        self.seconds += time.perf_counter() - start
        return returned

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass."""
        start = time.perf_counter()
        gradients = run(static, saved)
        self.end = time.perf_counter()
        self.seconds += self.end - start
        return gradients


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the steps of one way, in turns.

    Attributes:
        forward, backward: of the whole step.
        around: what is not in passes of a plan.
        gradients: from the end of a plan's backward pass to the end of ``backward()``; not in `around`.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]


def measure(name: str, known: Sequence[HostRow], *, repeats: int) -> Iterator[HostRow]:
    """Yield the rows of a model."""
    warnings.simplefilter("ignore")
    wait_for_library()
    torch.manual_seed(0)
    workload = MODELS[name]()
    captured = profile_capture(capture(*workload), workload, PlanSettings(passes=3))
    eager = TrainingStep(workload.model, workload.loss_fn)
    steps: dict[str, Step] = {"eager": eager}
    for way, make in _list_other_ways(workload, eager).items():
        workload.model.zero_grad()
        try:
            step = make()
            get_loss(call(step, workload.batch)).backward()
        except Exception as error:  # noqa: BLE001  # a row says that it fails
            print(f"{way} fails on {name}: {str(error).splitlines()[0]}")
        else:
            steps[way] = step
    steps.update(_make_planned_steps(captured, workload))
    times = _take_turns(steps, workload, repeats)
    eager_times = times["eager"]
    whole = steps[WHOLE]
    assert isinstance(whole, Executor)
    of_plan = {
        "predicted_ratio": compare_with_predicted(whole, workload.batch, turns=max(1, repeats // _TIMED)),
        "check_s": measure_check_s(whole, workload.batch),
    }
    for way in WAYS:
        found = times.get(way)
        yield HostRow(
            model=name,
            way=way,
            ops=len(captured.graph.ops),
            eager_s=median(eager_times.both),
            ratio=None if found is None else compute_ratio(found.both, eager_times.both)[0],
            forward_ratio=None if found is None else compute_ratio(found.forward, eager_times.forward)[0],
            backward_ratio=None if found is None else compute_ratio(found.backward, eager_times.backward)[0],
            around_ratio=compute_ratio(found.around, eager_times.both)[0] if found is not None and found.around else None,
            gradients_ratio=compute_ratio(found.gradients, eager_times.both)[0] if found is not None and found.around else None,
            repeats=repeats,
            **(of_plan if way == WHOLE else {}),
            **collect_provenance(),
        )


def compare_with_predicted(executor: Executor, batch: Batch, *, turns: int) -> float:
    """Return the time of steps as a multiple of what is predicted from the times of their ops, measured in turns."""
    ratios = []
    take = partial(turn_times, {"executor": executor}, batch, parameters=list(executor.training_step.parameters()))
    for _ in range(turns):
        timer = OpTimer(executor, steps=_TIMED - 1)
        while not timer.done:
            take(repeats=1, warm_up=False)
        predicted = simulate(timer.correct_costs(executor.graph), executor.schedule)
        ratios.append(compute_typical(take(repeats=_TIMED, warm_up=False)["executor"], executor.device) / predicted.step_s)
    return median(ratios)


def measure_check_s(executor: Executor, batch: Batch) -> float:
    """Return the median time in which the executor checks guards and batch before a step."""
    times = []
    for _ in range(_CHECKS):
        start = time.perf_counter()
        call(executor.check, batch)
        times.append(time.perf_counter() - start)
    return median(times)


def _list_other_ways(workload: Workload, eager: TrainingStep) -> dict[str, Callable[[], Step]]:
    """Return functions that make the steps to compare with, by name."""
    compiled = partial(torch.compile, copy_code(eager), dynamic=False)
    return {
        "checkpointing by blocks": lambda: build_checkpoint_blocks().prepare(workload.model, workload.loss_fn),
        "torch.compile": compiled,
        'torch.compile(mode="lite")': partial(compiled, mode="lite"),
        INDUCTOR: lambda: planner.compile(*workload, budget="200%", kernels="inductor", on_progress=False).debug,
    }


def _make_planned_steps(captured: Capture, workload: Workload) -> Iterator[tuple[str, Executor]]:
    """Yield the planned steps: in C++ at each budget, and in Python at the peak."""
    peak = keep_everything_peak_bytes(captured.graph)
    least = bound_least_budget(captured.graph).budget_bytes
    made: dict[Schedule, Executor] = {}
    for share in SHARES:
        budget = min(max(int(share * peak), int(_ROOM * least)), peak)
        schedule = solve(captured.graph, budget, time_limit_s=_SOLVE_S).schedule
        if schedule not in made:
            made[schedule] = Executor(captured, schedule, workload.model, workload.loss_fn)
        yield f"planned at {share:.0%}", made[schedule]
    with use_python_passes():
        step = Executor(captured, keep_everything(captured.graph), workload.model, workload.loss_fn)
        get_loss(call(step, workload.batch)).backward()
        yield IN_PYTHON, step


def _take_turns(steps: Mapping[str, Step], workload: Workload, repeats: int) -> dict[str, _Times]:
    """Return the times of steps that take turns: each is taken twice in a turn, and the second is timed, as in a training loop.

    With one step in a turn, what surrounds the first of several plans took twice as long as for the others, whose guards are the
    same objects: 0.27 of eager PyTorch's step for BERT, and 0.13. With two in an order that stays, one schedule took 0.69 of
    eager PyTorch's step in the first of three places, and 0.60 and 0.56 in the others: a random order gives all the same chances.
    """
    first = {id(step): way for way, step in reversed(steps.items())}  # of several ways that are one step
    times = {way: _Times() for way in first.values()}
    passes: dict[str, PassTimes] = {}
    for way in times:
        if isinstance(step := steps[way], Executor):
            passes[way] = PassTimes()
            step.observe(passes[way])
    random = Random(0)
    for turn in range(_WARM_UP + repeats):
        for way in random.sample(list(times), len(times)):
            for is_timed in (False, turn >= _WARM_UP):
                with use_python_passes() if way == IN_PYTHON else nullcontext():
                    _time_step(steps[way], workload, passes.get(way), times[way] if is_timed else _Times())
    return {way: times[first[id(step)]] for way, step in steps.items()}


def _time_step(step: Step, workload: Workload, passes: PassTimes | None, times: _Times) -> None:
    """Add the times of one step; `passes` are those of a plan."""
    workload.model.zero_grad()
    before = 0.0 if passes is None else passes.seconds
    start = time.perf_counter()
    loss = get_loss(call(step, workload.batch))
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    times.forward.append(middle - start)
    times.backward.append(end - middle)
    if passes is not None:
        gradients = end - passes.end
        times.gradients.append(gradients)
        times.around.append(end - start - gradients - (passes.seconds - before))


TABLE = (
    *("model", "ops"),
    Column("eager step", "eager_s"),
    "way",
    Column("step", "ratio", missing="fails"),
    Column("forward", "forward_ratio"),
    Column("backward", "backward_ratio"),
    Column("around the passes", "around_ratio"),
    Column("gradients", "gradients_ratio"),
    Column("measured / predicted", "predicted_ratio"),
    Column("guards, each step", "check_s"),
)
WAYS = (
    "checkpointing by blocks",
    "torch.compile",
    'torch.compile(mode="lite")',
    *map("planned at {:.0%}".format, SHARES),
    INDUCTOR,
    IN_PYTHON,
)


STUDY = Study(HostRow, measure, order=order_by(model=MODELS, way=WAYS), pages={"table.md": TABLE})
main = Main(STUDY, MODELS, chosen=TINY, settings={"repeats": Setting(40, "steps timed of each")})
