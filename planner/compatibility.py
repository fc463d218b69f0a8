"""What goes with what: one table of the combinations that are refused, with why and what to do. Never imports torch.

``planner options`` prints it, and ``docs/options/index.md`` shows it. What each solver takes is in its registry.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from graphs.errors import UsageError
from graphs.options import OPTIONS


class Feature(StrEnum):
    """What a user asks for besides options of a graph, or trains with; as messages name it."""

    TORCH_COMPILE = "torch.compile"
    INDUCTOR = "kernels='inductor'"
    VARYING_SIZES = "dynamic=True"
    CUDA_GRAPH = "cuda_graph=True"
    REPLAN = "replan=True"
    SEVERAL_PROCESSES = "several processes"
    ON_CPU = "a model on the CPU"
    MAX_OVERHEAD = "max_overhead="
    HOST_SHARE = "a share of the host's memory"
    ROOFLINE = "roofline="
    MEASURED_LINK = "measure_link=True"
    OTHER_DEVICES = "other_devices="


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two things that do not go together.

    Attributes:
        one: the name of an option of a graph, or a feature.
        other: a feature.
        reason: why, and what to do.
    """

    one: str
    other: Feature
    reason: str

    def __str__(self) -> str:
        return f"{f'the option {self.one!r}' if self.one in OPTIONS else self.one} does not go with {self.other}: {self.reason}"


_OF_EAGER = "it is found among the kernels of eager PyTorch; leave it out, or take kernels='eager'"

CONFLICTS = (
    *(Conflict(name, Feature.INDUCTOR, _OF_EAGER) for name in ("chunks", "pack", "kernels", "compress")),
    Conflict("placement", Feature.INDUCTOR, "these kernels run on one device; leave it out, or take kernels='eager'"),
    Conflict(
        "compress",
        Feature.TORCH_COMPILE,
        "how lossy a graph of a step is cannot be measured; leave it out, or take planner.compile",
    ),
    Conflict(
        "placement",
        Feature.TORCH_COMPILE,
        "its graphs are not measured on other devices; leave it out, or take planner.compile",
    ),
    Conflict("compress", Feature.VARYING_SIZES, "how lossy a step may be is measured at one size; leave one of them out"),
    Conflict("placement", Feature.VARYING_SIZES, "ops are measured on other devices at one size; leave one of them out"),
    Conflict("placement", Feature.CUDA_GRAPH, "ops on other devices run one by one; leave one of them out"),
    Conflict("placement", Feature.SEVERAL_PROCESSES, "ops are placed in one process; leave it out, or the wrapper of the model"),
    Conflict(
        Feature.CUDA_GRAPH,
        Feature.VARYING_SIZES,
        "a CUDA graph keeps its memory, and there would be one for each size: leave out cuda_graph=True, or dynamic=True and pad "
        "the batches",
    ),
    Conflict(
        Feature.CUDA_GRAPH,
        Feature.REPLAN,
        "a CUDA graph keeps its memory, and there would be one for each plan: leave out replan=True",
    ),
    Conflict(Feature.CUDA_GRAPH, Feature.SEVERAL_PROCESSES, "not planned for several processes: leave out cuda_graph=True"),
    Conflict(Feature.CUDA_GRAPH, Feature.ON_CPU, "it is for models on a CUDA device: leave it out"),
    Conflict(
        Feature.VARYING_SIZES,
        Feature.SEVERAL_PROCESSES,
        "sizes are planned in one process: leave out dynamic=True, and pad the batches",
    ),
    Conflict(
        Feature.REPLAN,
        Feature.SEVERAL_PROCESSES,
        "one process cannot plan again while the others wait for it: leave out replan=True",
    ),
    Conflict(Feature.MAX_OVERHEAD, Feature.INDUCTOR, "its steps are compiled for a budget: give budget="),
    Conflict(
        Feature.HOST_SHARE,
        Feature.SEVERAL_PROCESSES,
        "each would take as much of what is free: say how much each may take, as host_budget='8GB'",
    ),
    Conflict(Feature.ROOFLINE, Feature.INDUCTOR, "it models ATen's ops, and Inductor's kernels are measured: leave it out"),
    Conflict(Feature.ROOFLINE, Feature.OTHER_DEVICES, "nothing is run, so that no op is measured there: leave one of them out"),
    Conflict(
        Feature.ROOFLINE,
        Feature.MEASURED_LINK,
        "nothing is run, so that no link can be measured: leave one of them out; without a link, what is published of the device "
        "counts",
    ),
)


def check_compatible(asked: Collection[str]) -> None:
    """Refuse things that do not go together.

    Args:
        asked: names of options of a graph, without what stands behind a colon, and features.

    Raises:
        UsageError: there are two that do not; says why, and what to do.
    """
    for conflict in CONFLICTS:
        if conflict.one in asked and conflict.other in asked:
            raise UsageError(str(conflict))


def table() -> list[tuple[str, str, str]]:
    """Return the conflicts as rows for people: what does not go together, and why; equal reasons are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for conflict in CONFLICTS:
        rows.setdefault((conflict.other, conflict.reason), []).append(conflict.one)
    return [(", ".join(names), other, reason) for (other, reason), names in rows.items()]
