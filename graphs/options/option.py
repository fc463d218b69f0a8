"""The interface of graph options: which graphs an option accepts, its rewrite, and how schedules are lifted for execution."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from planner.graphs.errors import GraphError
from planner.graphs.ir import Graph
from planner.graphs.options.surroundings import Surroundings
from planner.graphs.schedule import Schedule


class Feature(StrEnum):
    """Features that users request besides graph options; values are their names in messages."""

    TORCH_COMPILE = "torch.compile"
    INDUCTOR = "kernels='inductor'"
    VARYING_SIZES = "dynamic=True"
    CUDA_GRAPH = "cuda_graph=True"
    ARENA = "arena=True"
    REPLAN = "replan=True"
    SEVERAL_PROCESSES = "several processes"
    DDP = "DistributedDataParallel"
    ON_CPU = "a model on the CPU"
    SHARED_GPU = "a GPU under torch.compile or on several processes"
    MAX_OVERHEAD = "max_overhead="
    HOST_SHARE = "a share of host memory"
    ROOFLINE = "roofline="
    MEASURED_LINK = "measure_link=True"
    OTHER_DEVICES = "other_devices="
    RESERVED = "memory='reserved'"


def describe_conflict(one: str, other: Feature, reason: str) -> str:
    """Return the message that `one` and `other` are incompatible, with the reason and the advice in `reason`."""
    return f"{one} does not go with {other}: {reason}"


class Need(StrEnum):
    """Knowledge about the machine that an option needs; values are their names in messages."""

    LINK = "the link to the host"
    DEVICES = "other devices: Surroundings(others=...)"


@dataclass(frozen=True, slots=True)
class Argument:
    """The number after the colon in the name of an option, as in ``compress:4``.

    Attributes:
        least, most, usual: range of the number, and the one to begin with.
        question: the question to users that it answers.
        limited: returns a graph that offers the option, with the number as its limit.
    """

    least: int
    most: int
    usual: int
    unit: str
    question: str
    limited: Callable[[Graph, int], Graph]


def _keep_graph(graph: Graph) -> Graph:
    return graph


def _keep_schedule(graph: Graph, schedule: Schedule) -> Schedule:
    return schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A rewrite that adds alternatives to a graph.

    Attributes:
        name: as users write it; also the prefix of the targets of its optional ops, if it is found in a captured step.
        description: one line about it.
        offers: two or three words for what it adds.
        refused: incompatible features, each with the reason and what to do.
        default: True if ``planner.compile`` enables it by default: it is exact, compatible with everything, and enlarges no
            program.
        argument: the number that solving needs; None if the name suffices. Options that have one are lossy.
        restored: returns a graph with the program's original ops, if the rewrite has changed them.
        lift: returns a schedule of a graph with this option in the order of execution; schedules of other graphs are unchanged.
            The result must be simulated again.
    """

    name: str
    description: str
    offers: str = "optional ops"
    refused: Mapping[Feature, str] = field(default_factory=dict)
    default: bool = False
    argument: Argument | None = None
    restored: Callable[[Graph], Graph] = _keep_graph
    lift: Callable[[Graph, Schedule], Schedule] = _keep_schedule

    @property
    def lossy(self) -> bool:
        """True if stored values are approximations."""
        return self.argument is not None

    @property
    def to_try(self) -> str:
        """The name with the usual argument, as in ``compress:4``."""
        return self.name if self.argument is None else f"{self.name}:{self.argument.usual}"

    def describe_conflict_with(self, feature: Feature) -> str:
        """Return a message with the reason why the option excludes `feature`, and what to do; "" if they are compatible."""
        reason = self.refused.get(feature)
        return "" if reason is None else describe_conflict(f"the option {self.name!r}", feature, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOption(Option):
    """An option that can be applied to any graph when it is solved.

    Attributes:
        need: knowledge about the machine that it needs; None for an option of the device alone.
        last: True if its ops come after those of all other options.
        accepts: returns why a graph cannot have it; "" if it can.
        apply: the rewrite of an accepted graph.
    """

    need: Need | None = None
    last: bool = False
    accepts: Callable[[Graph, Surroundings], str]
    apply: Callable[[Graph, Surroundings], Graph]

    def add_to(self, graph: Graph, surroundings: Surroundings) -> Graph:
        """Return `graph` with this option; raise a GraphError if the option does not accept the graph."""
        if reason := self.accepts(graph, surroundings):
            raise GraphError(reason)
        return self.apply(graph, surroundings)
