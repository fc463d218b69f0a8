"""Writer of schedules with transfers: copies are issued as scheduled, and waited for when needed."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Generic, TypeVar

from torch import fx

from graphs.errors import GraphError
from graphs.ir import Graph
from graphs.options.offload import without_offload
from graphs.options.selection import without_computed
from graphs.overwriting import Pairs
from graphs.pools import COMPUTE, DEVICE_TO_HOST
from graphs.schedule import Compute, Step
from planner.passes.program import Call, Program, Ref, item
from planner.passes.writer import Writer

C = TypeVar("C")
D = TypeVar("D")


class UnderWay(Generic[C]):
    """The copies that were issued and not waited for yet.

    The computation waits for a reload before it reads the tensor, and for all copies of a tensor before it frees it; copies wait
    for each other. These are the waits in ``graphs.clocks``.

    Attributes:
        issued: the copies of each tensor on the device, in the order of issue.
    """

    def __init__(self) -> None:
        self.issued: dict[int, list[C]] = {}
        self._arriving: dict[int, C] = {}

    @property
    def copies(self) -> tuple[C, ...]:
        """All copies under way."""
        return tuple(copy for copies in self.issued.values() for copy in copies)

    def known_as(self, other: Callable[[C], D]) -> "UnderWay[D]":
        """Return the same copies, each replaced by ``other(copy)``."""
        same: UnderWay[D] = UnderWay()
        for t, copies in self.issued.items():
            for copy in copies:
                known = other(copy)
                same.out(t, known)
                if self._arriving.get(t) is copy:
                    same._arriving[t] = known
        return same

    def out(self, t: int, copy: C) -> None:
        """Record that `copy` reads `t`."""
        self.issued.setdefault(t, []).append(copy)

    def back(self, t: int, copy: C) -> None:
        """Record that `copy` makes `t`."""
        self.issued[t] = [copy]
        self._arriving[t] = copy

    def making(self, t: int) -> tuple[C, ...]:
        """Return the copy that makes `t`, if it may be under way."""
        return (self._arriving[t],) if t in self._arriving else ()

    def before_reading(self, tensors: Iterable[int]) -> list[C]:
        """Remove and return the copies to wait for before `tensors` are read."""
        waited = []
        for t in tensors:
            if (copy := self._arriving.pop(t, None)) is not None:
                self.issued[t].remove(copy)
                waited.append(copy)
        return waited

    def before_freeing(self, t: int) -> list[C]:
        """Remove and return the copies to wait for before `t` is freed."""
        self._arriving.pop(t, None)
        return self.issued.pop(t, [])


class CopyingWriter(Writer):
    """A writer of steps with transfers to the host (``graphs.options.offload``), by the ``channels`` of the passes."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        *,
        repeated: Container[int] = (),
        tick: Callable[[int], object] | None = None,
    ) -> None:
        """Initialize the writer; see ``Writer``."""
        super().__init__(graph, program, repeated=repeated, tick=tick)
        self._trips: UnderWay[fx.Node] = UnderWay()

    @property
    def copies(self) -> tuple[fx.Node, ...]:
        """The copies that may be under way after the steps written so far."""
        return self._trips.copies

    def take_over(self, copies: Sequence[fx.Node]) -> None:
        """Replace the copies under way by `copies`, parameters of the next pass."""
        known = dict(zip(self.copies, copies, strict=True))
        self._trips = self._trips.known_as(known.__getitem__)

    def _before(self, step: Step) -> None:
        if not isinstance(step, Compute):
            self._wait(self._trips.before_freeing(step.tensor))
        elif self.graph.ops[step.op].stream == COMPUTE:
            self._wait(self._trips.before_reading(self.graph.ops[step.op].inputs))

    def _compute(self, op: int, wanted: frozenset[int], over: Pairs) -> None:
        copy = self.graph.ops[op]
        if copy.stream == COMPUTE:
            super()._compute(op, wanted, over)
            return
        (source,), (target,) = copy.inputs, copy.outputs
        out = copy.stream == DEVICE_TO_HOST
        after = self._trips.making(source) if out else ()
        both = self.builder.call(Call("out" if out else "back", (self.builder.attribute("channels"), Ref(source), *after)))
        if target in wanted:  # an existing tensor is copied again, and dropped
            self.builder.rebind(target, item(both, (0,)))
        issued = self.builder.hold(item(both, (1,)), "copy")
        self.builder.free(both)
        if out:
            self._trips.out(source, issued)
        else:
            self._trips.back(target, issued)

    def _wait(self, copies: Iterable[fx.Node]) -> None:
        for copy in copies:
            self.builder.call(Call("wait", (self.builder.attribute("channels"), copy)))
            self.builder.free(copy)


def check_runnable(graph: Graph, program: Program) -> None:
    """Raise for a graph with options that cannot be run.

    Raises:
        GraphError: an option is neither offloading, nor placement on other devices, nor an op on the compute stream with calls in
            `program`.
    """
    without_offload(without_computed(graph))
    unknown = [op.name for op in graph.ops[len(program.calls) :] if op.stream == COMPUTE]
    if unknown:
        raise GraphError(
            f"the graph offers {unknown[0]!r}, but the captured step has no call for it: capture the step with the options that "
            "the graph was traced with"
        )
