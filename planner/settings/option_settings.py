"""Options of a graph as users choose them, with the link and the host memory for transfers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import msgspec
import psutil

from planner.capture.options import DEFAULTS, apply_options, check_complete, list_needing, needs
from planner.graphs.errors import BudgetError, GraphError, MismatchError, UsageError
from planner.graphs.ir import Graph
from planner.graphs.options.option import Need
from planner.graphs.options.selection import list_exact_ops
from planner.graphs.options.surroundings import Link, OtherDevice, Surroundings
from planner.graphs.provenance import Provenance
from planner.graphs.units import format_seconds, parse_budget, parse_rate
from planner.settings.link import format_rate, get_measured_link, get_published_link
from planner.settings.other_devices import DEVICES_KEY, decode_devices, encode_devices
from planner.solvers.registry import check_solver, check_takes
from planner.solvers.result import SolveSettings

# The rate per direction of PCIe 4, or of PCIe 5 during a training step that uses memory itself.
LINK = "25GB/s"
RECORDED_OPTIONS = ("options", "exact", DEVICES_KEY, "link", "host_budget_bytes")  # keys of ``OptionSettings.record``
_HOST_SHARE = 0.5  # of the free memory


class LinkSource(StrEnum):
    """The source of a link's figures; the first available one is used."""

    GIVEN = "given"  # by the user
    MEASURED = "measured"  # during the step, on its device
    PUBLISHED = "published"  # by the vendor, times the fraction that a step reaches
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class KnownLink:
    """A link and the source of its figures."""

    link: Link
    source: LinkSource

    @property
    def recorded(self) -> dict[str, object]:
        """The link in the form of plan settings."""
        return {**asdict(self.link), "source": str(self.source)}

    def __str__(self) -> str:
        out, back = format_rate(self.link.out_bytes_per_s), format_rate(self.link.in_bytes_per_s)
        rates = f"{out} each way" if out == back else f"{out} out, {back} in"
        return f"{rates}, {format_seconds(self.link.latency_s)} a transfer, {self.source}"


@dataclass(frozen=True, slots=True)
class OptionSettings:
    """Options of a graph by name, and the machine's properties that they need; without names, recomputation only.

    Attributes:
        names: names in ``planner.capture.options.OPTIONS``.
        link_bytes_per_s: rate in each direction; None: the known rate of the graph's device.
        host_bytes: host memory that a step may use; None if no option transfers tensors.
        exact: True to offer only ops with the bits of the program.
        host_budget: the text that `host_bytes` was read from.
    """

    names: tuple[str, ...] = ()
    link_bytes_per_s: float | None = None
    host_bytes: int | None = None
    exact: bool = False
    host_budget: str | int | None = None

    @property
    def offloads(self) -> bool:
        """True if tensors may be transferred to host memory."""
        return self.host_bytes is not None

    @property
    def measures_link(self) -> bool:
        """True if the link is to be measured during profiling: an option transfers tensors, and no rate was given."""
        return self.offloads and self.link_bytes_per_s is None

    @property
    def shares_host(self) -> bool:
        """True if the host memory is a share of what is free, which changes from run to run."""
        share = self.host_budget is None or (isinstance(self.host_budget, str) and self.host_budget.strip().endswith("%"))
        return self.offloads and share

    @property
    def places(self) -> bool:
        """True if ops may run on other devices."""
        return Need.DEVICES in needs(self.names)

    @property
    def named(self) -> str:
        """The names of the options, for a sentence."""
        return ", ".join(self.names)

    @property
    def as_json(self) -> dict[str, object]:
        """These settings in the form of JSON output; empty without options."""
        if not self.names:
            return {}
        copying = {"link_bytes_per_s": self.link_bytes_per_s, "host_budget_bytes": self.host_bytes}
        said = {"options": list(self.names), **({"exact": True} if self.exact else {})}
        return {**said, **(copying if self.offloads else {})}

    @property
    def key(self) -> dict[str, object]:
        """These settings as the key of cached plans: with the share of host memory if it is one, else with its bytes."""
        host = self.host_budget if self.shares_host else self.host_bytes
        return {**asdict(self), "host_bytes": host, "host_budget": None}

    def check_solver(self, solver: str) -> None:
        """Raise a PlannerError unless `solver` accepts graphs with these options."""
        if self.names:
            check_takes(solver, transfers=self.offloads, devices=self.places, named=self.named)

    def apply(self, graph: Graph) -> Graph:
        """Return `graph` with these options, and without others that it was traced with.

        Raises:
            MismatchError: the link in its provenance is impossible.
            GraphError: it was traced without one of them, or one cannot be added to it.
        """
        around = None
        if self.offloads or self.places:
            link = self.link(graph.provenance).link if self.offloads else None
            around = Surroundings(link, self.host_bytes, self._select_devices(graph.provenance))
        return apply_options(graph, self.names, around, list_exact_ops(graph) if self.exact else None)

    def record(self, graph: Graph) -> dict[str, object]:
        """Return these settings in the form of plan settings, for a graph with these options; empty without options."""
        if not self.names:
            return {}
        said: dict[str, object] = {"options": list(self.names)}
        if self.exact:
            said["exact"] = list_exact_ops(graph)
        if self.places:
            said[DEVICES_KEY] = encode_devices(self._select_devices(graph.provenance))
        if self.host_bytes is None:
            return said
        return {**said, "link": self.link(graph.provenance).recorded, "host_budget_bytes": self.host_bytes}

    def _select_devices(self, provenance: Provenance) -> tuple[OtherDevice, ...]:
        """Return the devices for ops among those that a graph of this provenance was traced with."""
        known = decode_devices(provenance) if self.places else ()
        return tuple(device.exactly for device in known) if self.exact else known

    def link(self, provenance: Provenance) -> KnownLink:
        """Return the link to plan with, for a graph of this provenance.

        Raises:
            MismatchError: the link in the provenance is impossible.
        """
        if self.link_bytes_per_s is not None:
            return KnownLink(Link.even(self.link_bytes_per_s), LinkSource.GIVEN)
        if (measured := get_measured_link(provenance)) is not None:
            return KnownLink(measured.link, LinkSource.MEASURED)
        if (published := get_published_link(provenance.device)) is not None:
            return KnownLink(published, LinkSource.PUBLISHED)
        return KnownLink(Link.even(parse_rate(LINK)), LinkSource.DEFAULT)


RECOMPUTATION = OptionSettings()  # nothing but recomputation


def list_default_options(solver: str) -> tuple[str, ...]:
    """Return the options that are on by default, if `solver` takes them."""
    return DEFAULTS if check_solver(solver).alternatives else ()


def build_option_settings(
    options: Sequence[str],
    link: str | float | None = None,
    host_budget: str | int | None = None,
    *,
    exact: bool = False,
) -> OptionSettings:
    """Return the settings from user arguments.

    Args:
        options: names in ``planner.capture.options.OPTIONS``.
        link: bytes per second in each direction, or ``25GB/s``; None: the measured or published rate of a graph's device, else
            ``LINK``.
        host_budget: bytes, ``64GB``, or ``50%`` of the free host memory; None: half of that.
        exact: offer only ops of these options with the bits of the program.

    Raises:
        UsageError: there is no such option; or the link, the memory or `exact` is given without an option that needs it.
        BudgetError: the link or the memory cannot be read.
    """
    check_complete(options)
    if exact and not options:
        raise UsageError("exact is given, but no option that it applies to: add options=['chunks'] (--options chunks)")
    if Need.LINK not in needs(options):
        given = [name for name, value in (("link", link), ("host_budget", host_budget)) if value is not None]
        if given:
            copying = list_needing(Need.LINK)[0]
            raise UsageError(
                f"{' and '.join(given)} given, but no option that transfers tensors: add options=[{copying!r}] "
                f"(--options {copying})"
            )
        return OptionSettings(tuple(options), exact=exact)
    free_bytes, asked = psutil.virtual_memory().available, host_budget
    if host_budget is None:
        host_budget = int(_HOST_SHARE * free_bytes)
    if type(host_budget) not in (int, str):
        raise BudgetError(f"host_budget is {host_budget!r}: must be whole bytes, or text such as '64GB' or '50%'")
    host_bytes = parse_budget(host_budget, peak_bytes=free_bytes) if isinstance(host_budget, str) else host_budget
    if type(link) not in (int, float, str, type(None)):
        raise BudgetError(f"link is {link!r}: must be bytes a second, or text such as '25GB/s'")
    rate = None if link is None else parse_rate(link) if isinstance(link, str) else float(link)
    Surroundings(Link.even(1.0 if rate is None else rate), host_bytes)  # raise before anything is traced or measured
    return OptionSettings(tuple(options), rate, host_bytes, exact, asked)


def read_recorded_link(settings: SolveSettings) -> KnownLink | None:
    """Return the link in the settings of a plan; None if no option of the plan transfers tensors.

    Raises:
        MismatchError: the settings are none that a solve records.
    """
    if Need.LINK not in needs(read_recorded_options(settings)):
        return None
    said = settings.options.get("link")
    try:
        source = msgspec.convert(said, dict[str, object]).get("source")
        return KnownLink(msgspec.convert(said, Link), msgspec.convert(source, LinkSource))
    except (msgspec.ValidationError, GraphError) as error:
        raise _build_edited_error(f"a link of {said!r} ({error})") from None


def apply_recorded_options(graph: Graph, settings: SolveSettings) -> Graph:
    """Return `graph` with exactly the options in the settings of a plan.

    Raises:
        MismatchError: the settings are none that a solve records.
        GraphError: there is no such option, or it cannot be added to this graph, or the graph was traced without it.
    """
    names, exact = read_recorded_options(settings), settings.options.get("exact")
    only = None if exact is None else _read_names("exact ops", exact)  # all ops may be offered
    known, others = read_recorded_link(settings), decode_devices(settings.options)
    if known is None:
        return apply_options(graph, names, Surroundings(others=others) if others else None, only)
    host_bytes = settings.options.get("host_budget_bytes")
    if not isinstance(host_bytes, int):
        raise _build_edited_error(f"the options {names!r} with {host_bytes!r} bytes of host memory")
    return apply_options(graph, names, Surroundings(known.link, host_bytes, others), only)


def read_recorded_options(settings: SolveSettings) -> tuple[str, ...]:
    """Return the options in the settings of a plan; raise a MismatchError if they are no names."""
    return _read_names("options", settings.options.get("options") or ())


def _read_names(what: str, names: object) -> tuple[str, ...]:
    """Return `names`, of the settings of a plan."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _build_edited_error(f"the {what} {names!r}")
    return tuple(names)


def _build_edited_error(what: str) -> MismatchError:
    return MismatchError(f"the settings of the plan have {what}, which no solve records: its file was edited; solve again")
