"""A joint graph between AOTAutograd and its plan, which may be replaced by another one while the model trains.

AOTAutograd compiles a forward and a backward module once, with as many saved tensors as they have. Here there is a place
for each tensor that any plan may save, and one that says by which plan the forward pass ran: a backward pass runs by the
plan of its own forward pass, whatever came after.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphs.capture.lower import Capture
from graphs.schedule import Schedule
from graphs.torch_private.capture import boxed_nop
from planner.torch_compile import partition
from planner.torch_compile.rest_of_step import kept_bytes


class PlannedGraph:
    """One of the graphs of a compiled model.

    Attributes:
        module: the joint graph.
        captured: what is planned of it.
        tangents: its static tensors that are gradients of its outputs.
        outputs: how many tensors the forward module returns besides what it saves.
        lean: a schedule that keeps little between the passes; None as long as none was looked for.
        watch: called with what a forward pass gets; returns what is to be called with what it returns, and with the
            tensor that dies with what it saves.
    """

    def __init__(self, module: fx.GraphModule, captured: Capture, outputs: int) -> None:
        self.module = module
        self.captured = captured
        self.tangents = partition.tangents(module, captured)
        self.outputs = outputs
        self.lean: Schedule | None = None
        self.watch: Callable[[list[Any]], Callable[[list[Any], torch.Tensor], None]] | None = None
        self._slots = partition.slots(module, captured)
        self._passes: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

    @property
    def schedule(self) -> Schedule:
        """Of the forward passes to come."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        forward, backward = partition.split(
            self.module, self.captured, schedule, forward_outputs=self.outputs, slots=self._slots, as_eager=True
        )
        self._passes.append((boxed_nop(forward, []), boxed_nop(backward, [])))
        self._schedule = schedule

    @property
    def kept_bytes(self) -> int:
        """What is in memory between the passes, besides what is static."""
        return kept_bytes(self.captured.graph, self._schedule)

    def interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What AOTAutograd sees of the two passes."""
        return partition.interface(self.module, self.captured, self._slots, forward_outputs=self.outputs)

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
        number = args.pop(len(self._slots)).shape[0]
        return self._passes[number][1](args)

    # AOTAutograd hands over its arguments in a list that the callee empties.
    forward._boxed_call = True  # type: ignore[attr-defined]
    backward._boxed_call = True  # type: ignore[attr-defined]
