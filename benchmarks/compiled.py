"""Plans over Inductor's kernels compared with ``torch.compile`` and its Memory Budget API: ``make bench-compiled``.

At each budget all methods take turns with ``torch.compile``, so the rows of a model are measured together; models in the CSV are
skipped. Kernels in Inductor's cache on disk are not compiled again. Models of Hugging Face are left out if transformers is not
installed.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median

import torch

from benchmarks.command import Main, Setting
from benchmarks.compiled_case import ATEN, IN_ARENA, OURS, REFERENCE, CompiledRow, Settings, compare_compiled
from benchmarks.models import huggingface_models as hf
from planner.capture.workload.models import Workload, build
from planner.graphs.units import format_bytes, format_seconds
from planner.studies.experiment import Study
from planner.studies.rows import order_by
from planner.studies.tables import Column, format_bullets, format_markdown, group_by, join_markdown
from planner.torch_private.core import pytree

_GPT2 = partial(build, "gpt2", layers=4, width=64, heads=4, vocab=500, batch=8, seq=128)

# At sizes of which a step takes 10 to 100 ms on one thread.
ZOO: dict[str, Callable[[], Workload]] = {
    "gpt2": partial(_GPT2, dropout=0),
    "gpt2-dropout": _GPT2,
    "llama": partial(build, "llama", layers=4, width=64, heads=4, kv_heads=2, hidden=192, vocab=500, batch=8, seq=128),
    "vit": partial(build, "vit", layers=4, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "resnet18": partial(build, "resnet18", width=16, size=64, classes=10, batch=8),
    "resnet50": partial(build, "resnet50", width=8, size=64, classes=10, batch=8),
    "mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=8, dropout=0),
    "unet": partial(build, "unet", channels=8, size=64, batch=4, depth=3),
}
_WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
HUGGING_FACE: dict[str, Callable[[], Workload]] = {
    "hf-bert": partial(hf.masked_model, "Bert", **_WIDE, intermediate_size=512, max_position_embeddings=64),
    "hf-qwen3": partial(hf.language_model, "Qwen3", **_WIDE, intermediate_size=384, num_key_value_heads=2, head_dim=32),
    "hf-convnext": partial(hf.image_classifier, "ConvNext", 64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]),
}
MODELS = ZOO | HUGGING_FACE


def measure(name: str, known: Sequence[CompiledRow], *, device: str, repeats: int) -> list[CompiledRow]:
    """Return the rows of one model, and discard its compiled code."""
    if name in HUGGING_FACE and find_spec("transformers") is None:
        print(f"{name} is left out: transformers is not installed (pip install transformers)", file=sys.stderr)
        return []
    settings = Settings(repeats=repeats)
    torch.manual_seed(settings.seed)
    workload = MODELS[name]()
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), workload.batch)
    workload = workload._replace(model=workload.model.to(device), batch=batch)
    rows = compare_compiled(workload, name, settings, on_row=_print_row)
    torch.compiler.reset()
    gc.collect()
    return rows


def _print_row(row: CompiledRow) -> None:
    found = row.error or f"{row.measured_peak_bytes} bytes, {row.bits} {row.variant}"
    print(f"{row.model}: {row.method} {row.budget}: {found}", file=sys.stderr, flush=True)


# What a plan over Inductor's kernels is to reach.
_MISPREDICTED = 0.01  # of the measured peak
_SLOWER = 0.02  # at the reference's peak, of its time

_METHODS = {OURS: "Inductor's kernels", IN_ARENA: "Inductor's kernels, in an arena", ATEN: "ATen's ops"}
_CAPTION = """\
Step times are multiples of `torch.compile`'s, measured alternately (medians). Budgets are shares of its measured peak; infeasible
budgets show the least share that is known to be feasible. After a time: how Inductor compiled the kernels, if not as
`torch.compile` does; and the difference of loss and gradients, if they are not identical, from eager PyTorch's for ATen's ops,
else from `torch.compile`'s.
"""
_PEAKS_CAPTION = """\
Each setting of `activation_memory_budget`, and the plan over Inductor's kernels within the measured peak of that setting.
"""


def format_table(rows: Sequence[CompiledRow]) -> str:
    """Return the summary, each method at each budget, and plans within the peaks of PyTorch's Memory Budget API."""
    return "\n".join(
        (
            format_bullets(summarize_rows(rows)),
            "## Plans at shares of torch.compile's peak\n",
            _CAPTION,
            join_markdown(list(_iterate_budgets(rows))),
            "## At the Memory Budget API's own peaks\n",
            _PEAKS_CAPTION,
            format_markdown(_iterate_peaks(rows), _PEAKS),
        )
    )


def summarize_rows(rows: Sequence[CompiledRow]) -> Iterator[str]:
    """Yield the results of plans over Inductor's kernels in total, and the targets that they miss."""
    ours = [row for row in rows if row.method == OURS and row.measured_peak_bytes is not None]
    counted = f"of {len(ours)} plans over Inductor's kernels"
    over = [row for row in ours if (row.measured_peak_bytes or 0) > (row.budget_bytes or 0)]
    yield f"{counted}, {len(over)} take more than their budget{_format_names(over)}"
    errors = {row: row.misprediction or 0.0 for row in ours}
    far = [row for row, error in errors.items() if error > _MISPREDICTED]
    exact = sum(error == 0 for error in errors.values())
    yield (
        f"{counted}, {len(ours) - len(far)} have a measured peak within {_MISPREDICTED:.0%} of the predicted one, {exact} to the "
        f"byte{_format_names(far)}"
    )
    other = [row for row in ours if row.bits != "identical"]
    equal = len(ours) - len(other)
    yield f"{counted}, {equal} have the loss and gradients of torch.compile to the last bit{_format_names(other)}"
    whole = [row for row in ours if row.budget == "100%" and row.ratio is not None]
    slow = [row for row in whole if (row.ratio or 0.0) > 1 + _SLOWER]
    yield f"at torch.compile's own peak: {_format_spread(row.ratio for row in whole)} of its time{_format_names(slow)}"
    peers = [row for row in ours if row.peer_ratio is not None]
    slow = [row for row in peers if (row.peer_ratio or 0.0) > 1]
    yield f"at the Memory Budget API's peaks: {_format_spread(row.peer_ratio for row in peers)} of its time{_format_names(slow)}"
    yield from _summarize_arenas(rows)
    none = [row for row in rows if row.method == OURS and row.peer and row.measured_peak_bytes is None]
    yield f"at the Memory Budget API's peaks: {len(none)} without a plan{_format_names(none)}"
    baselines = [row for row in rows if row.method.startswith("memory-budget")]
    wrong = [row for row in baselines if row.bits == "wrong" or row.error]
    yield f"of {len(baselines)} runs of the Memory Budget API, {len(wrong)} fail or compute other gradients{_format_names(wrong)}"


def _summarize_arenas(rows: Sequence[CompiledRow]) -> Iterator[str]:
    """Yield the results of plans in arenas, beside the same without one; nothing if there are none."""
    without = {(row.model, row.budget): row for row in rows if row.method == OURS}
    arenas = [row for row in rows if row.method == IN_ARENA and row.measured_peak_bytes is not None]
    if not arenas:
        return
    over = [row for row in arenas if (row.measured_peak_bytes or 0) > (row.budget_bytes or 0)]
    other = [row for row in arenas if row.bits != "identical"]
    yield f"of {len(arenas)} plans in an arena, {len(over)} take more than their budget{_format_names(over)}"
    yield f"of {len(arenas)} plans in an arena, {len(arenas) - len(other)} have the bits of torch.compile{_format_names(other)}"
    pairs = [(row.ratio, without[row.model, row.budget].ratio) for row in arenas]
    yield f"in an arena, of the time without: {_format_spread(own / plain for own, plain in pairs if own and plain)}"


def _format_spread(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"median {median(known):.3f}x, worst {max(known):.3f}x" if known else "nothing measured"


def _format_names(rows: Sequence[CompiledRow]) -> str:
    named = (f"{row.model} {row.budget or row.method}" for row in rows)
    return f" ({', '.join(named)})" if rows else ""


def _iterate_budgets(rows: Sequence[CompiledRow]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each model and method, with a cell for each budget."""
    budgets = list(dict.fromkeys(row.budget for row in rows if row.budget and not row.peer))
    yield ("model", REFERENCE, "kernels", *budgets)
    for model, own in group_by(rows, "model").items():
        methods = group_by(own, "method")
        (reference,) = methods[REFERENCE]
        taken = _format_taken(reference) if reference.time_s is not None else reference.error
        for method in [method for method in _METHODS if method in methods]:
            found = {row.budget: row for row in methods[method]}
            yield (model, taken, _METHODS[method], *(_format_cell(found[b], reference) if b in found else "" for b in budgets))
        if not _METHODS.keys() & methods.keys():
            yield (model, taken, "none", *("" for _ in budgets))


def _format_taken(row: CompiledRow) -> str:
    return f"{format_seconds(row.time_s or 0.0)}, {format_bytes(row.measured_peak_bytes or 0)}"


def _format_cell(row: CompiledRow, reference: CompiledRow) -> str:
    if row.ratio is None:
        if row.least_bytes is None:
            return row.error
        return f"infeasible, needs {row.least_bytes / (reference.measured_peak_bytes or 1):.1%}"
    kernels = f" {row.variant}" if row.variant not in ("", "default") else ""
    return f"{row.ratio:.3f}x{kernels}{'' if row.bits == 'identical' else f' ({row.bits})'}"


@dataclass(frozen=True, slots=True)
class _Peak:
    """A setting of the Memory Budget API, the reference, and the plan for as much memory; None if the setting does not run."""

    row: CompiledRow
    reference: CompiledRow
    plan: CompiledRow | None


def _iterate_peaks(rows: Sequence[CompiledRow]) -> Iterator[_Peak]:
    found = {(row.model, row.peer or row.method): row for row in rows if row.peer or row.method == REFERENCE}
    for row in rows:
        if row.method.startswith("memory-budget"):
            yield _Peak(row, found[row.model, REFERENCE], found.get((row.model, row.method)))


def _make_peak_column(title: str, value: Callable[[_Peak], object], form: str | None = None) -> Column:
    """Return a column for settings that ran together with a plan for their peak."""
    return Column(title, lambda peak: None if peak.row.ratio is None or peak.plan is None else value(peak), form)


_PEAKS = (
    Column("model", "row.model"),
    Column("setting", lambda peak: peak.row.method.split()[1]),
    Column("peak", lambda peak: peak.row.error if peak.row.ratio is None else format_bytes(peak.row.measured_peak_bytes or 0)),
    _make_peak_column(
        "of torch.compile's", lambda peak: peak.row.measured_peak_bytes / (peak.reference.measured_peak_bytes or 1), "{:.1%}"
    ),
    _make_peak_column("time", lambda peak: peak.row.ratio, "{:.3f}x"),
    _make_peak_column("gradients", lambda peak: peak.row.bits),
    _make_peak_column("plan's time", lambda peak: _format_cell(peak.plan, peak.reference)),
    _make_peak_column("plan over it", lambda peak: peak.plan.peer_ratio, "{:.3f}x"),
    _make_peak_column("gap", lambda peak: peak.plan.gap, "{:z.2%}"),
    _make_peak_column("planned in", lambda peak: peak.plan.plan_s, "{:.0f} s"),
    _make_peak_column("of it compiled in", lambda peak: peak.plan.compile_s, "{:.0f} s"),
)


STUDY = Study(CompiledRow, measure, order=order_by(model=MODELS), pages={"table.md": format_table})
SETTINGS = {
    "device": Setting("cuda" if torch.cuda.is_available() else "cpu", "where to train", str),
    "repeats": Setting(31, "turns that are timed"),
}
main = Main(STUDY, MODELS, settings=SETTINGS)
