"""The largest batch and the longest sequence in 80 GB, recomputing only and with offload: into results/offload/max_batch.csv.

Steps with AdamW are traced with fake tensors, timed by the roofline of an H200 and copied at 50 GB/s in each direction. A size
fits if the tensors of a schedule do that takes at most 10% longer than the step that keeps everything, on a device with room
for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.command import Main
from benchmarks.offload import HOST
from planner.capture.workload.workload import parse_spec
from planner.graphs.units import parse_budget
from planner.plans.select_attributes import select_attributes
from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import build_option_settings
from planner.settings.plan import PlanSettings
from planner.studies.experiment import Study
from planner.studies.max_batch import find_max_batch
from planner.studies.rows import Made, collect_provenance, declare_column, declare_key, declare_value, order_by
from planner.studies.sizes import Wanted, list_samples
from planner.studies.tables import Column
from planner.studies.workload_sizes import SizedModel
from planner.studies.workload_tracing import Tracing

BUDGET, LINK = "80GB", "50GB/s"
MAX_OVERHEAD = 0.1
LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSizeRow(Made):
    """The largest size of a model by one method."""

    model: str = declare_key()
    varies: str = declare_key("the option of the model that is the size")
    unit: int = declare_key("sizes are multiples of it")
    budget_bytes: int = declare_key("static bytes included")
    max_overhead: float = declare_key("over the step that keeps everything")
    method: str = declare_key()
    size: int | None = declare_value("the largest; none where not even the least fits")
    overhead: float | None = declare_value("of the schedule at the largest size, as gap and peak")
    gap: float | None = declare_value()
    base_s: float = declare_column("the step of the largest size that keeps everything")
    peak_bytes: int | None = declare_value()
    undecided: int | None = declare_value("the least size that was not decided in time")
    link: str = declare_column("to the host")


@dataclass(frozen=True, slots=True)
class SizeCase:
    """A model, one of its options, and the divisor of its values; the search starts at the model's value, if it gives one."""

    spec: str
    varies: str
    unit: int


_GPT2 = "zoo:gpt2,layers=24,width=1024,heads=16,dtype=bfloat16"
_LLAMA = "zoo:llama,layers=16,width=2048"
CASES: Mapping[str, SizeCase] = {
    "gpt2-medium at seq 1024": SizeCase(f"{_GPT2},seq=1024,batch=64", "batch", 8),
    "gpt2-medium at batch 8": SizeCase(f"{_GPT2},batch=8,seq=8192", "seq", 1024),
    "llama-16 at seq 4096": SizeCase(f"{_LLAMA},seq=4096,batch=8", "batch", 2),
    "llama-16 at batch 1": SizeCase(f"{_LLAMA},batch=1,seq=32768", "seq", 4096),
}


def search(
    name: str, known: Sequence[LargestSizeRow], *, budget: str = BUDGET, limit_s: float = LIMIT_S
) -> Iterator[LargestSizeRow]:
    """Yield a row for each method on one case."""
    case = CASES[name]
    tracing = Tracing(PlanSettings(roofline="h200", optimizer="adamw"))
    sizes = SizedModel(parse_spec(case.spec), case.varies, tracing, unit=case.unit, way_out="")
    wanted = Wanted(
        budget_bytes=parse_budget(budget, peak_bytes=0),
        max_overhead=MAX_OVERHEAD,
        first=sizes.first,
        time_limit_s=limit_s,
        **select_attributes(case, "varies", "unit"),
        samples=list_samples(case.varies, sizes.first),
        options=build_option_settings(["offload"], LINK, HOST),
        memory=CountedMemory.ALLOCATED,
    )
    for answer in find_max_batch(sizes.trace_graph, wanted):
        yield LargestSizeRow(
            model=name,
            **select_attributes(wanted, "varies", "unit", "budget_bytes", "max_overhead"),
            **select_attributes(answer, "method", "size", "overhead", "gap", "peak_bytes", "undecided"),
            base_s=answer.keep_everything_time_s,
            link=LINK,
            **collect_provenance(),
        )


TABLE = (
    *("model", "varies", "method"),
    Column("largest", "size", "{:,}", missing="none"),
    *("overhead", "gap"),
    Column("peak", "peak_bytes"),
    Column("not decided", "undecided", "{:,}"),
)
STUDY = Study(LargestSizeRow, search, order=order_by(model=CASES), pages={"max_batch.md": TABLE}, file="max_batch.csv")
main = Main(STUDY, CASES, out="results/offload")
