"""A joint graph between AOTAutograd and its plan, which may be replaced by another one while the model trains.

AOTAutograd compiles a forward and a backward module once, with as many saved tensors as they have. Here there is a place
for each tensor that any plan may save, and one that says by which plan the forward pass ran: a backward pass runs by the
plan of its own forward pass, whatever came after.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from graphs.capture.lower import Capture
from graphs.schedule import Schedule
from graphs.torch_private.capture import boxed_nop
from planner.torch_compile import partition
from planner.torch_compile.rest_of_step import kept_bytes

Pass = Callable[[list[Any]], Any]  # empties the list of its arguments


class PlannedGraph(ABC):
    """One of the graphs of a compiled model.

    Attributes:
        captured: what is planned of it.
        tangents: its static tensors that are gradients of its outputs.
        outputs: how many tensors the forward pass returns besides what it saves.
        slots: a tensor for each place among what is saved.
        lean: a schedule that keeps little between the passes; None as long as none was looked for.
        watch: called with what a forward pass gets; returns what is to be called with what it returns, and with the
            tensor that dies with what it saves.
    """

    def __init__(self, captured: Capture, *, tangents: Sequence[int], slots: Sequence[int], outputs: int) -> None:
        self.captured = captured
        self.tangents = tuple(tangents)
        self.outputs = outputs
        self.slots = tuple(slots)
        self.lean: Schedule | None = None
        self.watch: Callable[[list[Any]], Callable[[list[Any], torch.Tensor], None]] | None = None
        self._passes: list[tuple[Pass, Pass]] = []

    @abstractmethod
    def passes(self, schedule: Schedule) -> tuple[Pass, Pass]:
        """The forward and the backward pass by `schedule`: with what is saved, None for what is not, in place of `slots`."""

    @abstractmethod
    def interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What AOTAutograd sees of the two passes: among what is saved is one more at the end."""

    @property
    def schedule(self) -> Schedule:
        """Of the forward passes to come."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self._passes.append(self.passes(schedule))
        self._schedule = schedule

    @property
    def kept_bytes(self) -> int:
        """What is in memory between the passes, besides what is static."""
        return kept_bytes(self.captured.graph, self._schedule)

    def forward(self, args: list[Any]) -> list[Any]:
        """A forward pass as AOTAutograd calls it; empties `args`."""
        seen = None if self.watch is None else self.watch(args)
        number = len(self._passes) - 1
        returned = self._passes[number][0](args)
        plan = torch.empty((number, 0))  # takes no memory, whatever its shape says
        if seen is not None:
            seen(returned[: self.outputs], plan)
        return [*returned[: self.outputs], *(plan if t is None else t for t in returned[self.outputs :]), plan]

    def backward(self, args: list[Any]) -> Any:
        """A backward pass as AOTAutograd calls it; empties `args`."""
        number = args.pop(len(self.slots)).shape[0]
        return self._passes[number][1](args)

    # AOTAutograd hands over its arguments in a list that the callee empties.
    forward._boxed_call = True  # type: ignore[attr-defined]
    backward._boxed_call = True  # type: ignore[attr-defined]


class PlannedOps(PlannedGraph):
    """One that runs eager PyTorch's kernels."""

    def __init__(self, module: fx.GraphModule, captured: Capture, outputs: int) -> None:
        """Plan for `module`, the joint graph, which was `captured`."""
        tangents, slots = partition.tangents(module, captured), partition.slots(module, captured)
        super().__init__(captured, tangents=tangents, slots=slots, outputs=outputs)
        self._module = module

    def passes(self, schedule: Schedule) -> tuple[Pass, Pass]:
        """See ``PlannedGraph``."""
        forward, backward = partition.split(self._module, self.captured, schedule, forward_outputs=self.outputs, slots=self.slots)
        return boxed_nop(forward, []), boxed_nop(backward, [])

    def interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """See ``PlannedGraph``."""
        return partition.interface(self._module, self.captured, self.slots, forward_outputs=self.outputs)
