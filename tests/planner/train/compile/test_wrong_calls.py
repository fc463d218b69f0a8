"""What no step can be planned for, or does not do, is one clear error."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.data import DataLoader

import planner
from benchmarks.models.parts import FunctionModule
from planner.capture.frontend import fake_execution
from planner.graphs.errors import InfeasibleError, PlannerError, TraceError
from planner.native.library import wait_for_library

X, Y = torch.randn(16, 8), torch.randn(16, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def compiled(given: Any, batch: Any = (X, Y), **options: Any) -> planner.PlannedStep:
    return planner.compile(given, F.mse_loss, batch, budget="100%", compare_eager=False, **options)


def traced(given: Any, batch: Any = (X, Y), **options: Any) -> object:
    return planner.trace(given, F.mse_loss, batch, **options)


@pytest.mark.parametrize("call", [compiled, traced, lambda given: planner.checkpoint(given, budget="50%")])
@pytest.mark.parametrize(
    ("given", "said"), [(None, "is None"), (F.relu, "is a function"), (nn.ReLU, "is the class ReLU"), ("gpt2", "is a str")]
)
def test_model_that_is_not_a_module_raises(call: Callable[[Any], object], given: Any, said: str) -> None:
    with pytest.raises(PlannerError, match=f"the model {said}, and must be a torch.nn.Module"):
        call(given)


@pytest.mark.parametrize("call", [compiled, traced])
@pytest.mark.parametrize(("batch", "said"), [(None, "is None"), (X, "is a Tensor"), (3, "is a int")])
def test_batch_that_is_not_a_sequence_or_mapping_raises(call: Callable[[Any, Any], object], batch: Any, said: str) -> None:
    with pytest.raises(PlannerError, match=rf"the batch {said}: give what the step is called with, as in \(inputs, targets\)"):
        call(model(), batch)


@pytest.mark.parametrize("call", [compiled, traced])
def test_a_loader_and_an_empty_batch_are_no_batch(call: Callable[[Any, Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_execution, "_list_objects", None)  # a search in all objects would take longer than all else
    for many, said in ((DataLoader([(X[0], Y[0])]), "a DataLoader"), (iter([X, Y]), "a list_iterator"), ({X, Y}, "a set")):
        with pytest.raises(PlannerError, match=f"the batch is {said}: give what the step is called with"):
            call(model(), many)
    for batch in ((), {}):
        with pytest.raises(PlannerError, match=r"the model takes \(input\), and is given nothing, as the batch is empty"):
            call(model(), batch)


@pytest.mark.parametrize(("given", "said"), [(nn.MSELoss, "the class MSELoss"), ("mse", "'mse'"), (0.5, "0.5")])
def test_loss_that_is_not_a_function_raises(given: Any, said: str) -> None:
    for call in (planner.trace, lambda *args: planner.compile(*args, budget="100%"), planner.advise):
        with pytest.raises(PlannerError, match=f"the loss function is {said}: give a function or an object"):
            call(model(), given, (X, Y))


def test_arguments_of_a_wrong_type_raise(tmp_path: Path) -> None:
    graph = planner.trace(model(), F.mse_loss, (X, Y), passes=1)
    plan = planner.solve(graph, "100%")
    step = compiled(model())
    wrong: dict[str, Callable[[], object]] = {
        "time limit is '10s': must be seconds, above 0": lambda: compiled(model(), time_limit_s="10s"),
        "time limit is True: must be seconds": lambda: planner.solve(graph, "100%", time_limit_s=True),
        "time limit is -3: must be seconds": lambda: planner.advise(model(), F.mse_loss, (X, Y), time_limit_s=-3),
        "time limit is nan: must be seconds": lambda: planner.curve(graph, 3, time_limit_s=float("nan")),
        "tolerance is '1%': must be a fraction": lambda: planner.solve(graph, "100%", tolerance="1%"),
        "passes is 'two': must be at least 1": lambda: traced(model(), passes="two"),
        "on_progress is True: must be a view": lambda: compiled(model(), on_progress=True),
        "on_progress is 'bar': must be a view": lambda: planner.checkpoint(model(), budget="1MB", on_progress="bar"),
        "the graph is 'model.json': must be one": lambda: planner.solve("model.json", "100%"),
        "the graph is Plan": lambda: planner.curve(plan, 3),
        "the plan is 'plan.json': must be one": lambda: planner.run("plan.json", model(), F.mse_loss, (X, Y)),
        "the graph is a Sequential: must be one": lambda: planner.solve(model(), "100%"),
        "the plan is a Sequential: must be one": lambda: planner.run(model(), model(), F.mse_loss, (X, Y)),
        "should_stop is True: must be a function": lambda: planner.solve(graph, "100%", should_stop=True),
        "on_plan is 'plan.json': must be a function": lambda: planner.solve(graph, "100%", on_plan="plan.json"),
        "dynamic is 'no': must be one of True, False": lambda: compiled(model(), dynamic="no"),
        "accumulate is 'no': must be one of True, False": lambda: traced(model(), accumulate="no"),
        "replan is 'never': must be one of True, False, None": lambda: compiled(model(), replan="never"),
        "cache is True: must be the name of a folder": lambda: compiled(model(), cache=True),
        "max_plans is '2': at least one plan": lambda: compiled(model(), max_plans="2"),
        "seconds is '5': must be a number, 0 or more": lambda: step.wait("5"),
        "seconds is -1: must be a number, 0 or more": lambda: step.wait(-1),
        "seconds is nan: must be a number, 0 or more": lambda: step.wait(float("nan")),
        "unknown device 'h900': choose from": lambda: planner.checkpoint(model(), budget="1MB", roofline="h900"),
        "the model is already compiled": lambda: planner.checkpoint(torch.compile(model()), budget="1MB"),
        "options is [None]: must be a list of names, ['NAME']": lambda: compiled(model(), options=[None]),
        "options is ['offload', 3]: must be a list of names": lambda: planner.solve(graph, "100%", options=["offload", 3]),
        "options is 3: must be a list of names": lambda: planner.checkpoint(model(), budget="1MB", options=3),
        "options is {'offload': 1}: must be a list of names": lambda: traced(model(), options={"offload": 1}),
        "options is [4]: must be a list of names": lambda: planner.advise(model(), F.mse_loss, (X, Y), options=[4]),
        "other_devices is [None]: must be a list of names": lambda: compiled(model(), other_devices=[None]),
        "other_devices is 'cpu:2': must be a list of names, ['cpu:2']": lambda: traced(model(), other_devices="cpu:2"),
        "host_budget is 3.5: must be whole bytes": lambda: compiled(model(), options=["offload"], host_budget=3.5),
        "link is [25]: must be bytes a second": lambda: planner.solve(graph, "100%", options=["offload"], link=[25]),
        "exact is 'yes': must be one of True, False": lambda: compiled(model(), options=["chunks"], exact="yes"),
        "reorder is 'no': must be one of True, False, None": lambda: planner.solve(graph, "100%", reorder="no"),
        "input 0 of the batch is on meta, but the step was planned for cpu: move it": lambda: step(X.to("meta"), Y),
        "input 1 of the batch is on meta, but": lambda: step(X, Y[:3].to("meta")),
        "budgets is '80%': must be how many": lambda: planner.curve(graph, "80%"),
        "budgets is 0.5: must be how many": lambda: planner.curve(graph, 0.5),
        "repeats is 0: must be at least 1": lambda: planner.run(plan, model(), F.mse_loss, (X, Y), repeats=0),
        "seed is 'a': must be at least 0, a whole number": lambda: planner.run(plan, model(), F.mse_loss, (X, Y), seed="a"),
        "arena is 'no': must be one of True, False, None": lambda: planner.run(plan, model(), F.mse_loss, (X, Y), arena="no"),
        "device is 'gpu': must be one that PyTorch finds": lambda: planner.rematerialize("1GB", device="gpu"),
        "max_recomputation is '2x': must be above 0": lambda: planner.rematerialize("1GB", max_recomputation="2x"),
        "the graph is 'model.json': must be one that": lambda: plan.plot("model.json"),
        "the name of the file to write is None: must be text": lambda: plan.save(None),
        "None: cannot be read": lambda: planner.Plan.load(None),
        "nothing to write: name a page, 'report.html'": lambda: compiled(model()).report(None),
        "memory is 'Reserved' (did you mean reserved?): choose": lambda: planner.solve(graph, "100%", memory="Reserved"),
        "is a .html file: name one that ends with .html": lambda: compiled(model()).report(tmp_path / "page.pdf"),
    }
    for said, call in wrong.items():
        with pytest.raises(PlannerError, match=re.escape(said)):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_batch_without_values_raises() -> None:
    with pytest.raises(PlannerError, match="model and batch must be on one device, found cpu, meta"):
        compiled(model(), (X.to("meta"), Y))


def test_a_cache_without_a_name_raises() -> None:
    with pytest.raises(PlannerError, match="cache is '': name a folder"):
        compiled(model(), cache="")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(copied: Callable[[object], object]) -> None:
    step = compiled(model())
    with pytest.raises(PlannerError, match=r"neither copied nor pickled: copy the model, and call planner\.compile"):
        copied(step)


def test_gradients_of_gradients_raise() -> None:
    x = X.clone().requires_grad_()
    step = compiled(model(), (x, Y))
    with pytest.raises(RuntimeError, match="create_graph=True asks for one: compute what needs gradients of gradients"):
        torch.autograd.grad(step(x, Y), x, create_graph=True)
    (gradient,) = torch.autograd.grad(step(x, Y), x)
    assert gradient.shape == x.shape and not gradient.requires_grad


def test_compiled_autograd_raises() -> None:
    wait_for_library()
    loss = compiled(model())(X, Y)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="PlannedStepBackward"),
    ):
        loss.backward()


def test_a_budget_that_is_too_small_is_not_spoken_of_as_an_option_of_the_command() -> None:
    with pytest.raises(InfeasibleError, match=r"Raise the budget, or lower the batch size\.") as refused:
        planner.compile(model(), F.mse_loss, (X, Y), budget="1kB")
    assert "--" not in str(refused.value)


def test_a_lazy_layer_that_the_step_does_not_call_raises() -> None:
    with pytest.raises(PlannerError, match=r"unused \(LazyLinear\) has no values before .*: call the model once on a batch"):
        compiled(FunctionModule(lambda m, x: m.used(x), used=nn.LazyLinear(8), unused=nn.LazyLinear(8)))


def test_parameters_of_inference_mode_raise() -> None:
    with torch.inference_mode():
        given = model()
    with pytest.raises(PlannerError, match=r"0 \(Linear\) was made under torch.inference_mode\(\), .*: make it outside"):
        compiled(given)


def test_transforms_of_functions_raise() -> None:
    given = model()
    step = compiled(given, (X[:1], Y[:1]))
    for transform, name in ((torch.func.vmap, "vmap"), (torch.func.grad, "grad")):
        batch = (X.unsqueeze(1), Y.unsqueeze(1)) if name == "vmap" else (X[:1], Y[:1])
        with pytest.raises(PlannerError, match=rf"a planned step is called under torch.func.{name}, .*: use model\(\.\.\.\)"):
            transform(step)(*batch)
    with pytest.raises(PlannerError, match=r"planner.compile is called under torch.func.vmap"):
        torch.func.vmap(lambda x, y: compiled(given, (x, y))(x, y))(X.unsqueeze(1), Y.unsqueeze(1))


def test_nan_is_a_value_like_others() -> None:
    model = FunctionModule(lambda m, x, filled: m.inner(x).nan_to_num(0.0 if filled != filled else filled), inner=nn.Linear(8, 8))
    step = compiled(model, (X, float("nan"), Y), replan=False)
    step(X, float("nan"), Y).backward()
    with pytest.raises(PlannerError, match=r"input 1 is 1.0, but the step was planned for nan"):
        step(X, 1.0, Y)


SCALE = torch.tensor(0.5)


def test_a_global_number_that_starts_to_require_grad_is_refused() -> None:
    step = compiled(FunctionModule(lambda m, x: m.inner(x) * SCALE, inner=nn.Linear(8, 8)))
    try:
        SCALE.requires_grad_()
        with pytest.raises(PlannerError, match=r"SCALE.requires_grad was False when the step was planned, and is True now"):
            step(X, Y)
    finally:
        SCALE.requires_grad_(requires_grad=False)


def test_an_empty_batch_is_one_error() -> None:
    model = nn.Linear(4, 4)
    empty, batch = (torch.empty(0, 4), torch.empty(0, 4)), (torch.randn(8, 4), torch.randn(8, 4))
    with pytest.raises(TraceError, match=r"the batch is empty \(tensors of \[0, 4\], \[0, 4\]\), .*: skip such batches"):
        planner.compile(model, F.mse_loss, empty, budget="1MB")
    step = planner.compile(model, F.mse_loss, batch, budget="1MB", wait=0)
    with pytest.raises(TraceError, match="the batch is empty"):
        step(*empty)
    assert torch.equal(step(*batch), F.mse_loss(model(batch[0]), batch[1]))


def test_a_planned_step_in_a_block_of_the_eager_runtime_is_one_error() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.randn(8, 4))
    step = planner.compile(model, F.mse_loss, batch, budget="1MB", wait=0)
    with planner.rematerialize(budget="1MB"):
        with pytest.raises(
            PlannerError, match=r"^a planned step is called in a block of planner.rematerialize.*: use one of them"
        ):
            step(*batch)
        with pytest.raises(PlannerError, match=r"^planner.compile is called in a block of planner.rematerialize"):
            planner.compile(model, F.mse_loss, batch, budget="1MB")
        with torch.no_grad():
            step(*batch)
    step(*batch).backward()


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        (planner.compile, "optmizer", r" \(did you mean optimizer\?\)"),
        (planner.checkpoint, "budgets", r" \(did you mean budget\?\)"),
        (planner.rematerialize, "speed", ""),
        (planner.solve, "tolerence", r" \(did you mean tolerance\?\)"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(call: Callable[..., Any], name: str, meant: str) -> None:
    with pytest.raises(PlannerError, match=f"unknown option '{name}' of planner.{call.__name__}{meant}: choose from "):
        call(**{name: 1})
