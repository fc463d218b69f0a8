"""The steps of a schedule that copies: copies are issued where it says, and waited for where they must be."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Generic, TypeVar

from torch import fx

from graphs.errors import GraphError
from graphs.ir import Graph
from graphs.options.offload import without_copies
from graphs.options.selection import without_computed
from graphs.overwriting import Pairs
from graphs.pools import COMPUTE, DEVICE_TO_HOST
from graphs.schedule import Compute, Step
from planner.passes.program import Call, Program, Ref, item
from planner.passes.writer import Writer

C = TypeVar("C")
D = TypeVar("D")


class UnderWay(Generic[C]):
    """The copies that were issued and not waited for yet, by whatever stands for one.

    The computation waits for a copy in before it reads what that makes, and for all that was issued with a tensor before
    that is freed; copies wait for each other. That is where ``graphs.clocks`` waits.

    Attributes:
        issued: by tensor on the device, in the order of issue.
    """

    def __init__(self) -> None:
        self.issued: dict[int, list[C]] = {}
        self._arriving: dict[int, C] = {}

    @property
    def copies(self) -> tuple[C, ...]:
        """All of them."""
        return tuple(copy for copies in self.issued.values() for copy in copies)

    def known_as(self, other: Callable[[C], D]) -> "UnderWay[D]":
        """The same copies by what `other` says stands for each."""
        same: UnderWay[D] = UnderWay()
        for t, copies in self.issued.items():
            for copy in copies:
                known = other(copy)
                same.out(t, known)
                if self._arriving.get(t) is copy:
                    same._arriving[t] = known
        return same

    def out(self, t: int, copy: C) -> None:
        """`copy` reads `t`."""
        self.issued.setdefault(t, []).append(copy)

    def back(self, t: int, copy: C) -> None:
        """`copy` makes `t`."""
        self.issued[t] = [copy]
        self._arriving[t] = copy

    def making(self, t: int) -> tuple[C, ...]:
        """The copy that makes `t`, if it may be under way."""
        return (self._arriving[t],) if t in self._arriving else ()

    def before_reading(self, tensors: Iterable[int]) -> list[C]:
        """What is to be waited for before `tensors` are read."""
        waited = []
        for t in tensors:
            if (copy := self._arriving.pop(t, None)) is not None:
                self.issued[t].remove(copy)
                waited.append(copy)
        return waited

    def before_freeing(self, t: int) -> list[C]:
        """What is to be waited for before `t` goes."""
        self._arriving.pop(t, None)
        return self.issued.pop(t, [])


class CopyingWriter(Writer):
    """Writes steps with round trips to the host (``graphs.options.offload``), by the ``channels`` that passes name."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        *,
        repeated: Container[int] = (),
        tick: Callable[[int], object] | None = None,
    ) -> None:
        """As ``Writer``."""
        super().__init__(graph, program, repeated=repeated, tick=tick)
        self._trips: UnderWay[fx.Node] = UnderWay()

    @property
    def copies(self) -> tuple[fx.Node, ...]:
        """The copies that may be under way after the steps written so far."""
        return self._trips.copies

    def take_over(self, copies: Sequence[fx.Node]) -> None:
        """Let `copies`, parameters of the next pass, stand for those that may be under way."""
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
        if target in wanted:  # what is there already is copied once more, and dropped
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
    """Refuse a graph with choices that are not run.

    Raises:
        GraphError: it has others than round trips to the host, ops on other devices, and ops on the compute stream that `program`
            has calls of.
    """
    without_copies(without_computed(graph))
    unknown = [op.name for op in graph.ops[len(program.calls) :] if op.stream == COMPUTE]
    if unknown:
        raise GraphError(
            f"the graph offers {unknown[0]!r}, but the captured step has no call for it: capture the step with the options that "
            "the graph was traced with"
        )
