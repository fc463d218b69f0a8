"""The ``Trainer`` of Hugging Face on two processes: as under DDP or FSDP2 without a plan, to the last bit."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from planner.graphs.errors import PlannerError  # noqa: E402
from planner.graphs.options.gather import GATHER  # noqa: E402
from planner.huggingface import PlannedTrainer  # noqa: E402
from tests.support.budgets import HALF_WAY  # noqa: E402
from tests.support.distributed import on_processes  # noqa: E402
from tests.support.integrations.huggingface import assert_same, planned_options, sentences, summed, trained  # noqa: E402
from tests.support.marks import slow  # noqa: E402

SHORT, LONG = sentences(8), sentences(8, longer=4)[4:]  # two batches of 16 tokens, one of 20


def run(make: type, data: Any, **more: Any) -> Any:
    """A trainer that has trained; each batch of four sentences went to the other process."""
    with TemporaryDirectory() as folder:
        return trained(make, Path(folder), data, ddp_backend="gloo", **{"max_steps": 2, **more})


def compared(data: Any, budget: str, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    """The planned trainer, which did as the one alone."""
    eager = run(transformers.Trainer, data, options=options, **more)
    planned = run(PlannedTrainer, data, options={**planned_options(budget), **(options or {})}, **more)
    assert isinstance(planned.model_wrapped, DistributedDataParallel)
    assert_same(planned, eager)
    return planned


def check_accumulation(rank: int) -> None:
    planned = compared([*SHORT, *SHORT, *SHORT, *SHORT], HALF_WAY, gradient_accumulation_steps=2, max_grad_norm=0.5)
    plan = planned.planned.plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert len(plan.schedule.computed) > plan.graph.ops
    assert "gradient_buckets" in {tensor.name for tensor in planned.planned.measured.tensors}


def check_smoothed_labels(rank: int) -> None:
    compared([*SHORT, *SHORT], HALF_WAY, label_smoothing_factor=0.1, ddp_find_unused_parameters=True, bf16=True)


def check_other_sizes(rank: int) -> None:
    planned = compared([*SHORT, *LONG, *LONG], "1MB", options={"compute_loss_func": summed})
    assert len(planned.batch_plans.steps.values()) == 2
    assert planned.planned.plan.graph.provenance["inputs"][0] == "int64[4, 16]"  # of each as many came: the first


def check_differing_sizes(rank: int) -> None:
    """Rank 0 has a plan for its batch, rank 1 none: both say so, and neither waits for the other."""
    found = r"rank 0: \[4, 16\], .*; rank 1: \[4, 20\], .*"
    with pytest.raises(PlannerError, match=rf"the batches of the processes differ \({found}\), but one plan is for all"):
        run(PlannedTrainer, [*SHORT, *SHORT[:4], *LONG], options=planned_options("100%"))


def use_fsdp_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let Accelerate shard models on a CPU, where it replicates them whatever it is told."""
    initialize = AcceleratorState.__init__

    def initialize_sharding(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        initialize(state, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    patch.setattr(AcceleratorState, "__init__", initialize_sharding)


def check_sharded(rank: int) -> None:
    """Units of ``fully_shard`` are gathered and reduced in the plan; whole gradients are summed where Accelerate says so."""
    sharding = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    with pytest.MonkeyPatch.context() as patch:
        use_fsdp_on_the_cpu(patch)
        data, more = [*SHORT, *SHORT, *SHORT, *SHORT], {"gradient_accumulation_steps": 2, **sharding}
        eager = run(transformers.Trainer, data, **more)
        planned = run(PlannedTrainer, data, options=planned_options(HALF_WAY), **more)
        assert isinstance(planned.model_wrapped, FSDPModule)
        found = planned.model_wrapped.named_parameters()
        for (name, wanted), (_, value) in zip(eager.model_wrapped.named_parameters(), found, strict=True):
            assert isinstance(value, DTensor) and torch.equal(value.to_local(), wanted.to_local()), name
    losses = [[entry.get("loss") for entry in each.state.log_history] for each in (eager, planned)]
    assert losses[0] == losses[1]
    graph, plan = planned.planned.measured, planned.planned.plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert sum(op.target == GATHER for op in graph.ops) > 1


@pytest.mark.parametrize(
    "check", [check_accumulation, *slow(check_sharded, check_other_sizes, check_differing_sizes, check_smoothed_labels)]
)
def test_trains_as_the_trainer_alone(check: Callable[[int], None], tmp_path: Path) -> None:
    on_processes(2, (check,), tmp_path)
