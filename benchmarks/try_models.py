"""Models of many kinds under plans, compared with eager PyTorch and checkpointing: ``make try-models`` writes results/models/.

The models are handwritten, of Hugging Face, timm, torchvision, diffusers and PEFT; all small, with random weights. Each is tried
in its own process; refusals, failures and timeouts are rows too. Models in the CSV are skipped. The benchmark fails if a plan's
results are not bit-identical to eager's, or if it exceeds its budget.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any

from benchmarks.command import carry_out, command_line, one_thread
from benchmarks.try_model import (
    AT_ITS_PEAK,
    CHECKPOINTING,
    EAGER,
    FAILED,
    FIRST,
    MISSING,
    PLANNED,
    RAN,
    SHARES,
    R,
    TriedRow,
    sources,
    try_model,
)
from graphs.units import format_bytes
from planner import options
from planner.studies.experiment import Study
from planner.studies.processes import ALONE, ProcessError, stream
from planner.studies.rows import provenance
from planner.studies.tables import ALL, Column, bullets, markdown, said, side_by_side, unit_of

PACKAGES = ("transformers", "timm", "torchvision", "diffusers", "peft")
_LIMIT_S = 600.0


def in_a_process(
    rows_of: Callable[[str, str, int], Iterator[R]], kind: Callable[..., R], case: tuple[str, str], repeats: int, limit_s: float
) -> Iterator[R]:
    """Yield the rows of one model, by a process of its own, which may fail as a row does.

    Args:
        rows_of: yields rows with a `way`, some perhaps twice; of source, model and `repeats`.
        kind: the class of the rows.
    """
    source, model = case
    rows: dict[str, R] = {}
    try:
        for row in stream(rows_of, source, model, repeats, variables=ALONE, limit_s=limit_s):
            rows[row.way] = row
    except ProcessError as error:
        rows["process"] = kind(source=source, model=model, way="process", status=FAILED, message=str(error))
    yield from rows.values()


def try_one(case: tuple[str, str], known: Sequence[TriedRow], *, repeats: int) -> Iterator[TriedRow]:
    """Yield the rows of one model."""
    about = {**provenance(), **{package: _version(package) for package in PACKAGES}}
    yield from (replace(row, **about) for row in in_a_process(try_model, TriedRow, case, repeats, _LIMIT_S))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def plans(rows: Iterable[TriedRow]) -> list[TriedRow]:
    """Return those rows that are steps by a plan."""
    return [row for row in rows if row.way.startswith(PLANNED) and row.status == RAN]


def over(row: TriedRow) -> bool:
    """Return True if a plan exceeded its budget, including the memory of kernels."""
    return (row.peak_bytes or 0) > (row.budget_bytes or 0)


def over_in_storages(row: TriedRow) -> bool:
    """Return True if a plan exceeded its budget in storages."""
    return (row.storages_bytes or 0) > (row.budget_bytes or 0)


def summary(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield the summary of all models, in sentences."""
    planned = plans(rows)
    tried, models = (len({(row.source, row.model) for row in some}) for some in (rows, planned))
    last = [row for row in planned if not row.way.endswith(FIRST)]
    yield (
        f"{tried} models were tried, and {models} of them planned at {len(last)} budgets, and trained twice at "
        f"each: from the first plan on that fits, and by the last one. Of these {len(planned)} runs "
        f"{sum(row.different == 0 for row in planned)} have eager PyTorch's losses, gradients, parameters, buffers and random "
        f"state to the last bit, {sum(map(over_in_storages, planned))} took more than the budget in storages, counted as they "
        f"come and go, and {sum(map(over, planned))} with what kernels take for themselves. A better plan took the place of the "
        f"first at {sum((row.swaps or 0) > 0 for row in last)} budgets."
    )
    for way in _AT_SHARES:
        if ratios := [row.ratio for row in planned if row.way == way and row.ratio is not None]:
            yield (
                f"{way} of the way from the least budget to the peak: {median(ratios):.2f} times eager's step in the median, "
                f"{min(ratios):.2f} to {max(ratios):.2f}."
            )
    if ratios := [row.ratio_of_checkpointing for row in planned if row.ratio_of_checkpointing is not None]:
        yield (
            f"At the peak of checkpointing blocks, where that saves memory ({len(ratios)} models), the plan took "
            f"{min(ratios):.2f} to {max(ratios):.2f} of checkpointing's time, {median(ratios):.2f} in the median."
        )
    if wrong := [row.model for row in rows if row.way == CHECKPOINTING and row.status == RAN and row.different]:
        yield f"Checkpointing's own results are not eager's in {len(wrong)} models: {', '.join(wrong)}."


def _first_known(title: str, name: str) -> Column:
    """Return a column with the first known value of a model's rows."""

    def known(found: Mapping[str, TriedRow]) -> object:
        return next((value for row in found.values() if (value := getattr(row, name)) is not None), None)

    return Column(title, known, unit_of(name), at=ALL)


def _ran(title: str, way: str, name: str, form: str | None = None) -> Column:
    """Return a column of one way, empty if it did not run."""
    return Column(title, lambda row: getattr(row, name) if row.status == RAN else None, form or unit_of(name), at=way)


def _counted(title: str, counts: Callable[[TriedRow], bool]) -> Column:
    """Return the column of how many plans are as they should be."""
    return Column(title, lambda found: f"{sum(map(counts, planned := plans(found.values())))} of {len(planned)}", at=ALL)


_AT_SHARES = [f"{PLANNED} at {share:.0%}" for share in SHARES]
_PLANNED_FOR_IT = "planned for it"
TABLE = (
    Column("model", lambda row: f"{row.source}/{row.model}"),
    _first_known("ops", "ops"),
    _ran("eager's peak", EAGER, "peak_bytes"),
    _first_known("least", "least_bytes"),
    *(_ran(f"{share:.0%}", way, "ratio", "{:.2f}") for share, way in zip(SHARES, _AT_SHARES, strict=True)),
    _counted("identical", lambda row: row.different == 0),
    _counted("within budget", lambda row: not over(row) and not over_in_storages(row)),
    _ran("checkpointing's peak", CHECKPOINTING, "peak_bytes"),
    _ran("checkpointing", CHECKPOINTING, "ratio", "{:.2f}"),
    _ran(_PLANNED_FOR_IT, AT_ITS_PEAK, "ratio", "{:.2f}"),
    _ran("of checkpointing's time", AT_ITS_PEAK, "ratio_of_checkpointing", "{:.2f}"),
)


def table(rows: Sequence[TriedRow]) -> str:
    """Return all of it, as Markdown."""
    without = [row for row in rows if row.status != RAN and row.way != CHECKPOINTING]
    refused = bullets(f"{row.source}/{row.model}, {row.way}: {row.status}: {row.message}" for row in without)
    note = (
        f"Times are multiples of eager PyTorch's in the same turn, at budgets so far from the least to the peak. The budget of "
        f"`{_PLANNED_FOR_IT}` is the measured peak of checkpointing blocks.\n"
    )
    packages = ", ".join(f"{name} {said(rows, name)}" for name in PACKAGES)
    made = f"Seed {said(rows, 'seed')}; {said(rows, 'machine')}; torch {said(rows, 'torch')}"
    about = f"{made}, {packages}; commit {said(rows, 'commit')}.\n"
    lines = markdown(side_by_side(rows, "way", "source", "model"), TABLE)
    parts = (
        "# Models of many kinds\n",
        bullets(summary(rows)),
        note,
        lines,
        "## Not planned\n",
        refused if without else "Nothing.\n",
    )
    return "\n".join((*parts, about))


def failures(rows: Sequence[TriedRow]) -> Iterator[str]:
    """Yield a line for each failure: results that are not eager's though eager repeats itself, peaks over the budget, crashes."""
    unsteady = {row.model for row in rows if row.way == EAGER and row.different}
    for row in plans(rows):
        name = f"{row.source}/{row.model}, {row.way}"
        if row.different and row.model not in unsteady:
            yield f"{name}: {row.different} results are not eager's: {row.first_difference}"
        if over(row) or over_in_storages(row):
            taken = format_bytes(max(row.peak_bytes or 0, row.storages_bytes or 0))
            yield f"{name}: took {taken}, over its budget of {format_bytes(row.budget_bytes or 0)}"
    failed = (row for row in rows if row.status == FAILED and row.way != CHECKPOINTING)
    yield from (f"{row.source}/{row.model}, {row.way}: {row.message}" for row in failed)


def trying(
    study: Study[tuple[str, str], Any], description: str | None, *, out: str, say: Callable[[Any], str]
) -> Callable[[Sequence[str] | None], int]:
    """Return the ``main`` of a benchmark that tries the models: writes rows and table after each; returns 1 on failures.

    Args:
        study: of cases that are source and model. Its order is set here, and missing packages are looked for again.
        description, out: as for ``command_line``.
        say: as for ``carry_out``.
    """

    def main(words: Sequence[str] | None = None) -> int:
        names = [f"{source}/{model}" for source, models in sources().items() for model in models]
        parser = command_line(description, study.row, models=names, out=out)
        parser.add_argument("--repeats", type=options.count, default=9, help="steps timed of each way (default: %(default)s)")
        arguments = parser.parse_args(words)
        one_thread()
        tried = replace(
            study,
            run=partial(study.run, repeats=arguments.repeats),
            again=lambda rows: any(row.status == MISSING for row in rows),
            order=lambda row: names.index(f"{row.source}/{row.model}"),
        )
        cases = {(source, model): (source, model) for source, model in (name.split("/") for name in arguments.models)}
        return carry_out(tried, arguments, cases, say=say)

    return main


def _line(row: TriedRow) -> str:
    found = f"{row.different} results are not eager's" if row.status == RAN else f"{row.status}: {row.message}"
    return f"{row.source}/{row.model}, {row.way}: {found}"


STUDY = Study(TriedRow, try_one, pages={"table.md": table}, failures=failures)
main = trying(STUDY, __doc__, out="results/models", say=_line)


if __name__ == "__main__":
    sys.exit(main())
