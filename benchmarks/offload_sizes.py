"""The largest batch and the longest sequence in 80 GB, recomputing only and with offload: into results/offload/max_batch.csv.

Steps with AdamW are traced with fake tensors, timed by the roofline of an H200 and copied at 50 GB/s in each direction. A size
fits if a schedule takes at most 10% longer than the step that keeps everything would on a device with room for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common import PROVENANCE, command_line, provenance
from benchmarks.offload import HOST
from graphs.io.files import write_text
from graphs.units import format_bytes, format_ratio, parse_budget
from planner.choices import choices_of
from planner.report.tables import as_markdown
from planner.settings import TraceSettings
from planner.studies.max_batch import max_batch
from planner.studies.rows import write_csv
from planner.studies.sizes import Wanted, samples_for
from planner.workload.sizes import Sizes
from planner.workload.tracing import Tracing
from planner.workload.workload import parse_spec

BUDGET = "80GB"
LINK = "50GB/s"
MAX_OVERHEAD = 0.1
LIMIT_S = 20.0
COLUMNS = (
    *("model", "varies", "unit", "budget_bytes", "max_overhead", "method", "size", "overhead", "gap", "base_s", "peak_bytes"),
    *("undecided", "link", *PROVENANCE),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, an option of it, and what its values are multiples of; where the model gives one, the search begins there."""

    spec: str
    varies: str
    unit: int


_GPT2 = "zoo:gpt2,layers=24,width=1024,heads=16,dtype=bfloat16"
_LLAMA = "zoo:llama,layers=16,width=2048"
CASES: Mapping[str, Case] = {
    "gpt2-medium at seq 1024": Case(f"{_GPT2},seq=1024,batch=64", "batch", 8),
    "gpt2-medium at batch 8": Case(f"{_GPT2},batch=8,seq=8192", "seq", 1024),
    "llama-16 at seq 4096": Case(f"{_LLAMA},seq=4096,batch=8", "batch", 2),
    "llama-16 at batch 1": Case(f"{_LLAMA},batch=1,seq=32768", "seq", 4096),
}


def rows_of(name: str, case: Case, *, budget: str = BUDGET, limit_s: float = LIMIT_S) -> Iterator[dict[str, object]]:
    """A row for each method on one case."""
    sizes = Sizes(
        parse_spec(case.spec), case.varies, Tracing(TraceSettings(roofline="h200", optimizer="adamw")), unit=case.unit, way_out=""
    )
    wanted = Wanted(
        budget_bytes=parse_budget(budget, peak_bytes=0),
        max_overhead=MAX_OVERHEAD,
        first=sizes.first,
        time_limit_s=limit_s,
        varies=case.varies,
        unit=case.unit,
        samples=samples_for(case.varies, sizes.first),
        choices=choices_of(["offload"], LINK, HOST),
    )
    for answer in max_batch(sizes.graph, wanted):
        result = answer.result
        yield {
            "model": name,
            "varies": case.varies,
            "unit": case.unit,
            "budget_bytes": wanted.budget_bytes,
            "max_overhead": MAX_OVERHEAD,
            "method": answer.method,
            "size": answer.size,
            "overhead": answer.overhead,
            "undecided": answer.undecided,
            "base_s": answer.keep_everything_time_s,
            "link": LINK,
            **provenance(),
            "gap": None if answer.size is None or result is None else result.gap,
            "peak_bytes": None if answer.size is None or result is None else result.peak_bytes,
        }


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """The largest size by method, what the step takes longer there, and the next size where that was not decided in time."""
    cells = [("model", "varies", "method", "largest", "overhead", "gap", "peak", "not decided")]
    for row in rows:
        size, overhead, gap, peak, undecided = (row[key] for key in ("size", "overhead", "gap", "peak_bytes", "undecided"))
        cells.append(
            (
                str(row["model"]),
                str(row["varies"]),
                str(row["method"]),
                f"{size:,}" if isinstance(size, int) else "none",
                format_ratio(overhead) if isinstance(overhead, float) else "",
                format_ratio(gap) if isinstance(gap, float) else "",
                format_bytes(peak) if isinstance(peak, int) else "",
                f"{undecided:,}" if isinstance(undecided, int) else "",
            )
        )
    return as_markdown(cells)


def main(words: Sequence[str] | None = None) -> None:
    """Search, and write rows and table, after each model anew."""
    arguments = command_line(__doc__, models=CASES, out="results/offload").parse_args(words)
    rows: list[dict[str, object]] = []
    for name in arguments.models:
        rows += rows_of(name, CASES[name])
        write_csv(arguments.out / "max_batch.csv", COLUMNS, rows)
        write_text(arguments.out / "max_batch.md", table(rows))
        print(table(rows), end="", flush=True)


if __name__ == "__main__":
    main()
