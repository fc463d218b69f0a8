"""A joint graph between AOTAutograd and its plan, which may be replaced by another one while the model trains.

AOTAutograd compiles a forward and a backward module once, with as many saved tensors as they have. Here there is a place
for each tensor that any plan may save, and one that says by which plan the forward pass ran: a backward pass runs by the
plan of its own forward pass, whatever came after.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphs.errors import PlannerError
from graphs.ir import Graph
from graphs.overwriting import overwritten_saved_tensors
from graphs.pools import HOST
from graphs.schedule import Schedule
from graphs.simulate import simulate
from planner.capture.lowering.lower import Capture
from planner.capture.rewrites.reproducible_random import generator_of
from planner.runtime.channels import Channels
from planner.runtime.out_of_memory import PlannedMemory
from planner.runtime.random_state import RandomState
from planner.runtime.step_lines import StepLines
from planner.runtime.unseen_writes import UnseenWrites
from planner.torch_compile import partition
from planner.torch_compile.rest_of_step import kept_bytes
from planner.torch_private.capture import boxed_nop
from planner.torch_private.core import backward_retains_graph

# Both empty the list of their arguments, of which the last ones of a backward pass are what its forward pass has handed
# over besides tensors: what is on the host, and copies that may be under way.
Forward = Callable[[list[Any]], tuple[list[Any], list[Any]]]
Backward = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward and the backward pass by one plan.

    Attributes:
        forward, backward: the passes.
        lines: of the code that runs them.
    """

    forward: Forward
    backward: Backward
    lines: StepLines


class PlannedGraph(ABC):
    """One of the graphs of a compiled model.

    Attributes:
        captured: what is planned of it.
        eager: the same as eager PyTorch runs it, where it is planned with other kernels and a budget is a share of its peak.
        tangents: its static tensors that are gradients of its outputs.
        outputs: how many tensors the forward pass returns besides what it saves.
        slots: a tensor for each place among what is saved.
        checked: by tensor, names of inputs that are looked at for writes that autograd does not see.
        lean: a schedule that keeps little between the passes; None as long as none was looked for.
        watch: called with what a forward pass gets; returns what is to be called with what it returns, and with the
            tensor that dies with what it saves.
    """

    def __init__(
        self, captured: Capture, device: torch.device, *, tangents: Sequence[int], slots: Sequence[int], outputs: int
    ) -> None:
        self.captured = captured
        self._device = device
        self.eager: Graph | None = None
        self.tangents = tuple(tangents)
        self.outputs = outputs
        self.slots = tuple(slots)
        self.checked: Mapping[int, str] = {}
        self.lean: Schedule | None = None
        self.watch: Callable[[list[Any]], Callable[[list[Any], torch.Tensor], None]] | None = None
        self._handing_over: set[int] = set()  # plans whose forward passes hand over more than tensors
        self._writing_over: set[int] = set()  # plans whose backward passes write over what was saved for them
        self._passes: list[Passes] = []

    @abstractmethod
    def passes(self, schedule: Schedule) -> Passes:
        """The two passes by `schedule`: with what is saved, None for what is not, in place of `slots`.

        The forward pass returns what it hands over apart from what AOTAutograd knows of.
        """

    @abstractmethod
    def interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What AOTAutograd sees of the two passes: among what is saved is one more at the end."""

    @property
    def schedule(self) -> Schedule:
        """Of the forward passes to come."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        if overwritten_saved_tensors(self.captured.graph, schedule):
            self._writing_over.add(len(self._passes))
        self._passes.append(self.passes(schedule))
        self._schedule = schedule

    @property
    def kept_bytes(self) -> int:
        """What is in memory between the passes, besides what is static."""
        return kept_bytes(self.captured.graph, self._schedule)

    @property
    def on_host(self) -> tuple[int, int]:
        """Most that the plan takes of the host's memory, and what it takes between the passes."""
        graph = self.captured.graph
        if graph.plain:
            return 0, 0
        peaks = dict(zip((pool.name for pool in graph.pools), simulate(graph, self._schedule).pool_peaks_bytes, strict=True))
        return peaks[HOST], kept_bytes(graph, self._schedule, HOST)

    def forward(self, args: list[Any]) -> list[Any]:
        """A forward pass as AOTAutograd calls it; empties `args`."""
        seen = None if self.watch is None else self.watch(args)
        number = len(self._passes) - 1
        try:
            returned, handed_over = self._passes[number].forward(args)
        except Exception as error:
            self._memory(number).raise_if_out_of_memory(error, "forward")
            raise
        plan, nothing = torch.empty((number, 0)), torch.empty(0)  # take no memory, whatever a shape says
        if handed_over:
            # Autograd holds the storage for as long as a backward pass may come, whichever tensors it makes of it.
            plan.untyped_storage().handed_over = handed_over  # type: ignore[attr-defined]
            self._handing_over.add(number)
        if self.checked:
            plan.untyped_storage().unseen = UnseenWrites(self._inputs(returned[self.outputs :]))  # type: ignore[attr-defined]
        if seen is not None:
            seen(returned[: self.outputs], plan)
        return [*returned[: self.outputs], *(nothing if t is None else t for t in returned[self.outputs :]), plan]

    def backward(self, args: list[Any]) -> Any:
        """A backward pass as AOTAutograd calls it; empties `args`.

        Raises:
            PlannerError: hooks have put other tensors in the place of those that were saved; or the backward pass is to come
                again, and writes over what it reads.
        """
        plan = args.pop(len(self.slots))
        number, handed_over = plan.shape[0], getattr(plan.untyped_storage(), "handed_over", [])
        if not handed_over and number in self._handing_over:
            raise PlannerError(
                "hooks on saved tensors (torch.autograd.graph.save_on_cpu, saved_tensors_hooks) have copied what a planned graph "
                "saves for its backward pass: leave them out, for the plan says what is kept where"
            )
        if number in self._writing_over and backward_retains_graph():
            raise PlannerError(
                "backward(retain_graph=True) keeps what the plan writes over: leave it out, or the option 'in-place' of the graph"
            )
        if (unseen := getattr(plan.untyped_storage(), "unseen", None)) is not None:
            unseen.check(tensor for _, tensor in self._inputs(args))
        args += handed_over
        del plan, handed_over  # with what is on the host, unless the backward pass may come again
        try:
            return self._passes[number].backward(args)
        except Exception as error:
            self._memory(number).raise_if_out_of_memory(error, "backward")
            raise

    def _inputs(self, saved: Sequence[torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the inputs of the graph that are checked, with their names, among what is `saved` in the places of ``slots``."""
        for t, value in zip(self.slots, saved, strict=False):
            if t in self.checked and value is not None and tuple(value.shape) == self.captured.graph.tensors[t].shape:
                yield self.checked[t], value

    def _memory(self, number: int) -> PlannedMemory:
        """What the plan `number` holds."""
        places = {HOST: torch.device("cpu")}
        return PlannedMemory(
            self.captured.graph,
            self._passes[number].lines,
            lambda pool: places.get(pool, self._device),
            afterwards="Parameters are as before, and no gradient of this graph has been written.",
        )

    # AOTAutograd hands over its arguments in a list that the callee empties.
    forward._boxed_call = True  # type: ignore[attr-defined]
    backward._boxed_call = True  # type: ignore[attr-defined]


class PlannedOps(PlannedGraph):
    """One that runs eager PyTorch's kernels."""

    def __init__(self, module: fx.GraphModule, captured: Capture, channels: Channels | None, *, outputs: int) -> None:
        """Plan for `module`, the joint graph, which was `captured`; with `channels` where it offers copies."""
        tangents, slots = partition.tangents(module, captured), partition.slots(module, captured)
        super().__init__(captured, device_of(module), tangents=tangents, slots=slots, outputs=outputs)
        self._module, self._channels = module, channels
        draws = any(op.random for op in captured.graph.ops)
        self._generator = generator_of(self._device) if draws else None

    def passes(self, schedule: Schedule) -> Passes:
        """See ``PlannedGraph``."""
        first, second = partition.split(
            self._module, self.captured, schedule, self._channels, forward_outputs=self.outputs, slots=self.slots
        )
        run, backward = boxed_nop(first.module, []), boxed_nop(second.module, [])
        known, generator = self.outputs + len(self.slots), self._generator

        def forward(args: list[Any]) -> tuple[list[Any], list[Any]]:
            state = None if generator is None else RandomState.of(generator)
            try:
                returned = run(args)
            except BaseException:
                if generator is not None and state is not None:
                    state.restore(generator)
                raise
            return returned[:known], returned[known:]

        return Passes(forward, backward, StepLines(schedule, first.lines() | second.lines()))

    def interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """See ``PlannedGraph``."""
        return partition.interface(self._module, self.captured, self.slots, forward_outputs=self.outputs)


def device_of(joint: fx.GraphModule) -> torch.device:
    """Return the device that a joint graph runs on."""
    values = (node.meta["val"] for node in joint.graph.find_nodes(op="placeholder"))
    return next(value.device for value in values if isinstance(value, torch.Tensor))
