"""How fast the windows solver is and how near to optimal: ``make bench-solve`` writes results/solve/.

Every row is one solve in a process of its own, so that its peak memory is its own. Rows that are in
the CSV are not solved again; the table and the plot are made from the CSV alone.
"""

import argparse
import multiprocessing
import platform
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from graphs.importers import import_graph
from graphs.ir import Graph
from graphs.jsonio import read_graph, write_graph
from planner.solving import summarize
from solvers.least import least_budget
from solvers.registry import get_solver

ZOO = {
    "gpt2-12": "zoo:gpt2,layers=12,batch=8,dtype=bfloat16",
    "gpt2-24": "zoo:gpt2,layers=24,batch=8,dtype=bfloat16",
    "gpt2-48": "zoo:gpt2,layers=48,batch=8,dtype=bfloat16",
    "gpt2-96": "zoo:gpt2,layers=96,batch=8,dtype=bfloat16",
    "llama-32": "zoo:llama,layers=32,batch=8,dtype=bfloat16",
    "vit-l": "zoo:vit,layers=24,width=1024,heads=16,batch=64,dtype=bfloat16",
    "resnet50": "zoo:resnet50,batch=64",
    "resnet152": "zoo:resnet152,batch=64",
    "unet": "zoo:unet,batch=4",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=64",
    "densenet121": "zoo:densenet121,batch=64",
}
ZOO_SHARES = (0.75, 0.5, 0.25, 0.1, 0.03)  # of the way from the least budget to the peak
GROWTH = {f"gpt2-{n}": f"zoo:gpt2,layers={n},batch=8,dtype=bfloat16" for n in (6, 12, 24, 48, 96)}


@dataclass(frozen=True, slots=True)
class Case:
    """One solve to be done; `reference_time_s` is what another solver reached at this budget."""

    suite: str
    graph: str
    file: Path
    share: str
    budget_bytes: int
    solver: str = "windows"
    time_limit_s: float = 60.0
    reference_time_s: float | None = None
    reference_seconds: float | None = None


def solve_case(case: Case) -> dict[str, object]:
    """The row of one case; runs in a process of its own."""
    graph = read_graph(case.file) if case.suite in ("zoo", "growth") else import_graph(case.file)
    first_s: float | None = None
    began = time.perf_counter()

    def on_progress(progress: object) -> None:
        nonlocal first_s
        if first_s is None and getattr(progress, "best_s", None) is not None:
            first_s = time.perf_counter() - began

    tolerance = 1e-3
    result = get_solver(case.solver)(
        graph, case.budget_bytes, tolerance=tolerance, time_limit_s=case.time_limit_s, on_progress=on_progress
    )
    row = {key: value for key, value in asdict(case).items() if key != "file"}
    return {
        **row,
        "ops": len(graph.ops),
        "status": str(result.status),
        "overhead": None if result.time_s is None else result.time_s / graph.time_s - 1,
        "bound": None if result.bound_s is None else result.bound_s / graph.time_s - 1,
        "gap": result.gap,
        "to_reference": None if case.reference_time_s is None or result.time_s is None else result.time_s / case.reference_time_s,
        "first_s": first_s,
        "seconds": result.seconds,
        "resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "commit": subprocess.run(
            ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
        "versions": ", ".join(f"{name} {number}" for name, number in result.versions.items()),
    }


def checkmate_cases(instances: Path) -> Iterator[Case]:
    """The instances published with Gurobi's results."""
    for file in sorted((instances / "checkmate-24h").glob("*.json")):
        graph = import_graph(file)
        for reference in graph.provenance["reference"]:  # type: ignore[attr-defined]
            budget = reference["budget_bytes"]
            label = f"{budget / summarize(graph).store_all_peak_bytes:.2f} of peak"
            yield Case(
                "checkmate-24h", file.stem, file, label, budget, "windows", 60.0, reference["time_s"], reference["seconds"]
            )


def moccasin_cases(instances: Path) -> Iterator[Case]:
    """Training graphs at shares of their peak, and random layered graphs."""
    for file in sorted((instances / "moccasin").glob("*.json")):
        graph = import_graph(file)
        peak = summarize(graph).store_all_peak_bytes
        random = file.stem.startswith("random")
        for share in (0.9, 0.8) if random else (0.9, 0.8, 0.7, 0.6, 0.5):
            yield Case("moccasin", file.stem, file, f"{share} of peak", int(share * peak))
        if not random:
            least = least_budget(graph, time_limit_s=10.0).found_bytes
            yield Case("moccasin", file.stem, file, "half way from least to 0.5", (least + peak // 2) // 2)


def zoo_cases(folder: Path, suite: str, models: dict[str, str], shares: tuple[float, ...]) -> Iterator[Case]:
    """Models traced for an H200, between their least budget and their peak."""
    for name, spec in models.items():
        file = folder / f"{name}.json"
        if not file.exists():
            write_graph(trace(spec), file)
        graph = read_graph(file)
        peak, least = summarize(graph).store_all_peak_bytes, least_budget(graph, time_limit_s=10.0).found_bytes
        for share in shares:
            yield Case(suite, name, file, f"least + {share}", int(least + share * (peak - least)))


def trace(spec: str) -> Graph:
    """A zoo model's graph for an H200; torch is imported only here."""
    from planner import api, workload

    built = workload.load(workload.parse_spec(spec), fake=True)
    return api.trace(*built, roofline="h200", name=spec)


def main() -> None:
    """Solve what is not in the CSV yet, then write table and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, default=Path("../shared/instances"), help="folder of public instances")
    parser.add_argument("--suites", default="checkmate-24h,growth,zoo,moccasin")
    parser.add_argument("--out", type=Path, default=Path("results/solve"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    csv = arguments.out / "rows.csv"
    rows = pd.read_csv(csv).to_dict("records") if csv.exists() else []
    done = {(row["suite"], row["graph"], row["share"], row["solver"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(arguments.suites.split(","), arguments.instances, Path(folder)):
            if (case.suite, case.graph, case.share, case.solver) in done:
                continue
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                row = pool.submit(solve_case, case).result()
            rows.append(row)
            pd.DataFrame(rows).to_csv(csv, index=False)
            print(
                ", ".join(f"{key} {row[key]}" for key in ("suite", "graph", "share", "status", "overhead", "gap", "seconds")),
                flush=True,
            )
    (arguments.out / "table.md").write_text(table_text(pd.DataFrame(rows)))


def cases(suites: list[str], instances: Path, folder: Path) -> Iterator[Case]:
    """All cases of `suites`; those of public instances only where their folder is."""
    for suite in suites:
        if suite == "zoo":
            yield from zoo_cases(folder, suite, ZOO, ZOO_SHARES)
        elif suite == "growth":
            yield from zoo_cases(folder, suite, GROWTH, (0.5,))
        elif instances.is_dir():
            yield from (checkmate_cases if suite == "checkmate-24h" else moccasin_cases)(instances)


def table_text(rows: pd.DataFrame) -> str:
    """The rows as Markdown, with a line of what they say together for each suite."""
    parts = ["# The windows solver\n"]
    for suite, group in rows.groupby("suite", sort=False):
        near = (group["gap"] <= 0.005).sum()
        parts.append(f"## {suite}\n")
        parts.append(
            f"{len(group)} solves: a schedule in {group['overhead'].notna().sum()}, gap at most 0.5% in {near}, median "
            f"{group['seconds'].median():.1f} s, at most {group['resident_mb'].max()} MB resident.\n"
        )
        shown = pd.DataFrame({"graph": group["graph"], "ops": group["ops"], "budget": group["share"], "status": group["status"]})
        for column in ("overhead", "bound", "gap"):
            shown[column] = [f"{100 * value:.2f}%" if value == value else "-" for value in group[column]]
        if suite == "checkmate-24h":
            shown["cost / Gurobi's"] = [f"{value:.4f}" for value in group["to_reference"]]
            shown["Gurobi's seconds"] = [f"{value:.0f}" for value in group["reference_seconds"]]
        shown["first schedule"] = [f"{value:.1f} s" if value == value else "-" for value in group["first_s"]]
        shown["seconds"] = [f"{value:.1f}" for value in group["seconds"]]
        header = f"| {' | '.join(shown.columns)} |\n|{' --- |' * len(shown.columns)}\n"
        parts.append(header + "".join(f"| {' | '.join(map(str, row))} |\n" for row in shown.itertuples(index=False)))
    machine, versions = rows["machine"].iloc[-1], rows["versions"].iloc[-1]
    return "\n".join([*parts, f"Machine: {machine}; {versions}. Time limit 60 s, tolerance 0.1%. Made by `make bench-solve`.\n"])


if __name__ == "__main__":
    main()
