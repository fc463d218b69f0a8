"""What trying models has shown: from the CSV alone, a line for each model, what they say together, and what must not be."""

from pathlib import Path

import pandas as pd

from benchmarks.try_model import AT_ITS_PEAK, CHECKPOINTING, EAGER, FAILED, FIRST, MISSING, PLANNED, RAN, REFUSED, SHARES
from graphs.units import format_bytes
from planner.report.tables import as_markdown

_WHOLE = ("ops", "least_bytes", "keeping_bytes", "budget_bytes", "storages_bytes", "peak_bytes", "different", "swaps")
_PACKAGES = ("transformers", "timm", "torchvision", "diffusers", "peft")
_NAME = ["source", "model"]
_AT_SHARES = [f"{PLANNED} at {share:.0%}" for share in SHARES]
HEADER = (
    "model",
    "ops",
    "eager's peak",
    "least",
    *(f"{share:.0%}" for share in SHARES),
    "identical",
    "within budget",
    "checkpointing's peak",
    "checkpointing",
    "planned for it",
    "of checkpointing's time",
)


def read_rows(path: Path) -> pd.DataFrame:
    """The CSV; whole numbers stay so where some are unknown."""
    return pd.read_csv(path, dtype=dict.fromkeys(_WHOLE, "Int64"), keep_default_na=False, na_values=[""])


def plans(rows: pd.DataFrame) -> pd.DataFrame:
    """Those rows that are steps by a plan, with whether each took more than its budget, in storages and in all."""
    ran = rows[rows["way"].str.startswith(PLANNED) & (rows["status"] == RAN)]
    return ran.assign(storages_over=ran["storages_bytes"] > ran["budget_bytes"], over=ran["peak_bytes"] > ran["budget_bytes"])


def summary(rows: pd.DataFrame) -> str:
    """What all models say together."""
    planned, tried = plans(rows), rows.drop_duplicates(_NAME)
    models = planned.drop_duplicates(_NAME)
    last = ~planned["way"].str.endswith(FIRST)
    lines = [
        (
            f"{len(tried)} models were tried, and {len(models)} of them planned at {last.sum()} budgets, and trained twice at "
            f"each: from the first plan on that fits, and by the last one. Of these {len(planned)} runs "
            f"{(planned['different'] == 0).sum()} have eager PyTorch's losses, gradients, parameters, buffers and random state "
            f"to the last bit, {planned['storages_over'].sum()} took more than the budget in storages, counted as they come "
            f"and go, and {planned['over'].sum()} with what kernels take for themselves. A better plan took the place of the "
            f"first at {(planned.loc[last, 'swaps'] > 0).sum()} budgets."
        ),
    ]
    for way in _AT_SHARES:
        ratios = planned.loc[planned["way"] == way, "ratio"].dropna()
        if len(ratios):
            lines.append(
                f"{way} of the way from the least budget to the peak: {ratios.median():.2f} times eager's step in the median, "
                f"{ratios.min():.2f} to {ratios.max():.2f}."
            )
    ratios = planned["ratio_of_checkpointing"].dropna()
    if len(ratios):
        lines.append(
            f"At the peak of checkpointing blocks, where that saves memory ({len(ratios)} models), the plan took "
            f"{ratios.min():.2f} to {ratios.max():.2f} of checkpointing's time, {ratios.median():.2f} in the median."
        )
    wrong = rows[(rows["way"] == CHECKPOINTING) & (rows["status"] == RAN) & (rows["different"] > 0)]
    if len(wrong):
        lines.append(f"Checkpointing's own results are not eager's in {len(wrong)} models: {', '.join(wrong['model'])}.")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def not_planned(rows: pd.DataFrame) -> str:
    """What was refused, failed, or is not installed, a line each."""
    without = rows[rows["status"].isin([REFUSED, FAILED, MISSING]) & (rows["way"] != CHECKPOINTING)]
    lines = [f"- {row.source}/{row.model}, {row.way}: {row.status}: {row.message}" for row in without.itertuples()]
    return "\n".join(lines) + "\n" if lines else "Nothing.\n"


def _all(values: pd.Series) -> str:
    """All that rows say, where they were made at several times."""
    return " and ".join(map(str, values.dropna().unique()))


def table(path: Path) -> str:
    """All of it, as Markdown."""
    rows = read_rows(path)
    lines = [_line(group.set_index("way")) for _, group in rows.groupby(_NAME, sort=False)]
    packages = ", ".join(f"{name} {_all(rows[name])}" for name in _PACKAGES)
    about = (
        f"Seed {_all(rows['seed'])}; {_all(rows['machine'])}; torch {_all(rows['torch'])}, {packages}; commit "
        f"{_all(rows['commit'])}.\n"
    )
    note = (
        f"Times are multiples of eager PyTorch's in the same turn, at budgets so far from the least to the peak. The budget of "
        f"`{HEADER[-2]}` is the measured peak of checkpointing blocks.\n"
    )
    parts = (
        "# Models of many kinds\n",
        summary(rows),
        note,
        as_markdown([HEADER, *lines]),
        "## Not planned\n",
        not_planned(rows),
    )
    return "\n".join((*parts, about))


def failures(path: Path) -> list[str]:
    """What must not be, a line each: results that are not eager's though eager repeats itself, peaks over the budget, crashes."""
    rows = read_rows(path)
    unsteady = set(rows.loc[(rows["way"] == EAGER) & (rows["different"] > 0), "model"])
    said = []
    for row in plans(rows).itertuples():
        if row.different and row.model not in unsteady:
            said.append(f"{row.source}/{row.model}, {row.way}: {row.different} results are not eager's: {row.first_difference}")
        if row.over or row.storages_over:
            taken = format_bytes(max(row.peak_bytes, row.storages_bytes))
            said.append(f"{row.source}/{row.model}, {row.way}: took {taken}, over its budget of {format_bytes(row.budget_bytes)}")
    failed = rows[(rows["status"] == FAILED) & (rows["way"] != CHECKPOINTING)]
    return [*said, *(f"{row.source}/{row.model}, {row.way}: {row.message}" for row in failed.itertuples())]


def _line(ways: pd.DataFrame) -> tuple[str, ...]:
    """The line of one model, whose rows have their way as index."""
    ran = ways[ways["status"] == RAN]
    planned = plans(ran.reset_index())
    within = len(planned) - (planned["over"] | planned["storages_over"]).sum()
    known = ways.dropna(subset=["ops"])
    ops, least = (str(known["ops"].iloc[0]), format_bytes(int(known["least_bytes"].iloc[0]))) if len(known) else ("", "")
    return (
        f"{ways['source'].iloc[0]}/{ways['model'].iloc[0]}",
        ops,
        _bytes(ran, EAGER),
        least,
        *(_times(ran, way, "ratio") for way in _AT_SHARES),
        f"{(planned['different'] == 0).sum()} of {len(planned)}",
        f"{within} of {len(planned)}",
        _bytes(ran, CHECKPOINTING),
        _times(ran, CHECKPOINTING, "ratio"),
        _times(ran, AT_ITS_PEAK, "ratio"),
        _times(ran, AT_ITS_PEAK, "ratio_of_checkpointing"),
    )


def _bytes(ran: pd.DataFrame, way: str) -> str:
    return format_bytes(int(ran.at[way, "peak_bytes"])) if way in ran.index else ""


def _times(ran: pd.DataFrame, way: str, column: str) -> str:
    return f"{ran.at[way, column]:.2f}" if way in ran.index and pd.notna(ran.at[way, column]) else ""
