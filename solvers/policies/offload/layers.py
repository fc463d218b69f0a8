"""A step by layers, for methods of torchtitan, which send tensors a layer late and ask for them a layer early."""

from collections.abc import Iterable, Sequence

from graphs.ir import Phase
from solvers.policies.offload.moves import Fetch, Moves, Offer


class Layers:
    """Executions of a step by layers: blocks in the order of the forward pass, which is the beginning of `computed`.

    Attributes:
        of_op: by op of the forward pass its layer, for those in one.
        inside: by tensor that is read in its own layer only, as far as the forward pass goes, that layer.
        last_op: by layer its last op in the forward pass.
        last: the last layer.
        begin_backward: position of the first execution after the forward pass.
        first_backward: by layer the first position at which some of it is made again, or what is inside it is read.
    """

    def __init__(self, offer: Offer, computed: Sequence[int], blocks: Sequence[str | None]) -> None:
        self.offer, self.computed = offer, computed
        forward = [op.id for op in offer.program.ops if op.phase is Phase.FORWARD]
        number: dict[str, int] = {}
        self.of_op = {op: number.setdefault(block, len(number)) for op in forward if (block := blocks[op]) is not None}
        self.last_op = {layer: op for op, layer in self.of_op.items()}
        self.last = len(number) - 1
        self.begin_backward = len(forward)
        self.inside = {
            t: layer
            for op, layer in self.of_op.items()
            for t in offer.program.ops[op].outputs
            if all(self.of_op.get(r) == layer for r in offer.program.consumers[t] if r < self.begin_backward)
        }
        self.first_backward: dict[int, int] = {}
        for position in range(self.begin_backward, len(computed)):
            op = computed[position]
            touched = [self.of_op[op]] if op in self.of_op else []
            touched += [self.inside[t] for t in offer.program.ops[op].inputs if t in self.inside]
            for layer in touched:
                self.first_backward.setdefault(layer, position)

    def may_go(self) -> list[int]:
        """What stays from the forward pass and may be sent, made in any layer but the last; with one layer also in that."""
        again = frozenset(self.computed[self.begin_backward :])
        made = [(op, layer) for op, layer in self.of_op.items() if op not in again and (layer < self.last or not self.last)]
        reads = self._first_reads()
        outputs = self.offer.program.ops
        return [t for op, _ in made for t in outputs[op].outputs if t in reads and t in self.offer.trips]

    def moves(self, tensors: Iterable[int]) -> Moves:
        """How `tensors` are sent, of those that may be: out when made, gone a layer after the last one that reads them.

        They are asked for before the backward pass of the layer after their own.
        """
        reads = self._first_reads()
        moves = Moves()
        for t in tensors:
            layer = self.of_op[self.offer.made_at(t)]
            readers = [self.of_op[r] for r in self.offer.readers(t, forward=True) if r in self.of_op]
            asked = self.first_backward.get(min(layer + 1, self.last), reads[t])
            made = self.offer.made_at(t)
            goes = self.last_op[min(max((layer, *readers)) + 1, self.last)]
            moves.sent.append((t, made))
            moves.held.append((t, max(made, goes)))  # parts of layers may stand among those of others
            moves.fetches.append(Fetch(t, min(asked, reads[t]), reads[t]))
        return moves

    def _first_reads(self) -> dict[int, int]:
        """By tensor the position at which it is first read after the forward pass."""
        reads: dict[int, int] = {}
        for position in range(self.begin_backward, len(self.computed)):
            for t in self.offer.program.ops[self.computed[position]].inputs:
                reads.setdefault(t, position)
        return reads
