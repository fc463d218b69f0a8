"""Training loops as people write them: precision, accumulation, clipping, schedules, evaluation; and a thousand steps."""

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.capture.options.traced import add_traced
from planner.capture.step import TrainingStep
from planner.capture.trace import capture
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import MismatchError
from planner.graphs.ir import Phase
from planner.graphs.overwriting import find_overwritten_saved
from planner.graphs.schedule import schedule_of
from planner.measure.steps import get_loss
from planner.runtime.executor import Executor
from tests.support.budgets import HALF_WAY
from tests.support.marks import slow, slow_except
from tests.support.models.outcomes import assert_equal_steps, assert_same
from tests.support.models.steps import make, random_schedule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

AUTOCAST = {dtype: partial(torch.autocast, "cpu", dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
_GPT2 = {"layers": 1, "width": 32, "heads": 4, "vocab": 97, "seq": 24, "batch": 4}


def gpt2() -> Workload:
    return build("gpt2", **_GPT2)


def vit() -> Workload:
    return build("vit", layers=1, width=32, heads=4, size=32, patch=8, classes=10, batch=8, dropout=0.3)


def pure_gpt2() -> Workload:
    workload = gpt2()
    return workload._replace(model=workload.model.bfloat16())


def planned(workload: Workload, context: Callable[[], AbstractContextManager[Any]] = nullcontext, seed: int = 1) -> Executor:
    with context():
        captured = capture(*workload)
        return Executor(captured, random_schedule(captured.graph, seed), workload.model, workload.loss_fn)


def train(
    run: Callable[..., Any],
    workload: Workload,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    scale: bool = False,
    batches: int = 1,
    clip: float | None = None,
    set_to_none: bool = True,
) -> dict[str, torch.Tensor]:
    """All that three steps leave behind, with a learning rate that falls."""
    torch.manual_seed(3)
    stepper = optimizer(workload.model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=scale)
    left: dict[str, torch.Tensor] = {}
    for i in range(3):
        for _ in range(batches):
            with context():
                loss = get_loss(run(*workload.batch))
            scaler.scale(loss / batches).backward()
            left[f"loss {i}"] = loss.detach()
        if clip is not None:
            scaler.unscale_(stepper)
            left[f"norm {i}"] = nn.utils.clip_grad_norm_(workload.model.parameters(), clip)
        scaler.step(stepper)
        scaler.update()
        schedule.step()
        stepper.zero_grad(set_to_none=set_to_none)
    return left | {name: value.detach() for name, value in workload.model.state_dict().items()}


LOOPS: dict[str, tuple[Callable[[], Workload], dict[str, Any]]] = {
    "autocast bf16": (vit, {"context": AUTOCAST[torch.bfloat16]}),
    "autocast fp16, scaled": (vit, {"context": AUTOCAST[torch.float16], "scale": True, "clip": 0.5}),
    "pure bf16, momentum": (pure_gpt2, {"optimizer": partial(torch.optim.SGD, momentum=0.9), "clip": 0.5}),
    "accumulated": (vit, {"batches": 3, "clip": 0.5}),
    "accumulated, gradients zeroed": (gpt2, {"batches": 2, "set_to_none": False, "optimizer": torch.optim.SGD}),
}


@pytest.mark.parametrize("name", slow_except(LOOPS, "autocast fp16, scaled", "accumulated, gradients zeroed"))
def test_a_loop_trains_as_eager_does(name: str) -> None:
    make_workload, options = LOOPS[name]
    torch.manual_seed(7)
    workload = make_workload()
    eager = workload._replace(model=copy.deepcopy(workload.model))
    found = train(planned(workload, options.get("context", nullcontext)), workload, **options)
    wanted = train(TrainingStep(eager.model, eager.loss_fn), eager, **options)
    assert_same(found, wanted)


def test_another_precision_is_refused() -> None:
    workload = gpt2()
    step, cast = planned(workload), planned(workload, AUTOCAST[torch.bfloat16])
    with (
        AUTOCAST[torch.bfloat16](),
        pytest.raises(MismatchError, match=r"autocast is to bfloat16, but .* planned with autocast off"),
    ):
        step(*workload.batch)
    with (
        AUTOCAST[torch.float16](),
        pytest.raises(MismatchError, match=r"autocast is to float16, .* planned with autocast to bfloat16"),
    ):
        cast(*workload.batch)
    with pytest.raises(MismatchError, match="autocast is off, but the step was planned with autocast to bfloat16"):
        cast(*workload.batch)


def test_two_planned_models_take_turns() -> None:
    one, two = make("frozen"), make("mutated")
    steps = {id(w): planned(w) for w in (one, two)}
    alone = {}
    for workload in (one, two):
        torch.manual_seed(0)
        steps[id(workload)](*workload.batch).backward()
        alone[id(workload)] = [None if p.grad is None else p.grad.clone() for p in workload.model.parameters()]
        workload.model.zero_grad()
    for buffer in two.model.buffers():
        buffer.zero_()
    first = steps[id(one)](*one.batch)
    torch.manual_seed(0)
    second = steps[id(two)](*two.batch)
    first.backward()
    second.backward()
    for workload in (one, two):
        for before, parameter in zip(alone[id(workload)], workload.model.parameters(), strict=True):
            assert (before is None and parameter.grad is None) or torch.equal(before, parameter.grad)


def test_evaluation_between_steps_does_not_change_training() -> None:
    workload = make("resnet18")
    step, model = planned(workload), workload.model
    step(*workload.batch).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.eval()
    with torch.no_grad():
        model(workload.batch[0][:3])
    model.train()
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    model.zero_grad()
    step(*workload.batch).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True))


@pytest.mark.parametrize("mode", [torch.inference_mode, *slow(torch.no_grad)])
def test_without_gradients_a_step_evaluates_any_batch(mode: Callable[[], AbstractContextManager[None]]) -> None:
    workload = make("mutated")
    step, (x, y) = planned(workload), workload.batch
    twin = copy.deepcopy(workload.model)
    for training, rows in ((True, len(x)), (False, len(x)), (False, 1)):
        workload.model.train(training), twin.train(training)
        with mode():
            torch.manual_seed(3)
            loss = step(x[:rows], y[:rows])
            torch.manual_seed(3)
            assert torch.equal(loss, workload.loss_fn(twin(x[:rows]), y[:rows]))
        assert not loss.requires_grad
    assert all(map(torch.equal, workload.model.buffers(), twin.buffers()))
    workload.model.train(), twin.train()
    assert_equal_steps(step, workload.model, twin, x, y, loss_fn=workload.loss_fn)


def test_another_size_names_the_ways_out() -> None:
    workload = gpt2()
    step, (x, y) = planned(workload), workload.batch
    with pytest.raises(MismatchError) as caught:
        step(x[:, :12], y[:, :12])
    for said in (
        "input 0 of the batch is int64[4, 12], but the step was planned for int64[4, 24]; input 1",
        "planner.compile(..., dynamic=True)",
        "planner.compile(..., replan=True)",
        "call model(...) itself",
    ):
        assert said in str(caught.value)


def test_eval_mode_with_gradients_says_how_to_evaluate() -> None:
    workload = make("resnet18")
    step = planned(workload)
    workload.model.eval()
    with pytest.raises(
        MismatchError, match=r"call model\(\.\.\.\) itself, or the step under torch.no_grad\(\). To train, call model.train"
    ):
        step(*workload.batch)


@pytest.mark.parametrize("options", [{}, {"replan": True}, *slow({"dynamic": True})])
def test_the_code_of_both_passes_can_be_read(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = torch.randn(6, 8), torch.randn(6, 1)
    step = planner.compile(model, lambda z, y: (z.view(1, -1) * y.view(1, -1)).sum(), (x, y), budget="100%", **options)
    code = step.code
    assert code.count("def forward(") == 2 and "relu" in code and "del " in code
    if options:
        step(x[:4], y[:4]).backward()
        assert step.code != code


def test_a_thousand_steps_take_no_more_memory_than_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 3))
    workload = Workload(model, F.cross_entropy, (torch.randn(128, 64), torch.randint(3, (128,))))
    step, optimizer = planned(workload), torch.optim.AdamW(model.parameters())

    def train_for(steps: int) -> None:
        for _ in range(steps):
            step(*workload.batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    train_for(20)
    gc.collect()
    gc.disable()  # what only the collector would find counts as left behind
    try:
        tensors, resident = live_tensors(), resident_bytes()
        train_for(1000)
        assert live_tensors() == tensors
        # A step's tensors are 0.3 MB: had each left half of that, it would be 150 MB.
        assert resident_bytes() < resident + 30e6
    finally:
        gc.enable()


def live_tensors() -> int:
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def dropout_at_half_way() -> tuple[nn.Module, Callable[..., Any]]:
    model = make("vit").model
    return model, planner.compile(
        model, F.cross_entropy, make("vit").batch, budget=HALF_WAY, passes=1, wait="5%", swap="never", compare_eager=False
    )


def sigmoid_over_what_is_saved() -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.Sigmoid(), nn.Linear(32, 10))
    captured = add_traced(capture(model, F.cross_entropy, make("vit").batch), ["in-place"])
    graph = captured.graph
    (sigmoid,) = (op.id for op in graph.ops if op.name == "sigmoid")
    first = next(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    schedule = schedule_of(graph, [*range(first), sigmoid, *range(first, len(graph.ops))])
    assert find_overwritten_saved(graph, schedule)
    return model, Executor(captured, schedule, model, F.cross_entropy)


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize("plan", [sigmoid_over_what_is_saved, *slow(dropout_at_half_way)])
def test_backward_comes_again_where_the_graph_is_retained(plan: Callable[[], tuple[nn.Module, Callable[..., Any]]]) -> None:
    batch = make("vit").batch
    model, step = plan()

    def gradients(run: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = get_loss(run(*batch))
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward(torch.tensor(0.5))
        with pytest.raises(RuntimeError, match=r"call the first with retain_graph=True|Specify retain_graph=True"):
            loss.backward()
        second = [p.grad for p in model.parameters()]
        model.zero_grad()
        return [*first, *second]

    assert all(map(torch.equal, gradients(step), gradients(lambda x, y: F.cross_entropy(model(x), y))))
