"""Dependencies between the ops of a program that hold for all alternatives and devices."""

import numpy as np

from planner.solvers.problem import Problem


class Paths:
    """Dependencies between the ops of the program, whichever alternatives are executed.

    Tensors are those of the program, wherever their copies are.

    Attributes:
        producer: for tensors whose producers are one op of the program, its alternatives and transfers, that op.
        copied: by tensor and device, the least time of a transfer of it to there.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.streams, self.places = problem, problem.streams, problem.places
        self.ops = [problem.graph.ops[op] for op in self.places.ids]
        self.program = [v for v in range(problem.ops) if not (self.places.optional[v] or self.places.replaces[v])]
        self.copied: dict[tuple[int, int], float] = {}
        self.transfers = [self.streams.transfers.get(op) for op in self.places.ids]
        copies = {i for i, transfer in enumerate(self.transfers) if transfer is not None and not transfer.must_run}
        for i, op in enumerate(self.ops):
            if i in copies:
                key = self.streams.base[op.inputs[0]], self.streams.pool[op.outputs[0]]
                self.copied[key] = min(self.copied.get(key, np.inf), problem.convert_to_units(problem.get_seconds(i)))
        self.producer: dict[int, int] = {}
        for v in self.program:
            known = set(self.list_with_replacements(v))
            for t in problem.outputs[v]:
                if copies.union(known).issuperset(problem.producers[t]):
                    self.producer[t] = v
        self._needed: dict[int, list[int]] = {}

    def list_with_replacements(self, v: int) -> list[int]:
        """Return op v of the program and all ops that replace it."""
        return [v, *self.places.replaced_by[v]]

    def list_alternatives(self, v: int) -> range:
        """Return the ops that may be executed in the place of v."""
        return self.places.list_alternatives(v)

    def list_devices_of_read(self, i: int, t: int) -> set[int]:
        """Return the devices on which op i reads t."""
        return {self.streams.pool[u] for u in self.ops[i].inputs if self.streams.base[u] == t}

    def list_reading_devices(self, v: int, t: int) -> list[int]:
        """Return the devices on which an op in the place of v reads t."""
        return sorted({device for c in self.list_alternatives(v) for device in self.list_devices_of_read(c, t)})

    def group_by_turn(self, v: int) -> dict[tuple[int, bool], list[int]]:
        """Return the ops that may be executed in the place of v, by what executes them one after the other.

        That is their stream. A transfer that reads only static tensors may be issued before others in earlier places.
        """
        found: dict[tuple[int, bool], list[int]] = {}
        for c in self.list_alternatives(v):
            transfer = self.transfers[c]
            is_early = transfer is not None and transfer.may_be_early
            found.setdefault((self.streams.stream[self.places.ids[c]], is_early), []).append(c)
        return found

    def list_computing(self, t: int, device: int | None) -> list[int]:
        """Return the ops that compute t on a device."""
        producers = self.list_with_replacements(self.producer[t]) if t in self.producer else []
        made = ((p, u) for p in producers for u in self.problem.outputs[p] if self.streams.base[u] == t)
        return [p for p, u in made if self.streams.pool[u] == device]

    def list_needed(self, v: int) -> list[int]:
        """Return the tensors with known producers that v depends on in each alternative, directly or indirectly."""
        if v not in self._needed:
            found: dict[int, None] = {}
            for t in self.ops[v].inputs:
                if all(self.list_devices_of_read(b, t) for b in self.places.replaced_by[v]):
                    found |= {t: None} if t in self.producer else {}
                elif t in self.producer:  # produced inside an alternative, which reads its dependencies
                    before = self.list_needed(self.producer[t])
                    found |= {u: None for u in before if all(self.list_devices_of_read(b, u) for b in self.places.replaced_by[v])}
            self._needed[v] = list(found)
        return self._needed[v]

    def find_longest_static(self, v: int) -> tuple[int | None, int | None, float]:
        """Return the static tensor that v reads with the longest transfer, the target device, and its seconds."""
        found = [
            (self.copied[t, device], t, device)
            for c in self.list_alternatives(v)
            for t in {self.streams.base[u] for u in self.ops[c].inputs}
            for device in self.list_devices_of_read(c, t)
            if self.problem.graph.tensors[t].static and (t, device) in self.copied
        ]
        if not found:
            return None, None, 0.0
        copied, t, device = max(found)
        return t, device, copied
