"""Training by a plan in the ``Trainer`` of Hugging Face: losses and parameters equal those of the trainer alone."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("accelerate")

from planner.graphs.errors import PlannerError
from planner.huggingface import PlannedTrainer, PlannedTrainerMixin
from planner.plans.record import plan_line
from tests.support.integrations.huggingface import (
    arguments,
    assert_same,
    model,
    planned_options,
    sentences,
    summed,
    trained,
    transformers,
)
from tests.support.logs import lines_of
from tests.support.marks import slow

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("half_way")]


def test_trains_as_the_trainer_alone(tmp_path: Path) -> None:
    data = sentences(20)
    more = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    eager = trained(transformers.Trainer, tmp_path, data, options={"eval_dataset": sentences(4)}, **more)
    planned = trained(PlannedTrainer, tmp_path, data, options={"eval_dataset": sentences(4), **planned_options()}, **more)
    assert_same(planned, eager)
    plan = planned.planned.plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert len(plan.schedule.computed) > plan.graph.ops
    assert plan.graph.provenance["accumulate"] is True
    assert plan.graph.provenance["optimizer"]["name"] == "AdamW"


def test_adafactor_trains_as_without_a_plan(tmp_path: Path) -> None:
    data = sentences(8)
    eager = trained(transformers.Trainer, tmp_path, data, optim="adafactor")
    planned = trained(PlannedTrainer, tmp_path, data, options=planned_options(), optim="adafactor")
    assert_same(planned, eager)
    plan = planned.planned.plan
    state = [value for values in planned.optimizer.state.values() for value in values.values()]
    sizes = sorted(value.nbytes for value in state if isinstance(value, torch.Tensor))
    assert sorted(plan.graph.provenance["optimizer"]["state"]) == sizes
    assert plan.measured_peak_bytes <= plan.budget_bytes


class Returning(torch.nn.Module):
    """A model that returns a dict or a tuple of its own."""

    def __init__(self, form: type) -> None:
        super().__init__()
        self.inner, self.form = model(), form

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return {"loss": outputs.loss, "logits": outputs.logits} if self.form is dict else (outputs.loss, outputs.logits)


@pytest.mark.parametrize("form", [dict, tuple])
def test_a_model_may_return_a_dict_or_a_tuple(form: type, tmp_path: Path) -> None:
    data, more = sentences(8), {"max_steps": 2}
    eager = trained(transformers.Trainer, tmp_path, data, options={"model": Returning(form)}, **more)
    assert_same(trained(PlannedTrainer, tmp_path, data, options={"model": Returning(form), **planned_options()}, **more), eager)


class Reporter(transformers.TrainerCallback):
    """What a callback such as TensorBoard's is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs.append(dict(logs))


def test_a_run_says_its_plan_at_the_default_verbosity_and_reports_its_numbers_if_asked(tmp_path: Path) -> None:
    reporters = Reporter(), Reporter()
    options = [{"callbacks": [reporter], **planned_options("100%")} for reporter in reporters]
    with lines_of("transformers", level=None) as lines:
        planned = trained(PlannedTrainer, tmp_path, sentences(8), options={**options[0], "log_plan": True}, max_steps=2)
    assert lines[0] == "planning: capturing the training step"
    assert lines[1].startswith(plan_line(planned.planned.history[0].plan))
    with lines_of("transformers", level=None) as lines:
        trained(PlannedTrainer, tmp_path, sentences(4), options=options[1], max_steps=1, log_level="error")
    assert lines == []
    with_loss = [logs for logs in reporters[0].logs if "loss" in logs]
    assert len(with_loss) == 2 and with_loss[-1].items() >= planned.planned.scalars().items()
    assert with_loss[-1]["plan/budget_bytes"] == planned.planned.plan.budget_bytes
    assert all("plan/budget_bytes" not in logs for logs in (reporters[0].logs[-1], *reporters[1].logs))


@pytest.mark.slow
def test_the_first_plan_is_logged_once(tmp_path: Path) -> None:
    with lines_of("transformers.planner") as lines:
        planned = trained(PlannedTrainer, tmp_path, sentences(8, longer=-4), options=planned_options(), max_steps=2)
    assert len(planned.batch_plans.steps.values()) == 2
    assert lines[0] == "planning: capturing the training step"
    assert lines[1].startswith(plan_line(planned.planned.history[0].plan))
    assert len(lines) == 2


@pytest.mark.slow
def test_the_first_plan_is_shown_once_behind_the_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = {"max_steps": 2, "disable_tqdm": False}
    with lines_of("transformers", level=None) as lines:
        planned = trained(PlannedTrainer, tmp_path, sentences(8, longer=-4), options=planned_options(), **more)
    assert len(planned.batch_plans.steps.values()) == 2
    assert "0/2 [00:00<?, ?it/s, capturing the training step]" in (text := capfd.readouterr().err)
    assert "planned: " not in text
    assert len(text) < 20_000  # nothing is written where nothing is to be shown
    assert [line.startswith(plan_line(planned.planned.history[0].plan)) for line in lines] == [False, True]


@pytest.mark.slow
def test_half_precision_is_part_of_the_plan(tmp_path: Path) -> None:
    data = sentences(8)
    planned = trained(PlannedTrainer, tmp_path, data, options=planned_options(), bf16=True, max_steps=2)
    assert_same(planned, trained(transformers.Trainer, tmp_path, data, bf16=True, max_steps=2))


@pytest.mark.parametrize("accumulated", [1, *slow(2)])
def test_a_smaller_last_batch_runs_without_a_plan(accumulated: int, tmp_path: Path) -> None:
    data, more = sentences(10), {"max_steps": 4, "gradient_accumulation_steps": accumulated}  # batches of 4, 4 and 2 rows
    eager = trained(transformers.Trainer, tmp_path, data, **more)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="planner.*")
        planned = trained(PlannedTrainer, tmp_path, data, options=planned_options(), **more)
    assert_same(planned, eager)
    assert planned.planned.plan.graph.provenance["inputs"][0] == "int64[4, 16]"
    assert len(planned.batch_plans.steps.values()) == len(planned.planned.plans) == 1


@pytest.mark.slow
def test_tensors_may_go_to_the_host(tmp_path: Path) -> None:
    data = sentences(8, longer=-4)
    eager = trained(transformers.Trainer, tmp_path, data)
    options = planned_options(options=["offload"], link="1000GB/s", host_budget="1GB", time_limit_s=2.0)
    planned = trained(PlannedTrainer, tmp_path, data, options=options)  # the second batch is shorter
    assert_same(planned, eager)
    assert planned.planned.plan.settings["options"] == ["offload"]
    first, last = planned.batch_plans.steps.values()
    assert first.plan.copied and first.debug.devices.host is last.debug.devices.host is not None


@pytest.mark.slow
def test_dynamic_trainer_on_batches_of_many_lengths_equals_eager(tmp_path: Path) -> None:
    data = sentences(12, longer=4)[::-1]  # the longest first, whose budget is that of all
    eager = trained(transformers.Trainer, tmp_path, data)
    assert_same(trained(PlannedTrainer, tmp_path, data, options=planned_options(dynamic=True)), eager)


@pytest.mark.slow
def test_trainer_with_smoothed_labels_equals_eager(tmp_path: Path) -> None:
    data = [{**sentence, "labels": sentence["labels"].clone()} for sentence in sentences(16)]
    for i, sentence in enumerate(data):
        sentence["labels"][-(1 + i % 3) :] = -100
    more = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "max_steps": 2}
    eager = trained(transformers.Trainer, tmp_path, data, **more)
    planned = trained(PlannedTrainer, tmp_path, data, options=planned_options(), **more)
    assert_same(planned, eager)
    assert planned.label_smoother == eager.label_smoother


@pytest.mark.slow
def test_another_model_gets_another_plan(tmp_path: Path) -> None:
    def runs(make: type, **options: Any) -> list[Any]:
        given = {"args": arguments(tmp_path, max_steps=2), "train_dataset": sentences(8), **options}
        trainer, ends = make(model_init=lambda trial: model(), **given), []
        for seed in (1, 2):
            trainer.args.seed = seed
            trainer.train()
            ends.append([p.detach().clone() for p in trainer.model.parameters()])
        return ends

    for planned, eager in zip(runs(PlannedTrainer, **planned_options()), runs(transformers.Trainer), strict=True):
        assert all(map(torch.equal, planned, eager))


class Weighted(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        loss = 2 * F.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
        return (loss, outputs) if return_outputs else loss


class PlannedWeighted(PlannedTrainerMixin, Weighted):
    pass


class Consistent(transformers.Trainer):
    """Calls the model twice, as R-Drop and SimCSE do, by position, and reads its attributes and a part of it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        first, second = (model(inputs["input_ids"]).logits.flatten(0, 1).log_softmax(-1) for _ in range(2))
        assert model.training
        loss = F.nll_loss(first, inputs["labels"].flatten()) + F.kl_div(first, second, log_target=True)
        return loss + 0.01 / model.config.vocab_size * model.lm_head.weight.square().sum()


class PlannedConsistent(PlannedTrainerMixin, Consistent):
    pass


@pytest.mark.parametrize(
    ("eager", "planned", "options"),
    [
        (Weighted, PlannedWeighted, {}),
        (Consistent, PlannedConsistent, {}),
        *slow((transformers.Trainer, PlannedTrainer, {"compute_loss_func": summed})),
    ],
    ids=["overridden", "called twice", "function"],
)
def test_a_loss_of_your_own(eager: type, planned: type, options: dict[str, Any], tmp_path: Path) -> None:
    data = sentences(8)
    alone = trained(eager, tmp_path, data, options=options, max_steps=2)
    assert_same(trained(planned, tmp_path, data, options={**options, **planned_options()}, max_steps=2), alone)


def test_unplannable_trainer_settings_raise(tmp_path: Path) -> None:
    class Before(PlannedTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(PlannerError, match=r"Before\.compute_loss would hide the planned one"):
        trained(Before, tmp_path, sentences(4), options=planned_options())
    said = r"unknown option 'time_limit' of planner\.compile \(did you mean time_limit_s\?\): choose from accumulate, "
    with pytest.raises(PlannerError, match=said):
        trained(PlannedTrainer, tmp_path, sentences(4), options=planned_options(time_limit=3))
    with pytest.raises(PlannerError, match=r"label_smoothing_factor is not planned with Weighted\.compute_loss: leave it out"):
        trained(PlannedWeighted, tmp_path, sentences(4), options=planned_options(), label_smoothing_factor=0.1)
    with pytest.raises(PlannerError, match="below"):
        trained(PlannedTrainer, tmp_path, sentences(4), options=planned_options("100kB", time_limit_s=1.0))
