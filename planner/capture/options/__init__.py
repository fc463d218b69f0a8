"""Options of graphs, by name. A new option is one file, and its import and registration here.

Some are found among the calls of a step when it is traced (``StepOption``): the graph then contains them, and those not requested
are removed again. Others are added to any graph when it is solved (``GraphOption``). A name may have a number after a colon:
``compress:4``. This package imports torch lazily.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from types import MappingProxyType

from planner.capture.options.chunks import CHUNKS
from planner.capture.options.compress import COMPRESS
from planner.capture.options.in_place import IN_PLACE
from planner.capture.options.kernels import KERNELS
from planner.capture.options.option import StepOption
from planner.capture.options.pack import PACK
from planner.graphs.errors import UsageError, suggest
from planner.graphs.ir import Graph
from planner.graphs.options.gather import OVERLAP
from planner.graphs.options.offload import OFFLOAD
from planner.graphs.options.option import GraphOption, Need, Option
from planner.graphs.options.placement import PLACEMENT
from planner.graphs.options.selection import keep_traced, keep_traced_ops
from planner.graphs.options.surroundings import Surroundings
from planner.graphs.schedule import Schedule

_registered: dict[str, Option] = {}
OPTIONS: Mapping[str, Option] = MappingProxyType(_registered)


def register(option: Option) -> None:
    """Add `option` to the registry; raise UsageError if its name is taken."""
    if option.name in _registered:
        raise UsageError(f"there is an option {option.name!r} already: give the new one another name")
    _registered[option.name] = option


register(OFFLOAD)
register(OVERLAP)
register(CHUNKS)
register(PACK)
register(KERNELS)
register(IN_PLACE)
register(COMPRESS)
register(PLACEMENT)

DEFAULTS = tuple(name for name, option in OPTIONS.items() if option.default)


def parse_option(text: str) -> tuple[str, int | None]:
    """Return the name of an option, and the number after its colon; None if it has none.

    Raises:
        UsageError: there is no such option, it takes no number, or the number is out of range.
    """
    name, colon, number = text.partition(":")
    if name not in OPTIONS:
        raise UsageError(f"there is no option {name!r} of a graph{suggest(name, OPTIONS)}: choose from {', '.join(OPTIONS)}")
    if not colon:
        return name, None
    if (argument := OPTIONS[name].argument) is None:
        raise UsageError(f"the option {name!r} has no number, but {text!r} was given: write {name!r}")
    if number not in map(str, range(argument.least, argument.most + 1)):
        raise UsageError(
            f"{text!r} has {number!r} {argument.unit}: must be a whole number from {argument.least} to {argument.most}, as in "
            f"{OPTIONS[name].to_try!r}"
        )
    return name, int(number)


def get_option(text: str) -> Option:
    """Return the option of this name, with or without a number; raise UsageError as ``parse_option``."""
    return OPTIONS[parse_option(text)[0]]


def needs(names: Sequence[str]) -> frozenset[Need]:
    """Return the properties of the machine that the options `names` need; raise UsageError if there is no such option."""
    options = map(get_option, names)
    return frozenset(option.need for option in options if isinstance(option, GraphOption) and option.need is not None)


def list_needing(need: Need) -> tuple[str, ...]:
    """Return the names of the options that need this property of the machine."""
    return tuple(name for name in OPTIONS if need in needs((name,)))


def list_options_for_any_step() -> tuple[str, ...]:
    """Return the options that can be tried on any step: those with transfers to the host, and those found in tracing."""
    return (*list_needing(Need.LINK), *list_step_option_names(tuple(OPTIONS)))


def list_options_to_try(graph: Graph) -> tuple[str, ...]:
    """Return the options to give advice on: those for any graph with transfers, and those that `graph` was traced with."""
    return (*list_needing(Need.LINK), *(get_option(name).to_try for name in graph.provenance.options))


def check_names(**given: object) -> None:
    """Raise a UsageError unless each argument is a list of texts, or another collection of them with an order or none."""
    for name, names in given.items():
        if isinstance(names, str) or not isinstance(names, Sequence | Set) or not all(isinstance(each, str) for each in names):
            shown = [names] if isinstance(names, str) else ["NAME"]
            raise UsageError(f"{name} is {names!r}: must be a list of names, {shown!r}")


def check_options(names: Sequence[str]) -> None:
    """Raise UsageError if a name is not that of an option, or is there twice."""
    check_names(options=names)
    found = [parse_option(text)[0] for text in names]
    for name in found:
        if found.count(name) > 1:
            raise UsageError(f"the option {name!r} is named twice")


def check_complete(names: Sequence[str]) -> None:
    """Raise UsageError if a name is not that of an option, or lacks the number that the option needs."""
    check_options(names)
    for name, number in map(parse_option, names):
        if (argument := OPTIONS[name].argument) is not None and number is None:
            raise UsageError(
                f"the option {name!r} needs a number of {argument.unit} from {argument.least} to {argument.most}, "
                f"{argument.question}: write {OPTIONS[name].to_try!r}"
            )


def step_options(names: Collection[str]) -> tuple[StepOption, ...]:
    """Return the options of `names` that are found in a captured step, in the order of their ops in graphs."""
    found = {parse_option(text)[0] for text in names}
    return tuple(option for name, option in OPTIONS.items() if isinstance(option, StepOption) and name in found)


def list_step_option_names(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of ``step_options``, without numbers."""
    return tuple(option.name for option in step_options(names))


def check_traced(names: Sequence[str]) -> None:
    """Raise UsageError if a name is not that of an option found when a step is traced."""
    check_options(names)
    if others := [name for name in names if parse_option(name)[0] not in list_step_option_names(names)]:
        raise UsageError(f"the option {others[0]!r} is not found in a step, but added when its graph is solved: name it there")


def apply_options(
    graph: Graph, names: Sequence[str], surroundings: Surroundings | None = None, only: Collection[str] | None = None
) -> Graph:
    """Return `graph` with the options `names`, and without the others that it was traced with.

    Args:
        surroundings: properties of the machine, for options that need them.
        only: names of the traced optional ops to keep; None for all.

    Raises:
        UsageError: there is no such option, its number is missing, the graph was traced without it, or it needs `surroundings`.
        GraphError: it cannot be added to this graph.
    """
    check_complete(names)
    if missing := [name for name in list_step_option_names(names) if name not in graph.provenance.options]:
        raise UsageError(
            f"the graph was traced without the option {missing[0]!r}, which is found in the step itself: trace it with "
            f"--options {','.join(missing)} (planner.trace(..., options={missing}))"
        )
    graph = restrict_to(graph, list_step_option_names(names))
    if only is not None:
        graph = keep_traced_ops(graph, only)
    added = [option for option in map(get_option, names) if isinstance(option, GraphOption)]
    for option in sorted(added, key=lambda option: option.last):
        if surroundings is None and option.need is not None:
            raise UsageError(f"the option {option.name!r} needs to know {option.need}")
        graph = option.add_to(graph, surroundings or Surroundings())
    for name, number in map(parse_option, names):
        if number is not None and (argument := OPTIONS[name].argument) is not None:
            graph = argument.limited(graph, number)
    return graph


def restrict_to(graph: Graph, names: Collection[str]) -> Graph:
    """Return `graph` with the options `names` only, out of those that it was traced with."""
    for name in graph.provenance.options:
        if name not in names and name in OPTIONS:
            graph = OPTIONS[name].restored(graph)
    return keep_traced(graph, names)


def order_as_executed(graph: Graph, schedule: Schedule) -> Schedule:
    """Return `schedule`, of a graph with options, as a step runs it; it must be judged again."""
    for option in OPTIONS.values():
        schedule = option.lift(graph, schedule)
    return schedule
