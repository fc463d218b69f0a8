"""All that the report page shows of a plan, computed once."""

from dataclasses import dataclass
from typing import Self

from planner.show.facts.addresses import StepAddresses, compute_reserved_addresses, plan_addresses
from planner.show.facts.baselines import Baseline, build_baselines
from planner.show.facts.lifetimes import Lifetimes, compute_lifetimes
from planner.show.facts.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts of a step that follows a plan.

    Attributes:
        baselines: the same step by other schedules.
        reserved: addresses where PyTorch's caching allocator puts tensors; None on the CPU.
        planned: addresses in one arena, by a short search; None if the step runs in an arena, whose addresses are `reserved`.
    """

    timeline: Timeline
    lives: Lifetimes
    baselines: tuple[Baseline, ...]
    reserved: StepAddresses | None
    planned: StepAddresses | None

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Return the facts of `timeline`."""
        reserved = compute_reserved_addresses(timeline)
        in_arena = reserved is not None and not reserved.borders
        return cls(
            timeline=timeline,
            lives=compute_lifetimes(timeline),
            baselines=build_baselines(timeline.graph, timeline.plan),
            reserved=reserved,
            planned=None if in_arena else plan_addresses(timeline),
        )
