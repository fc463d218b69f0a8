"""The steps of a schedule that copies, as source lines: copies are issued where it says, and waited for where they must be."""

from collections.abc import Container, Iterable
from itertools import count

from graphs.capture.program import Program, Writer, variable
from graphs.ir import Graph, check_plain
from graphs.options.offload import without_copies
from graphs.pools import DEVICE_TO_HOST
from graphs.schedule import Compute, Step


class CopyingWriter(Writer):
    """Writes steps with round trips to the host (``graphs.options.offload``), by ``channels`` of the namespace.

    The computation waits for a copy in before it reads what that makes, and for all that was issued with a tensor before
    that is freed; copies wait for each other. That is where ``graphs.clocks`` waits.
    """

    def __init__(self, graph: Graph, program: Program, *, repeated: Container[int] = ()) -> None:
        """As ``Writer``."""
        super().__init__(graph, program, repeated=repeated)
        self._number = count()
        self._issued: dict[int, list[str]] = {}  # by tensor on the device: variables of copies not waited for yet
        self._arriving: dict[int, str] = {}  # the one of these that makes it

    @property
    def copies(self) -> tuple[str, ...]:
        """Variables of the copies that may be under way after the steps written so far."""
        return tuple(name for names in self._issued.values() for name in names)

    def write(self, steps: Iterable[Step]) -> list[str]:
        """As ``Writer.write``."""
        lines: list[str] = []
        for step in steps:
            if not isinstance(step, Compute):
                lines += self._wait(self._issued.pop(step.tensor, []))
                self._arriving.pop(step.tensor, None)
            elif not self.graph.ops[step.op].optional:
                for t in self.graph.ops[step.op].inputs:
                    if (name := self._arriving.pop(t, None)) is not None:
                        self._issued[t].remove(name)
                        lines += self._wait([name])
            lines += super().write([step])
        return lines

    def _compute(self, op: int, wanted: frozenset[int]) -> list[str]:
        copy = self.graph.ops[op]
        if not copy.optional:
            return super()._compute(op, wanted)
        (source,), (target,) = copy.inputs, copy.outputs
        name = f"c{next(self._number)}"
        if copy.stream == DEVICE_TO_HOST:
            self._issued.setdefault(source, []).append(name)
            arguments = ", ".join((variable(source), *((self._arriving[source],) if source in self._arriving else ())))
            # What is there already is copied once more, and dropped.
            made = variable(target) if target in wanted else "_"
            return [f"{made}, {name} = channels.out({arguments})", *(() if target in wanted else ("del _",))]
        self._issued[target] = [name]
        self._arriving[target] = name
        return [f"{variable(target)}, {name} = channels.back({variable(source)})"]

    def _wait(self, names: Iterable[str]) -> list[str]:
        return [line for name in names for line in (f"channels.wait({name})", f"del {name}")]


def check_runnable(graph: Graph) -> None:
    """Refuse a graph with choices that are not run.

    Raises:
        GraphError: it has others than round trips to the host.
    """
    program, _ = without_copies(graph)
    check_plain(program)
