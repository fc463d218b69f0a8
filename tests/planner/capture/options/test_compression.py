"""What keeps tensors in few bits: how much it changes them, and how much memory it takes."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.all_compressed import compress_all
from graphs.errors import GraphError, ScheduleError, TraceError, UsageError
from graphs.io.graph_document import build_from_dict, convert_to_dict
from graphs.ir import Graph, Phase
from graphs.options import remove_options
from graphs.options.compress import KEEP, RESTORE, VARIANCE, predict_variance
from graphs.simulate import simulate
from planner.capture.options import apply_options, check_options, check_traced
from planner.capture.options.compress.codec import DenseLayout, Keep, Restore
from planner.capture.options.compress.find import list_kept_tensors
from planner.capture.options.compress.forms import FORMS, GROUP
from planner.capture.options.traced import add_traced
from planner.capture.trace import capture
from planner.capture.workload.models import build
from planner.measure.roofline import model_times
from planner.settings.devices import get_device


def restored(value: torch.Tensor, form: str, number: int = 0) -> torch.Tensor:
    layout = DenseLayout(value, FORMS[form])
    (kept,) = Keep(layout, number)(value)
    assert kept.untyped_storage().nbytes() == layout.kept_bytes
    (made,) = Restore(layout)(kept)
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)
    assert made.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    return made


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounding_is_unbiased_with_the_variance_of_its_steps(bits: int) -> None:
    value = normal(20, GROUP)
    draws = 400
    errors = torch.stack([restored(value, str(bits), number) - value for number in range(draws)]).double()
    length = (value.amax(1, keepdim=True) - value.amin(1, keepdim=True)).double() / (2**bits - 1)
    part = (value - value.amin(1, keepdim=True)).double() / length
    part -= part.floor()
    expected = length**2 * part * (1 - part)
    # The mean over the draws is within 5 standard errors everywhere, but for arithmetic in float32.
    assert (errors.mean(0).abs() <= 5 * (expected / draws).sqrt() + 1e-5).all()
    assert errors.pow(2).mean().item() == pytest.approx(expected.mean().item(), rel=0.02)
    assert (errors.abs() <= length * (1 + 1e-4) + 1e-6).all()


def test_compression_keeps_group_extremes_and_constant_groups() -> None:
    value = torch.cat([normal(3 * GROUP), torch.full((GROUP,), 0.1), torch.full((5,), -7.3)])
    for form in ("1", "2", "4", "8"):
        made = restored(value, form)
        for group, of_made in zip(value.split(GROUP), made.split(GROUP), strict=True):
            assert of_made[group.argmin()] == group.min() and of_made[group.argmax()] == group.max()
        assert torch.equal(made[3 * GROUP :], value[3 * GROUP :])


@pytest.mark.parametrize("form", FORMS)
def test_nonfinite_values_affect_their_own_group_only(form: str) -> None:
    for bad in (float("nan"), float("inf"), float("-inf")):
        value = normal(3 * GROUP)
        value[GROUP + 7] = bad
        made = restored(value, form)
        groups = made.view(3, GROUP)
        assert groups[1].isnan().all() if form != "float8" else groups[1].isnan().any()
        assert groups[0].isfinite().all() and groups[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [1, 255, 257, 70000])
def test_sizes_and_types_of_all_kinds(elements: int, dtype: torch.dtype) -> None:
    value = normal(elements, dtype=dtype)
    for form in FORMS:
        made = restored(value, form)
        largest = value.abs().max().item()
        assert (made - value).abs().max().item() <= largest * (2.1 if form == "1" else 1.0)


def test_float8_is_within_half_a_step() -> None:
    value = normal(64, GROUP)
    error = (restored(value, "float8") - value).abs()
    smallest = value.abs().amax(1, keepdim=True) / 448 * 2**-9
    assert (error <= value.abs() / 16 + smallest).all()


def test_memory_to_the_byte_and_other_orders_of_elements() -> None:
    value = normal(4, 16, 16, 8).permute(0, 3, 1, 2)  # channels last
    four = DenseLayout(value, FORMS["4"])
    assert four.kept_bytes == 32 * (128 + 8) and value.numel() * 4 / four.kept_bytes == pytest.approx(7.53, abs=0.01)
    assert (restored(value, "8") - value).abs().max() < 0.05
    with pytest.raises(TraceError, match="strides"):
        Keep(four, 0)(value.contiguous())


def test_the_same_numbers_are_rounded_in_the_same_way_and_no_generator_is_asked() -> None:
    value, before = normal(1000), torch.get_rng_state()
    assert torch.equal(restored(value, "2"), restored(value, "2"))
    assert not torch.equal(restored(value, "2"), restored(value, "2", number=1))
    other = value.clone()
    other[3] += 1e-6
    assert (restored(value, "2") != restored(other, "2")).sum() > 100
    assert torch.equal(torch.get_rng_state(), before)


@cache
def small() -> Graph:
    workload = build("mlp", layers=3, width=64, batch=64)
    return model_times(add_traced(capture(*workload), ["compress"]), get_device("cpu"))


def test_compression_bits_are_parsed_from_option_names() -> None:
    check_traced(["compress"])
    check_traced(["compress:4"])
    for names, said in (
        (["compress:9"], "'9' bits: must be a whole number from 1 to 8, as in 'compress:4'"),
        (["compress:"], "must be a whole number from 1 to 8"),
        (["compress:4.5"], "'4.5' bits"),
        (["chunks:4"], "has no number, but 'chunks:4' was given"),
        (["compress:4", "compress:8"], "named twice"),
        (["press:4"], "no option 'press'"),
    ):
        with pytest.raises(UsageError, match=said):
            check_options(names)
    with pytest.raises(UsageError, match=r"needs a number of bits from 1 to 8, which limits.*'compress:4'"):
        apply_options(small(), ["compress"])


def test_graphs_hold_every_form_and_the_limit_comes_with_the_bits() -> None:
    graph = small()
    assert graph.provenance["sensitivity"] == "modelled"
    assert build_from_dict(convert_to_dict(graph)) == graph
    found = apply_options(graph, ["compress:4"])
    assert build_from_dict(convert_to_dict(found)) == found
    four = sum(op.used(VARIANCE) for op in graph.ops if op.target == f"{RESTORE}.4")
    assert dict(found.limits)[VARIANCE] == pytest.approx(four) and predict_variance(graph, 8) == pytest.approx(four / 17**2)
    assert len(apply_options(graph, ()).ops) == len(graph.program)
    restored_tensors = {t for op in graph.ops if op.target.startswith(RESTORE) for t in op.outputs}
    for op in graph.ops:
        # The forward pass never reads what is lossy, and nothing that is lossy is kept.
        assert restored_tensors.isdisjoint(op.inputs) or (op.phase is Phase.BACKWARD and op.replaces)
        if op.target.startswith(KEEP):
            assert graph.tensors[op.inputs[0]].producers[0] < len(graph.program)


def test_the_judge_counts_each_lossy_op_once() -> None:
    graph = apply_options(small(), ["compress:4"])
    schedule = compress_all(graph, "4")
    assert graph.used(VARIANCE, (*schedule.computed, *schedule.computed)) == pytest.approx(dict(graph.limits)[VARIANCE])
    kept = simulate(graph, schedule)
    assert kept.peak_bytes > 0
    with pytest.raises(ScheduleError, match=r"uses? .* of 'gradient variance' \(limit "):
        simulate(graph, compress_all(graph, "2"))
    assert simulate(replace(graph, limits=()), compress_all(graph, "2")).time_s > 0


@pytest.mark.parametrize("variance", [-1.0, float("nan"), float("inf")])
def test_variances_that_cannot_be_are_refused(variance: float) -> None:
    graph = small()
    last = graph.ops[-1]
    with pytest.raises(GraphError, match="variance"):
        replace(graph, ops=(*graph.ops[:-1], replace(last, uses=((VARIANCE, variance),))))
    with pytest.raises(GraphError, match="uses 'gradient variance', but is not optional"):
        replace(graph, ops=(graph.ops[0].using(VARIANCE, 1.0), *graph.ops[1:]))
    with pytest.raises(GraphError, match=r"the graph allows -1\.0 of 'gradient variance'"):
        replace(graph, limits=((VARIANCE, -1.0),))
    assert remove_options(graph).ops == graph.program


def test_small_models_have_no_compressed_tensors() -> None:
    found = add_traced(capture(*build("mlp", layers=2, width=8, batch=4, classes=10)), ["compress"])
    assert list_kept_tensors(found) == [] and len(found.graph.ops) == len(found.graph.program)
