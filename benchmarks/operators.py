"""The bits of single operators: ``make bench-operators`` writes results/operators/.

Each operator of PyTorch's own tests (OpInfo) that has gradients runs forward and backward on its first samples in four types, in
eager PyTorch and in a model with ``planner.checkpoint``; where that differs or does not run, also in a model compiled with
``torch.compile(backend="planner")``, whose graphs are the same, and with ``backend="aot_eager"``. Results, gradients and the
random numbers drawn are compared to the last bit.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import planner
from benchmarks.command import Main, Setting
from planner.graphs.errors import first_line
from planner.studies.experiment import Study
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, order_by
from planner.studies.tables import Column, format_markdown
from planner.torch_private.capture import dynamo_utils
from planner.torch_private.core import pytree

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
NAMESPACES = ("nn.functional", "linalg", "special", "fft", "masked")
LETTERS = ("a-b", "c-d", "e-i", "j-l", "m-n", "o-r", "s", "t-z")  # of the other operators' names
FAMILIES = (*NAMESPACES, *LETTERS)
_QUICK: dict[str, Any] = {"budget": "100%", "roofline": "cpu", "wait": 0.05}
WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "checkpoint": lambda model: planner.checkpoint(model, **_QUICK),
    "backend": lambda model: torch.compile(model, backend="planner", options=_QUICK),
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow(Made):
    """An operator in one type and by one way."""

    family: str = declare_key()
    operator: str = declare_key("its name in PyTorch's tests, and the variant of the test")
    dtype: str = declare_key()
    way: str = declare_key()
    samples: int = declare_column("compared with eager PyTorch's")
    graphs: int = declare_column("that Dynamo has captured of these")
    differing: int = declare_column("of these in any bit")
    error: float | None = declare_column("the largest difference, as a share of the largest number; None if not finite")
    failed: str = declare_column("the error of a sample that did not run", default="")


class Called(nn.Module):
    """An operator as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, given: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: D102
        return self.function(given, *args, **kwargs)


def measure(family: str, known: Sequence[OperatorRow], *, samples: int) -> Iterator[OperatorRow]:
    """Yield the rows of the operators of a family."""
    warnings.simplefilter("ignore")
    for info in iterate_operators(family):
        operator = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        for name, dtype in DTYPES.items():
            if dtype in info.supported_dtypes("cpu") and dtype in info.supported_backward_dtypes("cpu"):
                yield from compare(family, operator, info, name, samples)


def iterate_operators(family: str) -> Iterator[Any]:
    """Yield PyTorch's descriptions of the operators with gradients in a family."""
    from planner.torch_private.testing import op_db  # needs expecttest

    for info in op_db:
        namespace = next((name for name in NAMESPACES if info.name.startswith(f"{name}.")), None)
        letter = info.name.lstrip("_")[0].lower()
        found = namespace or next(letters for letters in LETTERS if letters[0] <= letter <= letters[-1])
        if found == family and info.supports_autograd:
            yield info


def compare(family: str, operator: str, info: Any, dtype: str, count: int) -> Iterator[OperatorRow]:
    """Yield the row of an operator in one type for each way."""
    torch.manual_seed(0)
    samples = [s for s in islice(info.sample_inputs("cpu", DTYPES[dtype], requires_grad=True), count) if _is_trained(s)]
    wanted = [(sample, found) for sample in samples if isinstance(found := _run_operator(Called(info.op), sample), list)]
    if not wanted:
        return
    for way, wrap in WAYS.items():
        errors, failed, graphs = list[float](), "", 0
        for sample, expected in wanted:
            torch.compiler.reset()
            dynamo_utils.counters.clear()
            found = _run_operator(wrap(Called(info.op)), sample)
            graphs += dynamo_utils.counters["stats"]["unique_graphs"]
            if isinstance(found, Exception):
                failed = f"{type(found).__name__}: {first_line(getattr(found, 'inner_exception', found))}"[:150]
            elif not _is_same(expected, found):
                errors.append(_compute_error(expected, found))
        row = OperatorRow(
            family=family,
            operator=operator,
            dtype=dtype,
            way=way,
            samples=len(wanted),
            graphs=graphs,
            differing=len(errors),
            error=max(errors, default=0.0) if all(error < float("inf") for error in errors) else None,
            failed=failed,
            **collect_provenance(),
        )
        yield row
        if way == "checkpoint" and not row.differing and not row.failed:
            return


def _is_trained(sample: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(sample.input))


def _run_operator(run: Callable[..., Any], sample: Any) -> list[Tensor] | Exception:
    """Return results, gradients of the inputs, and a random number drawn after; the exception if it does not run."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    given = pytree.tree_unflatten(fresh, spec)
    torch.manual_seed(1)
    try:
        results = [r for r in pytree.tree_leaves(run(*given)) if isinstance(r, Tensor)]
        trained = [r for r in results if r.requires_grad]
        if not trained:
            return ValueError("no result has a gradient")
        torch.autograd.backward(trained, [torch.linspace(0.5, 1.5, r.numel()).view(r.shape).to(r) for r in trained])
    except Exception as error:  # noqa: BLE001  # whatever it is, it is noted
        return error
    gradients = [x.grad for x in fresh if isinstance(x, Tensor) and x.grad is not None]
    return [*(r.detach() for r in results), *gradients, torch.rand(1)]


def _is_same(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return len(wanted) == len(found) and all(_has_same_bits(a, b) for a, b in zip(wanted, found, strict=True))


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    a, b = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.to_dense() for x in (a, b))
    return torch.equal(*(torch.nan_to_num(x) if x.is_floating_point() else x for x in (a, b)))


def _compute_error(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference as a share of the largest number; infinity if shapes differ or it is not finite."""
    if [a.shape for a in wanted] != [b.shape for b in found]:
        return float("inf")
    errors = [0.0]
    for a, b in zip(wanted, found, strict=True):
        if a.numel() and not _has_same_bits(a, b):
            wide = torch.complex128 if a.is_complex() else torch.float64
            exact, other = a.to_dense().to(wide), b.to_dense().to(wide)
            errors.append(((exact - other).abs().max() / exact.abs().max().clamp(min=1e-30)).item())
    return max(errors) if all(error < float("inf") for error in errors) else float("inf")


TABLE = (
    *("operator", "dtype", "way", "samples", "graphs", "differing"),
    Column("largest difference", "error", "{:.1e}", missing="not finite"),
    Column("does not run", "failed"),
)


def format_table(rows: Sequence[OperatorRow]) -> str:
    """Return the counts of each type and way, and the operators that differ or do not run by checkpoint or backend.

    Operators whose tests set seeds (dropout) are not captured, and run as in eager PyTorch.
    """
    counts = ["| type | way | operators | not captured | equal in all bits | differ | do not run |", f"|{' --- |' * 7}"]
    for dtype in DTYPES:
        for way in WAYS:
            some = [row for row in rows if (row.dtype, row.way) == (dtype, way)]
            differ, fail = sum(row.differing > 0 for row in some), sum(bool(row.failed) for row in some)
            eager = sum(not row.graphs for row in some)
            equal = sum(not row.differing and not row.failed and row.graphs > 0 for row in some)
            counts.append(f"| {dtype} | {way} | {len(some)} | {eager} | {equal} | {differ} | {fail} |")
    noted = {(row.operator, row.dtype) for row in rows if row.way != "aot_eager" and (row.differing or row.failed)}
    return (
        "\n".join(counts) + "\n\n" + format_markdown([row for row in rows if (row.operator, row.dtype) in noted], columns=TABLE)
    )


STUDY = Study(OperatorRow, measure, order=order_by(family=FAMILIES, dtype=DTYPES, way=WAYS), pages={"table.md": format_table})
main = Main(STUDY, FAMILIES, settings={"samples": Setting(2, "of each operator")})
