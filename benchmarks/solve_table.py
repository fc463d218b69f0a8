"""Report on the rows of ``benchmarks.solve``: a page of tables and two figures, from the CSV alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.solve_case import TOLERANCE, SolverRow
from planner.show.views.figures import COLORS, save_figure
from planner.solvers.result import SOLVED
from planner.studies.tables import Column, format_markdown, format_values, group_by

NEAR = 0.005  # gap up to which a solve counts as near to optimal
FIRST_LIMITS = ((1_500, 5.0), (5_000, 20.0))  # ops, and by when a graph of so many has a first schedule, in seconds
REFERENCE = "checkmate"
BY_REFERENCE = "reference: Checkmate's program"
# Colours and markers of the suites, which colour-blind readers tell apart, and the colour of the reference.
_SUITES = (("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#CC79A7", "v"), ("#56B4E9", "P"), ("#000000", "X"))
_REFERENCE_COLOR = "#D55E00"
SOLVE = ["suite", "graph", "budget", "solver"]
_NUMBERS: Mapping[Any, str] = {int: "Int64", int | None: "Int64", float: "float64", float | None: "float64"}
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


def format_table(rows: Sequence[SolverRow]) -> str:
    """Return the rows as Markdown: for each suite a summary and a table."""
    parts = ["# The windows solver\n"]
    for suite, group in compute_medians(rows).groupby("suite", sort=False):
        body = format_reference(group) if suite == "reference" else format_suite(group)
        parts += [f"## {suite}\n", f"{NOTE.get(str(suite), '')}\n".lstrip("\n"), body]
    return "\n".join([*parts, format_provenance(rows)])


def compute_medians(rows: Sequence[SolverRow]) -> pd.DataFrame:
    """Return a row for each solve: median times of its runs, their largest memory, else the values of the first run.

    Integer columns keep their type if some values are unknown.
    """
    columns = fields(SolverRow)
    runs = pd.DataFrame(map(asdict, rows)).astype({one.name: _NUMBERS[one.type] for one in columns if one.type in _NUMBERS})
    how = {one.name: one.metadata["summary"] for one in columns if one.name not in SOLVE}
    solves = runs.groupby(SOLVE, sort=False, as_index=False).agg(how).rename(columns={"run": "runs"})
    over = {name: solves[f"{name}_s"] / solves["base_s"] - 1 for name in ("time", "bound")}
    return solves.assign(overhead=over["time"], bound=over["bound"], cost=solves["time_s"] / solves["reference_time_s"])


def iterate_rows(frame: pd.DataFrame) -> Iterator[Any]:
    """Yield the rows of `frame` as objects with a column per attribute; missing values are None."""
    return iter(frame.astype(object).where(frame.notna(), None).itertuples(index=False))


_column = partial(Column, missing="-")
_SOLVE_COLUMNS = (
    "graph",
    _column("ops", form="{:,}"),
    *("budget", "status"),
    *(_column(name, form="{:.2%}") for name in ("overhead", "bound", "gap")),
)
_GUROBI_COLUMNS = (
    _column("cost / Gurobi's", "cost", "{:.4f}"),
    _column("Gurobi's seconds", "reference_seconds", "{:,.0f}"),
)
_GROWTH_COLUMNS = (_column("rows", "model_rows", "{:,}"), _column("columns", "model_columns", "{:,}"))
_TIME_COLUMNS = (
    _column("first schedule", "first_s", "{:.2f} s"),
    _column("seconds", form="{:.2f}"),
    _column("resident MB", "resident_mb", "{:,}"),
)


def format_suite(solves: pd.DataFrame) -> str:
    """Return the results of the exact solver in one suite."""
    gurobi = _GUROBI_COLUMNS if solves["reference_time_s"].notna().any() else ()
    growth = _GROWTH_COLUMNS if solves["suite"].iloc[0] == "growth" else ()
    columns = (*_SOLVE_COLUMNS, *gurobi, *growth, *_TIME_COLUMNS)
    return f"{summarize_rows(solves)}\n\n{format_markdown(iterate_rows(solves), columns)}"


def summarize_rows(solves: pd.DataFrame) -> str:
    """Return the number of `solves` that reached their targets."""
    none = int((solves["status"] == "infeasible").sum())
    parts = [
        f"{len(solves)} solves: a schedule in {solves['time_s'].notna().sum()}"
        + (f", proved to have none {none}" if none else ""),
        f"gap at most {NEAR:.1%} in {(solves['gap'] <= NEAR).sum()}",
        f"{solves['seconds'].median():.2f} s in the median, at most {solves['seconds'].max():.1f} s",
        f"at most {format_largest(solves['resident_mb'])} MB resident",
    ]
    fewest = 0
    for ops, limit_s in FIRST_LIMITS:
        group = solves[(solves["ops"] > fewest) & (solves["ops"] <= ops) & (solves["status"] != "infeasible")]
        if len(group):
            early = (group["first_s"] <= limit_s).sum()
            latest = "none" if group["first_s"].isna().all() else f"{group['first_s'].max():.2f} s"
            parts.append(f"up to {ops:,} ops a first schedule within {limit_s:g} s in {early} of {len(group)} (latest {latest})")
        fewest = ops
    return "; ".join(parts) + "." + format_median_note(solves)


_PAIR_COLUMNS = (
    "graph",
    _column("ops", form="{:,}"),
    "budget",
    *(_column(name, form="{:.2%}") for name in ("overhead", "gap")),
    _column("reference", lambda pair: ("{:.2f} s" if pair.ended else "not solved in {:.0f} s").format(pair.seconds_reference)),
    _column("of it writing", "writing_s_reference", "{:.2f} s"),
    _column("reference's gap", "gap_reference", "{:.2%}"),
    _column("windows", "seconds", "{:.3f} s"),
    _column("times as long", lambda pair: f"{'' if pair.ended else 'over '}{pair.ratio:,.1f}"),
    _column("cost / reference's", "cost", "{:.4f}"),
    _column("agree", lambda pair: "yes" if pair.agree else "no" if pair.ended else None),
)


def format_reference(solves: pd.DataFrame) -> str:
    """Return the comparison of the exact solver with the reference: how many times as long the reference takes."""
    pairs = join_reference(solves)
    ended = pairs[pairs["ended"]]
    said = f"The reference solved {len(ended)} of {len(pairs)} within its limit of {pairs['time_limit_s'].max():.0f} s"
    if len(ended):
        ratios = ended["ratio"]
        said += (
            f", and took {ratios.median():,.0f} times as long in the median ({ratios.min():,.1f} to {ratios.max():,.0f} times); "
            f"costs agree in {ended['agree'].sum()} of {len(ended)}; at most {format_largest(ended['resident_mb'])} MB resident, "
            f"the reference {format_largest(ended['resident_mb_reference'])} MB"
        )
    return f"{said}.{format_median_note(solves)}\n\n{format_markdown(iterate_rows(pairs), _PAIR_COLUMNS)}"


def join_reference(solves: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each graph and budget that both solvers were asked for; the reference's columns end in ``_reference``."""
    by_reference = solves["solver"] == REFERENCE
    pairs = solves[~by_reference].merge(solves[by_reference], on=["graph", "budget"], suffixes=("", "_reference"))
    cost, ratio = pairs["time_s"] / pairs["time_s_reference"], pairs["seconds_reference"] / pairs["seconds"]
    agree = (cost - 1).abs() <= TOLERANCE
    return pairs.assign(cost=cost, ratio=ratio, agree=agree, ended=pairs["status_reference"].isin(SOLVED))


def format_median_note(solves: pd.DataFrame) -> str:
    """Return the note that times of `solves` are medians of several runs; "" if each solve was run once."""
    most = solves["runs"].max()
    return f" Times are medians of {most} runs; what was not solved within the limit was run once." if most > 1 else ""


def format_provenance(rows: Sequence[SolverRow]) -> str:
    """Return the provenance of the rows: machine, versions and commits."""
    versions = sorted({part for row in rows for part in row.versions.split(", ") if part}, key=str.lower)
    limits = ", ".join(f"{suite} {max(row.time_limit_s for row in own):g} s" for suite, own in group_by(rows, "suite").items())
    return (
        f"Made by `make bench-solve`. Machine: {format_values(rows, 'machine', '; ')}. Versions: {', '.join(versions)}. "
        f"Commits: {format_values(rows, 'commit', ', ')}. Tolerance {TOLERANCE:.1%} of the step; time limits: {limits}. "
        "HiGHS runs in one thread with its default seed, 0; the seed of a random graph is the first number of its name; "
        "traced graphs come from shapes alone.\n"
    )


def format_largest(values: "pd.Series[int]") -> str:
    """Return the largest of `values`, some of which may be unknown."""
    return "-" if values.isna().all() else f"{values.max():,}"


def draw_growth(rows: Sequence[SolverRow], path: Path) -> None:
    """Draw the time of a solve, and rows and columns of its largest program, against the ops of the graph."""
    grown = [row for row in rows if row.suite == "growth"]
    if not grown:
        return
    solves = compute_medians(grown).sort_values("ops")
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
    save_figure(figure, path)


def draw_solves(rows: Sequence[SolverRow], path: Path) -> None:
    """Draw each solve by its ops and seconds, and the share of a suite that is solved after a number of seconds."""
    solves = compute_medians(rows)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = solves["suite"].where(solves["solver"] != REFERENCE, BY_REFERENCE)
    for i, (name, group) in enumerate(solves.groupby(names, sort=False)):
        done = (group["gap"] <= NEAR) | (group["status"] == "infeasible")
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
    save_figure(figure, path)
