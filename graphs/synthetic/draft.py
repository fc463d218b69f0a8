"""A builder of graphs, op by op: for tests, benchmarks and synthetic graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.graphs.ir import Graph, Kind, Op, Phase, Tensor
from planner.graphs.provenance import Provenance


@dataclass(slots=True)
class Draft:
    """A builder of graphs: ops are added in program order, tensors as their outputs."""

    ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add_static(self, name: str, size_bytes: int, kind: Kind = Kind.PARAMETER) -> int:
        """Add a static tensor and return its id."""
        self.tensors.append(Tensor(len(self.tensors), name, size_bytes, (), kind))
        return len(self.tensors) - 1

    def add_op(
        self,
        name: str,
        inputs: Sequence[int],
        sizes_bytes: Sequence[int],
        *,
        time_s: float = 1.0,
        workspace_bytes: int = 0,
        phase: Phase = Phase.FORWARD,
        recomputable: bool = True,
        mutates: tuple[int, ...] = (),
        overwrites: tuple[tuple[int, int], ...] = (),
    ) -> tuple[int, ...]:
        """Add an op with one output for each size and return the ids of the outputs."""
        index = len(self.ops)
        outputs = tuple(range(len(self.tensors), len(self.tensors) + len(sizes_bytes)))
        for position, (t, size) in enumerate(zip(outputs, sizes_bytes, strict=True)):
            self.tensors.append(Tensor(t, f"{name}.{position}" if position else name, size, (index,)))
        self.ops.append(
            Op(
                id=index,
                name=name,
                target="synthetic",
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=outputs,
                time_s=time_s,
                workspace_bytes=workspace_bytes,
                phase=phase,
                recomputable=recomputable,
                mutates=mutates,
                overwrites=overwrites,
            )
        )
        return outputs

    def build_graph(self, kept: Sequence[int] = (), **provenance: object) -> Graph:
        """Return the graph; `kept` tensors must be in memory at the end."""
        return Graph(tuple(self.ops), tuple(self.tensors), frozenset(kept), Provenance.of({"made": "synthetic", **provenance}))
