"""Compatibility of options and features: one table of refused combinations, with reasons and advice. Never imports torch.

``planner options`` prints it, and ``docs/options/index.md`` shows it. What each solver takes is in its registry.

One table, so that all entry points refuse the same pairs for the same reason, before anything is traced, and no page says
otherwise.
"""

from collections.abc import Collection
from dataclasses import dataclass

from planner.capture.options import OPTIONS
from planner.graphs.errors import UsageError
from planner.graphs.options.option import Feature, describe_conflict


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """Two things that exclude each other.

    Attributes:
        one: name of a graph option, or a feature.
    """

    one: str
    other: Feature
    reason: str

    def __str__(self) -> str:
        return describe_conflict(f"the option {self.one!r}" if self.one in OPTIONS else self.one, self.other, self.reason)


_OF_FEATURES = {
    (Feature.CUDA_GRAPH, Feature.VARYING_SIZES): (
        "a CUDA graph keeps its memory, and there would be one for each size: leave out cuda_graph=True, or dynamic=True and pad "
        "the batches"
    ),
    (Feature.CUDA_GRAPH, Feature.REPLAN): (
        "a CUDA graph keeps its memory, and there would be one for each plan: leave out replan=True"
    ),
    (Feature.CUDA_GRAPH, Feature.SEVERAL_PROCESSES): "CUDA graphs work in a single process only: leave out cuda_graph=True",
    (Feature.CUDA_GRAPH, Feature.ON_CPU): "a CUDA graph needs a model on a CUDA device: leave out cuda_graph=True",
    (Feature.VARYING_SIZES, Feature.DDP): (
        "its processes do not agree on sizes before each step: leave out dynamic=True, and pad the batches"
    ),
    (Feature.REPLAN, Feature.DDP): "one process cannot replan while the others wait for it: leave out replan=True",
    (Feature.ARENA, Feature.CUDA_GRAPH): "a CUDA graph has memory of its own, at fixed addresses: leave out arena=True",
    (Feature.ARENA, Feature.SHARED_GPU): (
        "an arena there works with PyTorch's CPU allocator only: leave it out, and set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    ),
    (Feature.ARENA, Feature.MAX_OVERHEAD): (
        "the search for the least memory plans no addresses: give budget= instead of max_overhead="
    ),
    (Feature.MAX_OVERHEAD, Feature.INDUCTOR): (
        "steps of Inductor's kernels are compiled for a budget: give budget= instead of max_overhead="
    ),
    (Feature.RESERVED, Feature.MAX_OVERHEAD): (
        "the search for the least memory counts allocated bytes: leave out memory=; the plan says how much is reserved"
    ),
    (Feature.RESERVED, Feature.ON_CPU): (
        "PyTorch's CPU allocator reserves no memory in advance: leave it out, or give memory='allocated'"
    ),
    (Feature.VARYING_SIZES, Feature.TORCH_COMPILE): (
        "each size gets a plan of its own, for fixed sizes: leave out dynamic=True and mark_dynamic"
    ),
    (Feature.HOST_SHARE, Feature.SEVERAL_PROCESSES): (
        "each process would take this share of the same free memory: give an amount for each, such as host_budget='8GB'"
    ),
    (Feature.ROOFLINE, Feature.INDUCTOR): (
        "a roofline models ATen's ops, and Inductor's kernels must be measured: leave out roofline="
    ),
    (Feature.ROOFLINE, Feature.OTHER_DEVICES): (
        "with a roofline nothing is run, so ops cannot be measured on other devices: leave one of them out"
    ),
    (Feature.ROOFLINE, Feature.MEASURED_LINK): (
        "with a roofline nothing is run, so the link cannot be measured: leave one of them out; without a link, the published "
        "rate of the device is used"
    ),
}


def list_conflicts() -> tuple[Incompatibility, ...]:
    """Return the table: conflicts of each graph option, then those between features."""
    refused = (
        Incompatibility(option.name, feature, option.refused[feature])
        for feature in Feature
        for option in OPTIONS.values()
        if feature in option.refused
    )
    return (*refused, *(Incompatibility(one, other, reason) for (one, other), reason in _OF_FEATURES.items()))


def find_conflict(asked: Collection[str]) -> Incompatibility | None:
    """Return two requested things that exclude each other; None if all go together.

    Args:
        asked: names of graph options, without numbers, and features.
    """
    return next((one for one in list_conflicts() if one.one in asked and one.other in asked), None)


def check_compatible(asked: Collection[str]) -> None:
    """Raise a UsageError, with reason and advice, if two of `asked` exclude each other, as in ``find_conflict``."""
    if (found := find_conflict(asked)) is not None:
        raise UsageError(str(found))


def build_table() -> list[tuple[str, str, str]]:
    """Return the conflicts as rows of text: features, the feature that they exclude, and the reason, which they share."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in list_conflicts():
        rows.setdefault((one.other, one.reason), []).append(one.one)
    return [(", ".join(names), other, reason) for (other, reason), names in rows.items()]
