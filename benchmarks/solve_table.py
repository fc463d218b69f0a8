"""What the rows of ``benchmarks.solve`` say: a page of tables and two figures, made from the CSV alone."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from planner.report.plots import COLORS

NEAR = 0.005  # gap up to which a solve counts as near to optimal
TOLERANCE = 1e-3  # of the solves: costs that differ by no more are the same
FIRST_LIMITS = ((1_500, 5.0), (5_000, 20.0))  # ops, and by when a graph of so many has a first schedule, in seconds
WHOLE = ("run", "budget_bytes", "ops", "model_rows", "model_columns", "resident_mb")
REFERENCE = "checkmate"
BY_REFERENCE = "reference: Checkmate's program"
# Colours and markers of the suites, which colour-blind readers tell apart, and the colour of the reference.
_SUITES = (("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#56B4E9", "P"), ("#000000", "X"))
_REFERENCE_COLOR = "#D55E00"
SOLVE = ["suite", "graph", "budget", "solver"]
NOTE = {
    "checkmate-24h": "Profiled training graphs, with what Gurobi (12 threads, up to 24 h) reached on Checkmate's program.",
    "reference": (
        "The windows solver and Checkmate's program as published (solver `checkmate`), on one machine, by the same HiGHS, "
        "in turns. Both free an output that nothing reads at once. Writing is the part of the reference's seconds that "
        "goes into writing its program. Costs agree if they differ by no more than the tolerance of the solves."
    ),
    "growth": "GPT-2 of 6 to 96 layers; rows and columns are those of the largest program that was solved.",
    "zoo": "Models traced for an H200; `least + 0.5` is half way from the least budget that was found to the peak.",
    "moccasin": "Training graphs and random layered graphs as published with Moccasin.",
}


def read_rows(path: Path) -> pd.DataFrame:
    """The CSV; whole numbers stay so where some are unknown."""
    return pd.read_csv(path, dtype=dict.fromkeys(WHOLE, "Int64"))


def table_text(rows: pd.DataFrame) -> str:
    """The rows as Markdown: for each suite what they say together, and a table."""
    solves = medians(rows)
    parts = ["# The windows solver\n"]
    for suite, group in solves.groupby("suite", sort=False):
        body = reference_part(group) if suite == "reference" else suite_part(group)
        parts += [f"## {suite}\n", f"{NOTE.get(str(suite), '')}\n".lstrip("\n"), body]
    return "\n".join([*parts, provenance(rows)])


def medians(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each solve: medians of the times of its runs, the most of their memory, else what its first run says."""
    how = dict.fromkeys(rows.columns.drop(SOLVE), "first")
    how |= {"seconds": "median", "first_s": "median", "writing_s": "median", "resident_mb": "max", "run": "max"}
    solves = rows.groupby(SOLVE, sort=False, as_index=False).agg(how).rename(columns={"run": "runs"})
    return solves.assign(overhead=solves["time_s"] / solves["base_s"] - 1, bound=solves["bound_s"] / solves["base_s"] - 1)


def solved(solves: pd.DataFrame) -> "pd.Series[bool]":
    """Whether each was solved nearly to the optimum, or proved to have no schedule."""
    return (solves["gap"] <= NEAR) | (solves["status"] == "infeasible")


def suite_part(solves: pd.DataFrame) -> str:
    """What the windows solver reached in one suite."""
    columns = {
        "graph": texts(solves["graph"], str),
        "ops": texts(solves["ops"], "{:,}".format),
        "budget": texts(solves["budget"], str),
        "status": texts(solves["status"], str),
        "overhead": texts(solves["overhead"], "{:.2%}".format),
        "bound": texts(solves["bound"], "{:.2%}".format),
        "gap": texts(solves["gap"], "{:.2%}".format),
    }
    if solves["reference_time_s"].notna().any():
        columns["cost / Gurobi's"] = texts(solves["time_s"] / solves["reference_time_s"], "{:.4f}".format)
        columns["Gurobi's seconds"] = texts(solves["reference_seconds"], "{:,.0f}".format)
    if solves["suite"].iloc[0] == "growth":
        columns["rows"] = texts(solves["model_rows"], "{:,}".format)
        columns["columns"] = texts(solves["model_columns"], "{:,}".format)
    columns["first schedule"] = texts(solves["first_s"], "{:.2f} s".format)
    columns["seconds"] = texts(solves["seconds"], "{:.2f}".format)
    columns["resident MB"] = texts(solves["resident_mb"], "{:,}".format)
    return f"{summary(solves)}\n\n{table(columns)}"


def summary(solves: pd.DataFrame) -> str:
    """In how many of `solves` what was wanted of them was reached."""
    none = int((solves["status"] == "infeasible").sum())
    parts = [
        f"{len(solves)} solves: a schedule in {solves['time_s'].notna().sum()}"
        + (f", proved to have none {none}" if none else ""),
        f"gap at most {NEAR:.1%} in {(solves['gap'] <= NEAR).sum()}",
        f"{solves['seconds'].median():.2f} s in the median, at most {solves['seconds'].max():.1f} s",
        f"at most {largest(solves['resident_mb'])} MB resident",
    ]
    fewest = 0
    for ops, limit_s in FIRST_LIMITS:
        group = solves[(solves["ops"] > fewest) & (solves["ops"] <= ops) & (solves["status"] != "infeasible")]
        if len(group):
            early = (group["first_s"] <= limit_s).sum()
            latest = "none" if group["first_s"].isna().all() else f"{group['first_s'].max():.2f} s"
            parts.append(f"up to {ops:,} ops a first schedule within {limit_s:g} s in {early} of {len(group)} (latest {latest})")
        fewest = ops
    return "; ".join(parts) + "." + median_note(solves)


def reference_part(solves: pd.DataFrame) -> str:
    """The windows solver against the reference: how many times as long the reference takes."""
    pairs = against_reference(solves)
    ended = pairs[pairs["reference_solved"]]
    ratios = ended["seconds_reference"] / ended["seconds"]
    lines = f"The reference solved {len(ended)} of {len(pairs)} within its limit of {pairs['time_limit_s'].max():.0f} s"
    if len(ended):
        lines += (
            f", and took {ratios.median():,.0f} times as long in the median ({ratios.min():,.1f} to {ratios.max():,.0f} times); "
            f"costs agree in {ended['agree'].sum()} of {len(ended)}; at most {largest(ended['resident_mb'])} MB resident, the "
            f"reference {largest(ended['resident_mb_reference'])} MB"
        )
    signs = ["" if done else "over " for done in pairs["reference_solved"]]
    multiples = texts(pairs["seconds_reference"] / pairs["seconds"], "{:,.1f}".format)
    times = [
        f"{seconds:.2f} s" if done else f"not solved in {seconds:.0f} s"
        for seconds, done in zip(pairs["seconds_reference"], pairs["reference_solved"], strict=True)
    ]
    columns = {
        "graph": texts(pairs["graph"], str),
        "ops": texts(pairs["ops"], "{:,}".format),
        "budget": texts(pairs["budget"], str),
        "overhead": texts(pairs["overhead"], "{:.2%}".format),
        "gap": texts(pairs["gap"], "{:.2%}".format),
        "reference": times,
        "of it writing": texts(pairs["writing_s_reference"], "{:.2f} s".format),
        "reference's gap": texts(pairs["gap_reference"], "{:.2%}".format),
        "windows": texts(pairs["seconds"], "{:.3f} s".format),
        "times as long": [sign + text for sign, text in zip(signs, multiples, strict=True)],
        "cost / reference's": texts(pairs["time_s"] / pairs["time_s_reference"], "{:.4f}".format),
        "agree": ["yes" if agree else "no" if done else "-" for agree, done in pairs[["agree", "reference_solved"]].to_numpy()],
    }
    return f"{lines}.{median_note(solves)}\n\n{table(columns)}"


def against_reference(solves: pd.DataFrame) -> pd.DataFrame:
    """A row for each graph and budget that both solvers were asked for; what the reference says ends in ``_reference``."""
    by_reference = solves["solver"] == REFERENCE
    pairs = solves[~by_reference].merge(solves[by_reference], on=["graph", "budget"], suffixes=("", "_reference"))
    same = (pairs["time_s"] / pairs["time_s_reference"] - 1).abs() <= TOLERANCE
    return pairs.assign(agree=same, reference_solved=pairs["status_reference"] == "optimal")


def median_note(solves: pd.DataFrame) -> str:
    """How the times of `solves` came about."""
    most = solves["runs"].max()
    return f" Times are medians of {most} runs; what was not solved within the limit was run once." if most > 1 else ""


def provenance(rows: pd.DataFrame) -> str:
    """On what, with what and at which commits the rows were made."""
    versions = sorted({part for text in rows["versions"].dropna() for part in text.split(", ")}, key=str.lower)
    limits = ", ".join(f"{suite} {limit:g} s" for suite, limit in rows.groupby("suite", sort=False)["time_limit_s"].max().items())
    return (
        f"Made by `make bench-solve`. Machine: {'; '.join(rows['machine'].unique())}. Versions: {', '.join(versions)}. "
        f"Commits: {', '.join(map(str, rows['commit'].unique()))}. Tolerance {TOLERANCE:.1%} of the step; time limits: {limits}. "
        "HiGHS runs in one thread with its default seed, 0; the seed of a random graph is the first number of its name; "
        "traced graphs come from shapes alone.\n"
    )


def largest(values: "pd.Series[int]") -> str:
    """The largest of `values`, some of which may be unknown."""
    return "-" if values.isna().all() else f"{values.max():,}"


def texts(values: pd.Series, form: Callable[..., str]) -> list[str]:
    """`values` written by `form`; a dash for what is unknown."""
    return ["-" if pd.isna(value) else form(value) for value in values]


def table(columns: dict[str, list[str]]) -> str:
    """Columns of one length as a Markdown table."""
    header = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    return header + "".join(f"| {' | '.join(row)} |\n" for row in zip(*columns.values(), strict=True))


def growth_plot(rows: pd.DataFrame, path: Path) -> None:
    """Time of a solve, and rows and columns of its largest program, against the ops of the graph."""
    solves = medians(rows[rows["suite"] == "growth"]).sort_values("ops")
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ours, other = COLORS["ours"], COLORS["blocks"]
    left.plot(solves["ops"], solves["seconds"], color=ours, marker="o", markersize=4, label="whole solve")
    left.plot(solves["ops"], solves["first_s"], color=other, marker="s", markersize=4, label="first schedule")
    left.set(title="time", xlabel="ops", ylabel="seconds", xscale="log", yscale="log")
    for column, label, color, marker in (("model_rows", "rows", ours, "o"), ("model_columns", "columns", other, "s")):
        sizes = solves[solves[column] > 0]
        right.plot(sizes["ops"], sizes[column].astype(float), color=color, marker=marker, markersize=4, label=label)
    right.set(title="largest program solved", xlabel="ops", ylabel="number", xscale="log", yscale="log")
    for axes in (left, right):
        axes.set_xticks(solves["ops"].astype(float), [f"{ops:,}" for ops in solves["ops"]])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.32), ncols=2, frameon=False)
    figure.suptitle("GPT-2 of more and more layers, half way from the least budget to the peak")
    save(figure, path)


def solves_plot(rows: pd.DataFrame, path: Path) -> None:
    """Each solve by its ops and seconds, and what part of a suite is solved after how many seconds."""
    solves = medians(rows)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = solves["suite"].where(solves["solver"] != REFERENCE, BY_REFERENCE)
    for i, (name, group) in enumerate(solves.groupby(names, sort=False)):
        done = solved(group)
        color, marker = (_REFERENCE_COLOR, "D") if name == BY_REFERENCE else _SUITES[i % len(_SUITES)]
        left.scatter(group["ops"][done], group["seconds"][done], color=color, marker=marker, s=18)
        left.scatter(group["ops"][~done], group["seconds"][~done], edgecolors=color, facecolors="none", marker=marker, s=18)
        ends = group["seconds"][done].sort_values().tolist()
        shares = [100 * (k + 1) / len(group) for k in range(len(ends))]
        limit_s = group["time_limit_s"].max()
        times, heights = [*ends[:1], *ends, limit_s], [0.0, *shares, *(shares[-1:] or [0.0])]
        right.step(times, heights[-len(times) :], where="post", color=color)
        right.plot([], [], color=color, marker=marker, markersize=4, label=f"{name}")  # for the legend
    left.set(title=f"solves; hollow: gap above {NEAR:.1%}", xlabel="ops", ylabel="seconds", xscale="log", yscale="log")
    right.set(title=f"solved to a gap of {NEAR:.1%}", xlabel="seconds", ylabel="% of solves", xscale="log", ylim=(0, 102))
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write the figure, whole or not at all."""
    temporary = path.with_name(f".{path.name}.new{path.suffix}")
    try:
        figure.savefig(temporary, dpi=120)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
