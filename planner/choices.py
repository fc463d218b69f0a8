"""What users say of the choices that a graph is given: which, over what link, with how much of the host's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from graphs.errors import MismatchError, PlannerError
from graphs.ir import Graph
from graphs.options import OPTIONS, with_options
from graphs.options.surroundings import Surroundings
from graphs.units import parse_budget, parse_rate

# What PCIe 4, or 5 beside a training step that uses memory itself, carries in each direction.
LINK = "25GB/s"
_HOST_SHARE = 0.5  # of the memory that is free


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a graph by name, and what they need to know."""

    options: tuple[str, ...]
    surroundings: Surroundings

    def offered(self, graph: Graph) -> Graph:
        """`graph` with these options."""
        return with_options(graph, self.options, self.surroundings)

    @property
    def recorded(self) -> dict[str, object]:
        """As the settings of plans have it."""
        around = self.surroundings
        return {
            "options": list(self.options),
            "link_bytes_per_s": around.link_bytes_per_s,
            "host_budget_bytes": around.host_bytes,
        }


def choices_of(options: Sequence[str], link: str | float | None = None, host_budget: str | int | None = None) -> Choices | None:
    """What was asked for; None for a graph as it is.

    Args:
        options: names in ``graphs.options.OPTIONS``.
        link: bytes a second in each direction, or ``25GB/s``; None: ``LINK``.
        host_budget: bytes, ``64GB``, or ``50%`` of the host's memory that is free; None: half of that.

    Raises:
        PlannerError: there is no such option; the link or the memory cannot be read; or they are given without an option.
    """
    if not options:
        given = [name for name, value in (("link", link), ("host_budget", host_budget)) if value is not None]
        if given:
            raise PlannerError(
                f"{' and '.join(given)} given, but no option that copies: add options=['offload'] (--options offload)"
            )
        return None
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise PlannerError(f"there is no option {unknown[0]!r}: choose of {', '.join(OPTIONS)}")
    free_bytes = psutil.virtual_memory().available
    if host_budget is None:
        host_budget = int(_HOST_SHARE * free_bytes)
    host_bytes = parse_budget(host_budget, peak_bytes=free_bytes) if isinstance(host_budget, str) else host_budget
    rate = LINK if link is None else link
    return Choices(tuple(options), Surroundings(parse_rate(rate) if isinstance(rate, str) else float(rate), host_bytes))


def with_recorded(graph: Graph, settings: Mapping[str, object]) -> Graph:
    """`graph` with the options that the settings of a plan name.

    Raises:
        MismatchError: they cannot be what a solve has recorded.
        GraphError: there is no such option, or the graph has choices already.
    """
    names, rate, host_bytes = (settings.get(name) for name in ("options", "link_bytes_per_s", "host_budget_bytes"))
    if not names:
        return graph
    if not (isinstance(names, list) and isinstance(rate, int | float) and isinstance(host_bytes, int | None)):
        raise MismatchError(
            f"the settings of the plan have the options {names!r} with a link of {rate!r} and {host_bytes!r} bytes on the host, "
            "which no solve records: its file was edited; solve again"
        )
    return with_options(graph, names, Surroundings(rate, host_bytes))
