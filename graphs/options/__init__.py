"""Choices that a graph may be given, by name: rewrites that add optional ops. Adding one is adding one file and one line.

Some are added to a graph at any time. Others are found among the calls of a step when it is traced: the graph holds them from
then on, and those that are not wanted are left out of it again. A name may come with a number behind a colon: ``compress:4``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from graphs.checks import check_plain
from graphs.errors import UsageError
from graphs.ir import Graph, Tensor
from graphs.options.offload import offloaded
from graphs.options.placement import placed
from graphs.options.selection import holding, holding_ops, traced_with
from graphs.options.surroundings import Surroundings
from graphs.options.variance import LEAST_BITS, MOST_BITS, REFERENCE_BITS, variance_at
from graphs.pools import DEVICE

Rewrite = Callable[[Graph, Surroundings], Graph]  # the graph with more optional ops


@dataclass(frozen=True, slots=True)
class Option:
    """A choice.

    Attributes:
        description: one line about it.
        rewrite: what adds it to a graph; None for one that is found when a step is traced (``planner.capture.options.traced``).
        copies: whether it copies over the link to the host.
        places: whether it runs ops on other devices.
        lossy: whether solving needs to know to how many bits the whole may be compressed, as in ``compress:4``.
        default: whether ``planner.compile`` takes it where nobody says which: it is exact, goes with everything, and makes no
            program larger.
    """

    description: str
    rewrite: Rewrite | None = None
    copies: bool = False
    places: bool = False
    lossy: bool = False
    default: bool = False


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "offload": Option("tensors may be offloaded to host memory and reloaded, beside the computation", offloaded, copies=True),
        "chunks": Option("loss heads and other large row-wise stretches may be computed in 2 to 16 chunks"),
        "pack": Option("masks, indices and inputs of activations may be stored in bits and bytes, exactly"),
        "kernels": Option("convolutions, attention and losses may use other kernels, with other workspaces"),
        "in-place": Option("element-wise ops may write over an input that nothing reads later", default=True),
        "compress": Option(
            "saved tensors may be stored in 1 to 8 bits, within the gradient error of 4 bits for all: compress:4",
            lossy=True,
        ),
        "placement": Option(
            "ops may run on other devices, with copies between them",
            placed,
            places=True,
        ),
    }
)

DEFAULTS = tuple(name for name, option in OPTIONS.items() if option.default)


def parsed(text: str) -> tuple[str, int | None]:
    """The name of a choice, and the bits behind it; None where there are none.

    Raises:
        UsageError: there is no such choice, it takes no bits, or these are out of range.
    """
    name, colon, bits = text.partition(":")
    if name not in OPTIONS:
        raise UsageError(f"there is no option {name!r} of a graph: choose of {', '.join(OPTIONS)}")
    if not colon:
        return name, None
    if not OPTIONS[name].lossy:
        raise UsageError(f"the option {name!r} takes nothing behind a colon, but {text!r} was given: leave it out")
    if bits not in map(str, range(LEAST_BITS, MOST_BITS + 1)):
        raise UsageError(
            f"{text!r} has {bits!r} bits: must be a whole number from {LEAST_BITS} to {MOST_BITS}, as in "
            f"'{name}:{REFERENCE_BITS}'"
        )
    return name, int(bits)


def check_options(names: Sequence[str]) -> None:
    """Refuse what is no choice.

    Raises:
        UsageError: there is no such choice, or one is named twice.
    """
    found = [parsed(text)[0] for text in names]
    for name in found:
        if found.count(name) > 1:
            raise UsageError(f"the option {name!r} is named twice")


def check_complete(names: Sequence[str]) -> None:
    """Refuse also what a graph cannot be solved with: lossy ones that do not say to how many bits.

    Raises:
        UsageError: there is such a name.
    """
    check_options(names)
    for name, bits in map(parsed, names):
        if OPTIONS[name].lossy and bits is None:
            raise UsageError(
                f"the option {name!r} needs to know how lossy the whole may be, as bits from {LEAST_BITS} to {MOST_BITS}: write "
                f"'{name}:{REFERENCE_BITS}'"
            )


def traced_options(names: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` that are found when a step is traced, without bits, in the order in which their ops stand in graphs."""
    found = {parsed(text)[0] for text in names}
    return tuple(name for name, option in OPTIONS.items() if option.rewrite is None and name in found)


def check_traced(names: Sequence[str]) -> None:
    """Refuse what is no choice, or none that is found when a step is traced.

    Raises:
        UsageError: there is such a name.
    """
    check_options(names)
    if others := [name for name in names if parsed(name)[0] not in traced_options(names)]:
        raise UsageError(f"the option {others[0]!r} is not found in a step, but added when its graph is solved: name it there")


def with_options(
    graph: Graph, names: Sequence[str], surroundings: Surroundings | None = None, only: Collection[str] | None = None
) -> Graph:
    """`graph` with the choices called `names`, and none of the others that were traced with it.

    Args:
        surroundings: for those that copy.
        only: names of ops: of those that were found when it was traced there are no others; None for all.

    Raises:
        UsageError: there is no such choice, or it cannot be added to this graph, or the graph was traced without it; or one
            that is lossy does not say to how many bits.
    """
    check_complete(names)
    if missing := [name for name in traced_options(names) if name not in traced_with(graph)]:
        raise UsageError(
            f"the graph was traced without the option {missing[0]!r}, which is found in the step itself: trace it with "
            f"--options {','.join(missing)} (planner.trace(..., options={missing}))"
        )
    graph = holding(graph, traced_options(names))
    if only is not None:
        graph = holding_ops(graph, only)
    # Round trips to the host are of what is in the device's memory: their ops stand behind all others.
    for name, bits in sorted(map(parsed, names), key=lambda named: OPTIONS[named[0]].copies):
        if (rewrite := OPTIONS[name].rewrite) is not None:
            if surroundings is None:
                around = "the link to the host" if OPTIONS[name].copies else "other devices: Surroundings(others=...)"
                raise UsageError(f"the option {name!r} needs to know {around}")
            graph = rewrite(graph, surroundings)
        if bits is not None:
            graph = replace(graph, variance_limit=variance_at(graph, bits))
    return graph


def without_options(graph: Graph) -> Graph:
    """The program alone, with the same ids. What only optional ops make is left out, or has no bytes if other tensors follow.

    Raises:
        GraphError: the program itself has several pools or streams.
    """
    if graph.plain:
        return graph
    n = len(graph.program)
    tensors: list[Tensor] = []
    count = 0
    for t in graph.tensors:
        made = tuple(p for p in t.producers if p < n)
        if made or t.static:
            count = t.id + 1
        tensors.append(replace(t, producers=made) if made or t.static else replace(t, producers=(), size_bytes=0, pool=DEVICE))
    program = Graph(graph.program, tuple(tensors[:count]), graph.kept, graph.provenance)
    check_plain(program)
    return program
