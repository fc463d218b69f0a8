"""Parts of benchmarks that have an oracle of their own: memory of processes, digests, data, budgets, sets of options."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import planner
from benchmarks import options_errors, solve_suites
from benchmarks.compression import CASES as CURVES, EXACT, begin, generate_noisy_classes, generate_patterns
from benchmarks.first_step_cases import CASES as FIRST_STEPS
from benchmarks.first_step_run import FAILED, OUT_OF_MEMORY, REFUSED, compute_digest, format_message, get_status
from benchmarks.kept_captures import KeptCaptures
from benchmarks.offload import MODELS as OFFLOADED, compute_budget_bytes
from benchmarks.offload_sizes import CASES as SIZES, SizeCase, search
from benchmarks.options import MODELS, NAMES
from benchmarks.options_errors import MEASURED, Bits, find_most_bits, format_error_table, measure_errors
from benchmarks.options_table import Offer, list_sets
from benchmarks.process_memory import DataWatch, read_status_bytes, reset_highest_rss
from benchmarks.reserved import compute_reserved_with_pool_bytes
from benchmarks.solve_suites import make_between, make_share_of_peak
from planner.capture.options import OPTIONS
from planner.capture.workload.models import build
from planner.capture.workload.workload import parse_spec
from planner.graphs.addresses import Buffer
from planner.graphs.allocators.training import Training, usage_of
from planner.graphs.errors import BudgetError, InfeasibleError, OutOfMemoryError
from planner.graphs.ir import Op
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.solvers.clock import WorkClock
from planner.studies.blocks import InapplicableError

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as on Linux")


def test_specs_of_models_can_be_read() -> None:
    assert all(parse_spec(spec) for spec in (*MODELS.values(), *OFFLOADED.values()))
    assert not set(MODELS) & set(MEASURED)
    assert {name.partition(":")[0] for name in NAMES} == set(OPTIONS) - {"placement", "overlap"}
    assert all(int(dict(parse_spec(case.spec).options)[case.varies]) % case.unit == 0 for case in SIZES.values())


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_models_of_first_steps_are_built_and_checkpointed(name: str) -> None:
    case = FIRST_STEPS[name]
    workload = case.recipe.make()
    assert sum(p.numel() for p in workload.model.parameters()) > 10**6
    if name != "lstm":
        assert callable(case.checkpointing(workload))
        return
    with pytest.raises(InapplicableError, match="no blocks"):  # the layers of an LSTM are one module
        case.checkpointing(workload)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you\nmore"), OUT_OF_MEMORY, "RuntimeError: Default"),
        (MemoryError(), OUT_OF_MEMORY, "MemoryError"),
        (OutOfMemoryError("out of memory in the forward pass", asked_bytes=1), OUT_OF_MEMORY, "out of memory in"),
        (InfeasibleError("no schedule"), REFUSED, "no schedule"),
        (KeyError("x"), FAILED, "KeyError: 'x'"),
    ],
)
def test_errors_are_told_apart(error: Exception, status: str, line: str) -> None:
    assert get_status(error) == status
    assert format_message(error).startswith(line)


def test_digests_are_of_all_bits() -> None:
    assert compute_digest([1.0, 2.0], "s") == compute_digest([1.0, 2.0], "s")
    assert len({compute_digest(losses, state) for losses in ([1.0], [1.0 + 2**-52], [-0.0], [0.0]) for state in ("s", "t")}) == 8


@linux
def test_the_highest_sizes_are_those_since_they_were_reset() -> None:
    def take() -> None:
        torch.ones(16 * 2**20).sum()  # 64 MiB, which go back to the system

    take()
    reset_highest_rss()
    assert read_status_bytes("VmHWM") < read_status_bytes("VmRSS") + 32 * 2**20
    before_rss, before_data = read_status_bytes("VmRSS"), read_status_bytes("VmData")
    with DataWatch() as watch:
        take()
    assert read_status_bytes("VmHWM") > before_rss + 48 * 2**20
    assert before_data + 48 * 2**20 < watch.highest_bytes < before_data + 128 * 2**20


def test_a_step_is_captured_once_for_all_budgets() -> None:
    torch.manual_seed(0)
    workload = build("gpt2", layers=2, width=32, heads=4, vocab=97, seq=24, batch=8)
    model = KeptCaptures(workload.model)
    seconds = []
    for budget in ("100%", "80%"):
        step = planner.compile(model, *workload[1:], budget=budget, time_limit_s=5.0)
        assert step.plan.eager.identical
        seconds.append((model.asked_s, model.kept_s))
    assert len(model.captures) == 1
    (first_s, none_s), (both_s, kept_s) = seconds
    assert none_s == 0
    assert both_s == 2 * first_s > 0
    assert kept_s == first_s


def test_exact_losses_are_those_of_a_plain_loop() -> None:
    recipe = replace(CURVES["gpt2"].recipe, make=partial(build, "mlp", layers=2, width=32, batch=256, classes=10, dropout=0.1))
    torch.manual_seed(5)
    workload = recipe.make()
    data = [workload.batch] * 3
    curve = begin(workload, recipe, 5)[EXACT]
    losses, (model, loss_fn, _) = [curve.loop.time_step(batch)[0] for batch in data], workload
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate)
    torch.manual_seed(5)
    for (x, y), expected in zip(data, losses, strict=True):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        assert loss.item() == expected


def test_tokens_follow_from_a_period_and_images_from_their_class() -> None:
    like = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
    first, second = generate_patterns(like, 2, 5)
    for tokens, following in (first, second):
        assert torch.equal(tokens[:, 1:], following[:, :-1]) and torch.equal(tokens[:, 4:], tokens[:, :-4])
    assert not torch.equal(first[0], second[0])
    like = torch.zeros(500, 3, 4, 4), torch.zeros(500, dtype=torch.int64)
    (images, classes), (again, others) = generate_noisy_classes(like, 2, 5)
    means = [torch.stack([x[y == c].mean(0) for c in range(10)]).flatten() for x, y in ((images, classes), (again, others))]
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.7


def test_budgets_lie_between_the_least_and_the_peak(tmp_path: Path) -> None:
    assert compute_budget_bytes("least + 25%", 1000, 2000) == 1250
    assert compute_budget_bytes("60%", 1000, 2000) == 1200
    for wrong in ("least + 25", "25", "least"):
        with pytest.raises(BudgetError):
            compute_budget_bytes(wrong, 1000, 2000)
    marks = solve_suites.Landmarks(draw_training_step(1, 4))
    least, peak = marks.least_bytes, marks.peak_bytes
    assert least < peak
    assert make_between(0.5).bytes_at(marks) == int(least + 0.5 * (peak - least))
    assert make_share_of_peak(0.9).bytes_at(marks) == int(0.9 * peak)
    assert marks.find_half_way_bytes((0.1,)) == (least + peak) // 2
    share = least / peak + 0.01
    assert marks.find_half_way_bytes((share, 0.1)) == (least + int(share * peak)) // 2
    for name in ("vgg16_train", "random_layered_n100"):
        (tmp_path / "moccasin").mkdir(exist_ok=True)
        (tmp_path / "moccasin" / f"{name}.json").touch()
    random, training = solve_suites.SUITES["moccasin"](tmp_path)
    assert [budget.label for budget in random.budgets] == ["90% of peak", "80% of peak"]
    assert [budget.label for budget in training.budgets][-2:] == ["50% of peak", "half way to least"]
    assert not list(solve_suites.SUITES["checkmate-24h"](tmp_path))


@pytest.mark.slow
def test_largest_size_with_offload_is_at_least_that_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "small", SizeCase("zoo:mlp,layers=4,width=32,classes=8", "batch", 64))
    rows = list(search("small", (), budget="1MB", limit_s=3.0))
    found = [row.size or 0 for row in rows]
    assert rows[-1].method == "with offload" and found[-1] >= found[-2] >= found[0] > 0
    assert all((row.overhead or 0.0) <= 0.1 and (row.peak_bytes or 0) <= 10**6 for row in rows if row.size)


def make_buffers(sizes: Iterable[tuple[int, int, int]]) -> tuple[Buffer, ...]:
    return tuple(Buffer(str(i), lower, upper, size * 2**20) for i, (size, lower, upper) in enumerate(sizes))


def test_pool_reserves_live_bytes_where_best_fit_leaves_no_gaps() -> None:
    training = Training((40 * 2**20,), make_buffers(((30, 0, 1), (14, 1, 3), (30, 1, 3))), temporaries=(20 * 2**20,))
    assert usage_of(training).reserved_bytes == (40 + 30 + 30 + 20) * 2**20  # the 14 are in the first 30
    assert compute_reserved_with_pool_bytes(training) == (40 + 44 + 20) * 2**20  # what the optimizer takes is outside
    # The 8 stay above the 20, in whose place the 24 have no room.
    assert compute_reserved_with_pool_bytes(Training((), make_buffers(((20, 0, 1), (8, 0, 2), (24, 1, 2))))) == 52 * 2**20


def test_option_sets_are_none_each_and_all_by_exactness() -> None:
    exact, idle, rounding, lossy, other = (
        Offer(model="step", option=option, ops=ops, bits=bits)
        for option, ops, bits in zip(
            "abcde", (2, 0, 1, 1, 1), (*[Bits.EXACT] * 2, Bits.ROUNDING, Bits.LOSSY, Bits.EXACT), strict=True
        )
    )
    assert list_sets([exact, idle, rounding, lossy]) == ((), ("a",), ("c",), ("d",), ("a", "c"), ("a", "c", "d"))
    assert list_sets([exact, other, lossy])[-2:] == (("a", "e"), ("a", "e", "d"))
    assert list_sets([idle]) == ((),)
    op = Op(0, "op", "f", (), (), 1.0)
    rounds, loses = replace(op, differs="rounding: t (the loss)"), replace(op, differs="4 bits: t")
    assert [find_most_bits(ops) for ops in ([op], [op, rounds], [rounds, loses])] == [Bits.EXACT, Bits.ROUNDING, Bits.LOSSY]


@pytest.mark.slow
def test_errors_are_measured_beside_the_same_step_without(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "head": partial(build, "mlp", batch=64, width=16, layers=1, classes=500),
        "narrow": partial(build, "mlp", batch=64, width=64, layers=1, classes=4),
    }
    monkeypatch.setattr(options_errors, "MEASURED", small)
    found = list(measure_errors(("head", "chunks", partial(WorkClock, 1.0)), ()))
    assert [row.budget for row in found] == list(options_errors.BUDGETS)
    tight = found[-1]
    assert tight.differing
    assert tight.loss_error < 1e-5 and tight.gradient_error < 1e-5 and tight.largest_error < 1e-4
    assert tight.measured_peak_bytes <= tight.budget_bytes < tight.base_peak_bytes
    (exact,) = measure_errors(("narrow", "chunks", partial(WorkClock, 1.0)), ())
    assert (exact.bits, exact.budget) == (Bits.EXACT, "")
    assert "Nothing inexact is offered by: chunks on narrow." in format_error_table([*found, exact])
