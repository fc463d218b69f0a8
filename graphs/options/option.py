"""What every option of a graph is: whether it fits, the rewrite, and what its schedules are as a step runs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from graphs.errors import GraphError
from graphs.ir import Graph
from graphs.options.surroundings import Surroundings
from graphs.schedule import Schedule


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


def conflict(one: str, other: Feature, reason: str) -> str:
    """Return the message that two things do not go together, with why and what to do."""
    return f"{one} does not go with {other}: {reason}"


class Need(StrEnum):
    """What an option needs to know of the machine around the device; as users are told."""

    LINK = "the link to the host"
    DEVICES = "other devices: Surroundings(others=...)"


@dataclass(frozen=True, slots=True)
class Argument:
    """The number behind the colon in the name of an option, as in ``compress:4``.

    Attributes:
        least, most, usual: which numbers there are, and the one to begin with.
        unit: what is counted.
        question: what it answers.
        limited: returns a graph that offers the option, with the number as its limit.
    """

    least: int
    most: int
    usual: int
    unit: str
    question: str
    limited: Callable[[Graph, int], Graph]


def _unchanged_graph(graph: Graph) -> Graph:
    return graph


def _unchanged_schedule(graph: Graph, schedule: Schedule) -> Schedule:
    return schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A rewrite that gives the schedules of a graph more to choose from.

    Attributes:
        name: as users write it; what its optional ops call begins with it, where it is found in a captured step.
        description: one line about it.
        offers: what it adds, in two or three words.
        refused: what it does not go with, and for each why and what to do.
        default: True if ``planner.compile`` takes it where nobody says which: it is exact, goes with everything, and makes no
            program larger.
        argument: the number that solving needs; None where its name says everything. Options that have one are lossy.
        restored: returns a graph with the program's ops as they were, where the rewrite has changed these.
        lift: returns a schedule of a graph with this option as a step runs it; of a graph without it the schedule itself. It is
            to be judged again.
    """

    name: str
    description: str
    offers: str = "optional ops"
    refused: Mapping[Feature, str] = field(default_factory=dict)
    default: bool = False
    argument: Argument | None = None
    restored: Callable[[Graph], Graph] = _unchanged_graph
    lift: Callable[[Graph, Schedule], Schedule] = _unchanged_schedule

    @property
    def lossy(self) -> bool:
        """True if what it stores is not what was stored."""
        return self.argument is not None

    @property
    def to_try(self) -> str:
        """The name to begin with, as in ``compress:4``."""
        return self.name if self.argument is None else f"{self.name}:{self.argument.usual}"

    def against(self, feature: Feature) -> str:
        """Return why it does not go with `feature`, and what to do; "" if it does."""
        reason = self.refused.get(feature)
        return "" if reason is None else conflict(f"the option {self.name!r}", feature, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOption(Option):
    """An option that any graph may be given when it is solved.

    Attributes:
        need: what it needs to know of the machine.
        last: True if its ops stand behind those of all other options.
        accepts: returns why a graph cannot be given it; "" if it can.
        apply: the rewrite of a graph that is accepted.
    """

    need: Need
    last: bool = False
    accepts: Callable[[Graph, Surroundings], str]
    apply: Callable[[Graph, Surroundings], Graph]

    def added_to(self, graph: Graph, surroundings: Surroundings) -> Graph:
        """Return `graph` with this option.

        Raises:
            GraphError: it is not accepted.
        """
        if reason := self.accepts(graph, surroundings):
            raise GraphError(reason)
        return self.apply(graph, surroundings)
