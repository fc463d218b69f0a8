"""Checks of front ends under a cap of the process's memory.

Eager PyTorch runs out of memory under the cap. Planning and training must work there, with the bits of eager PyTorch without
a cap. A process of its own for each check: what one front end asks of the C library would help the next one.
"""

import io
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.models.parts import Residual
from benchmarks.process_memory import read_status_bytes, reset_highest_rss
from planner.cli.main import main
from planner.measure import tracing
from planner.memory.release import release_unused
from tests.support.memory_limits.steps import limited

_MB = 10**6
_ROWS, _WIDTH, _LAYERS = 4096, 512, 20

# Besides parameters, buffers and inputs, which take 18 MB: what a plan may take, and what there is. Eager PyTorch takes 530 MB.
PLAN_BYTES = 110 * _MB
ROOM_BYTES = PLAN_BYTES + 240 * _MB  # solving in the process takes a part of it
BUDGET = PLAN_BYTES + 18 * _MB
QUICK: dict[str, Any] = {"tolerance": 0.05, "wait": 0}

Batch = tuple[torch.Tensor, torch.Tensor]
AdamW, SGD = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.1)


def blocks(layers: int = _LAYERS) -> nn.Sequential:
    """Three large activations in each, little to compute."""
    torch.manual_seed(0)
    inner = ((nn.BatchNorm1d(_WIDTH), nn.Hardtanh(), nn.Linear(_WIDTH, 8), nn.Linear(8, _WIDTH)) for _ in range(layers))
    return nn.Sequential(*(Residual(*each) for each in inner))


def batch(rows: int = _ROWS, seed: int = 1) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, _WIDTH, generator=draw), torch.randn(rows, _WIDTH, generator=draw)


def eager(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y: F.mse_loss(model(x), y)


def eager_step(layers: int = _LAYERS, rows: int = _ROWS) -> None:
    eager(blocks(layers))(*batch(rows)).backward()


def runs_out_of_memory(step: Callable[[], None]) -> None:
    with limited(ROOM_BYTES), pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        step()


@contextmanager
def capped(step: Callable[[], None] = eager_step, kernels: str = "eager") -> Iterator[None]:
    """Inside, there is room for a plan, and not for `step` of eager PyTorch.

    That is tried in a process of its own, for it leaves holes in the heap. What planning imports when it is first used is
    imported before.
    """
    other = multiprocessing.get_context("fork").Process(target=runs_out_of_memory, args=(step,))
    other.start()
    other.join()
    assert other.exitcode == 0
    planner.compile(blocks(1), F.mse_loss, batch(8), budget="100%", compare_eager=False, kernels=kernels, wait=0)
    release_unused(torch.device("cpu"))
    with limited(ROOM_BYTES):
        yield


def trained(
    model: nn.Module, step: Callable[..., torch.Tensor], batches: list[Batch], make: Callable[..., Any] = SGD
) -> list[torch.Tensor]:
    """Train by `step`, and return all that comes of it: losses, gradients of the last step, parameters, buffers."""
    optimizer = make(model.parameters())
    losses = []
    for given in batches:
        optimizer.zero_grad()
        loss = step(*given)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None), *model.state_dict().values()]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def assert_as_eager(
    found: list[torch.Tensor], batches: list[Batch], make: Callable[..., Any] = SGD, layers: int = _LAYERS
) -> None:
    model = blocks(layers)
    assert_same(found, trained(model, eager(model), batches, make))


def compiled() -> None:
    """``planner.compile`` with the optimizer's state, batches of two sizes, and a folder of plans, from empty and full.

    Half as many layers, of twice as many rows, are captured and solved in half of the time.
    """
    layers, rows = _LAYERS // 2, 2 * _ROWS
    batches = [batch(rows), batch(rows - 96), batch(rows, seed=2)]
    with TemporaryDirectory() as folder, capped(partial(eager_step, layers, rows)):
        options = {"budget": BUDGET + 50 * _MB, "optimizer": "adamw", "dynamic": True, "cache": folder, **QUICK}
        model = blocks(layers)
        step = planner.compile(model, F.mse_loss, batches[0], **options)
        found = trained(model, step, batches, AdamW)
        model = blocks(layers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tracing, "profile", None)
            again = planner.compile(model, F.mse_loss, batches[0], **options)
            found_again = trained(model, again, batches[:1], AdamW)
    assert "there is room for" in step.plan.eager.failure
    assert_as_eager(found, batches, AdamW, layers)
    assert_as_eager(found_again, batches[:1], AdamW, layers)


def offloading() -> None:
    """``planner.compile`` with tensors that go to the host, which is the same memory here."""
    budget_bytes, host_bytes = 100 * _MB, 100 * _MB
    with capped():
        model, given = blocks(), batch()
        asked = {"options": ["offload"], "link": "100GB/s", "host_budget": host_bytes, "tolerance": 0.05, "wait": "4 work"}
        step = planner.compile(model, F.mse_loss, given, budget=budget_bytes, **asked)
        found = trained(model, step, [given, given])
    assert 0 < step.plan.pool_peaks_bytes["host"] <= host_bytes
    assert_as_eager(found, [given, given])


def traced() -> None:
    """``planner.trace``, ``planner.solve`` and ``planner.run``, which does not compare the plan where nothing else fits."""
    with capped():
        model, given = blocks(), batch()
        plan = planner.solve(planner.trace(model, F.mse_loss, given, passes=1), BUDGET, tolerance=0.05)
        report = planner.run(plan, model, F.mse_loss, given, repeats=1)
    assert report.measured_peak_bytes <= BUDGET
    assert "there is room for" in report.not_compared
    assert (report.identical, report.differences, report.eager_differences) == (None, None, None)
    assert (report.measured_ratio, report.eager_ratio) == (None, None)
    report = planner.run(plan, model, F.mse_loss, given, repeats=1)
    assert (report.identical, report.differences, report.eager_differences, report.not_compared) == (True, (), (), "")


def workload() -> tuple[nn.Module, Callable[..., torch.Tensor], Batch]:
    return blocks(), F.mse_loss, batch()


def commands() -> None:
    """``planner trace``, ``solve`` and ``run``."""
    said = io.StringIO()
    with TemporaryDirectory() as folder, capped(), redirect_stdout(said):
        graph, plan, model = f"{folder}/graph.json", f"{folder}/plan.json", f"{__file__}:workload"
        assert main(["trace", model, "-o", graph, "--passes", "1", "--quiet"]) == 0
        assert main(["solve", graph, "--budget", f"{BUDGET}B", "--tolerance", "5%", "-o", plan, "--quiet"]) == 0
        assert main(["run", plan, "--model", model, "--repeats", "1", "--quiet"]) == 0
    assert "keeping everything and plain PyTorch: not run to compare with, it needs" in said.getvalue()


def torch_compile() -> None:
    """``torch.compile(backend="planner")`` with the kernels of eager PyTorch."""
    with capped():
        model, given = blocks(), batch()
        planned = torch.compile(model, backend="planner", options={"budget": BUDGET, "tolerance": 0.05})
        found = trained(model, eager(planned), [given, given])
    assert_as_eager(found, [given, given])


def checkpoint() -> None:
    """``planner.checkpoint``."""
    with capped():
        model, given = blocks(), batch()
        planned = planner.checkpoint(model, budget=BUDGET, tolerance=0.05)
        found = trained(model, eager(planned), [given, given])
    assert_as_eager(found, [given, given])


def inductor() -> None:
    """``planner.compile`` with the kernels of Inductor."""
    given = batch()
    with capped(kernels="inductor"):
        model = blocks()
        step = planner.compile(model, F.mse_loss, given, budget=BUDGET, kernels="inductor", **QUICK)
        found = trained(model, step, [given, given])
    model = blocks()
    assert_same(found, trained(model, torch.compile(eager(model)), [given, given]))


def torch_compile_inductor() -> None:
    """``torch.compile(backend="planner")`` with the kernels of Inductor."""
    given = batch()
    with capped(kernels="inductor"):
        model = blocks()
        planned = torch.compile(model, backend="planner", options={"budget": BUDGET, "kernels": "inductor"})
        found = trained(model, eager(planned), [given, given])
    model = blocks()
    assert_same(found, trained(model, eager(torch.compile(model)), [given, given]))


def hugging_face() -> None:
    """``PlannedTrainer`` on a narrow GPT-2, with long sequences."""
    import transformers

    from planner.huggingface import PlannedTrainer
    from tests.support.integrations.huggingface import arguments, assert_same

    def model() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "n_positions": 1024, "n_embd": 64, "n_layer": 4, "n_head": 2, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))

    tokens = torch.randint(97, (16, 1024), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def eager_step() -> None:
        model()(tokens[:8], labels=tokens[:8]).loss.backward()

    def train(make: type, **options: Any) -> Any:
        with TemporaryDirectory() as folder:
            args = arguments(Path(folder), max_steps=2, per_device_train_batch_size=8)
            trainer = make(model=model(), args=args, train_dataset=data, **options)
            trainer.train()
            return trainer

    with capped(eager_step):
        planned = train(PlannedTrainer, budget=BUDGET, plan_options=QUICK)
    assert_same(planned, train(transformers.Trainer))


def lightning() -> None:
    """``PlannedTraining`` in Lightning's trainer."""
    from torch.utils.data import DataLoader

    from planner.lightning import PlannedTraining
    from tests.support.integrations.lightning import pl, trained

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = blocks()

        def training_step(self, batch: Batch) -> torch.Tensor:
            loss = F.mse_loss(self.body(batch[0]), batch[1])
            self.log("loss", loss, on_step=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return SGD(self.parameters())

    data = DataLoader([batch(), batch(seed=2)], batch_size=None)

    def train(*callbacks: Any) -> tuple[nn.Module, list[dict[str, float]]]:
        with TemporaryDirectory() as folder:
            return trained(Module(), Path(folder), *callbacks, data=(data,), max_epochs=1)

    with capped():
        planned, planned_logs = train(PlannedTraining(BUDGET, **QUICK))
    plain, logs = train()
    assert planned_logs == logs
    assert_same(list(planned.state_dict().values()), list(plain.state_dict().values()))


def two_processes(rank: int) -> None:
    """``planner.compile`` of a model in ``DistributedDataParallel``; called on each of two processes."""
    batches = [batch(seed=3 + rank), batch(seed=5 + rank)]
    with limited(ROOM_BYTES):
        model = DistributedDataParallel(blocks())
        step = planner.compile(model, F.mse_loss, batches[0], budget=BUDGET + 10 * _MB, **QUICK)
        found = trained(model, step, batches)
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            eager_step()
    plain = DistributedDataParallel(blocks())
    assert_same(found, trained(plain, eager(plain), batches))


def memory_of_planning() -> None:
    """Without a cap: what the process holds while ``planner.compile`` runs, and afterwards."""
    planner.compile(blocks(1), F.mse_loss, batch(8), budget="100%", compare_eager=False, wait=0)
    model, given = blocks(), batch()
    release_unused(torch.device("cpu"))
    before = read_status_bytes("VmRSS")
    reset_highest_rss()
    step = planner.compile(model, F.mse_loss, given, budget=BUDGET, compare_eager=False, **QUICK)
    most = read_status_bytes("VmHWM") - before
    left = read_status_bytes("VmRSS") - before
    assert most <= PLAN_BYTES + 180 * _MB, f"{most / _MB:.0f} MB more while planning"
    assert left <= 120 * _MB, f"{left / _MB:.0f} MB more after planning"
    assert_as_eager(trained(model, step, [given]), [given])
