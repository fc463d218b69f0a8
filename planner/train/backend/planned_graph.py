"""A joint graph between AOTAutograd and its plan, which may be replaced while the model trains.

AOTAutograd compiles a forward and a backward module once, with a fixed number of saved tensors. A planned graph has a slot for
each tensor that any plan may save, and one that identifies the plan of the forward pass: a backward pass follows the plan of its
own forward pass, even if that plan was replaced meanwhile.

Why slots: AOTAutograd cannot be told that another plan saves other tensors. One more saved tensor has the number of the plan as
its shape, and what AOTAutograd does not know (tensors on the host, copies in progress) attached to its storage: autograd keeps
that as long as a backward pass may follow, and no longer.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import format_dtype
from planner.capture.program.program import Program
from planner.capture.rewrites.outputs import get_fake, get_storage, list_outputs, list_tensors
from planner.capture.source_lines import format_node
from planner.graphs.errors import PlannerError
from planner.graphs.ir import Graph, Kind, Phase
from planner.graphs.overwriting import find_overwritten_saved
from planner.graphs.pools import COMPUTE, HOST
from planner.graphs.schedule import Schedule, count_kept_bytes
from planner.graphs.short_tracebacks import warn_caller
from planner.graphs.simulate import simulate
from planner.graphs.units import UNLIMITED_BYTES
from planner.runtime.arena import Arena
from planner.runtime.changed_inputs import ChangedInputs, Input, keep_copies
from planner.runtime.code import compile_schedule
from planner.runtime.devices import Devices
from planner.runtime.out_of_memory import ErrorReport, PlannedMemory
from planner.runtime.saved_hooks import warn_of_saved_hooks
from planner.runtime.step_lines import StepLines
from planner.runtime.transfers.channels import HostChannels
from planner.runtime.undo import Rollback
from planner.runtime.unseen_writes import UnseenWrites
from planner.torch_private import capture as private
from planner.torch_private.core import backward_retains_graph, disable_current_modes
from planner.train.backend.joint_capture import lay_out_tangents
from planner.train.backend.outline import Outline

# Both passes empty their argument lists. The last arguments of a backward pass are the non-tensor results of its forward
# pass: tensors on the host, unfinished copies, and the step in an arena.
Forward = Callable[[list[Any]], tuple[list[Any], list[Any]]]
Backward = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward and the backward pass of one plan.

    Attributes:
        changed_inputs: the tensors that are written between them.
    """

    forward: Forward
    backward: Backward
    lines: StepLines
    changed_inputs: ChangedInputs


_Strides = tuple[tuple[int, ...] | None, ...]
_MOST_LAYOUTS = 8  # others are read as AOTAutograd gives them, such as parts of a tensor that grows from step to step
_MANY_LAYOUTS = (
    "the gradient of what {} returns is laid out otherwise in each of many steps, such as a part of a tensor that grows: plans "
    "follow {} layouts, and with others sums over it may differ from eager PyTorch's in the last bit ({})"
)
_NOT_LAID_OUT = (
    "gradients of results are laid out otherwise than the results, and {} cannot read them so, because an option changes these "
    "ops: sums over them may differ from eager PyTorch's in the last bit ({}). Leave out the option 'in-place' or 'chunks'"
)


class PlannedGraph:
    """A graph of a compiled model.

    Attributes:
        eager: the same graph with eager PyTorch's kernels, if it runs Inductor's kernels and the budget is a share of its peak.
        tangents: static tensors that are gradients of its outputs.
        outputs: number of results of the forward pass, without saved tensors.
        without_gradient: positions of the inputs that require a gradient and get none, if others get one.
        slots: the tensor of each slot: all tensors that some schedule may save.
        outline: of the graph that Dynamo has captured; None with Inductor's kernels.
        input_names: names of its inputs in the user's code, by tensor.
        check_writes: True to detect writes to inputs that autograd does not see.
        laid_out: its capture with room for gradients as eager PyTorch lays them out, to be planned again; or None.
        provisional: True if its plan keeps as little as it can, because the graphs of its step were not known.
        room_bytes: what a plan may take that is provisional or alone in its step; 0 for others.
        arena: the arena of the passes of all graphs of a step; None for PyTorch's allocator.
        watch: called with the inputs of a forward pass; returns a function of its results and of a tensor that dies with the
            saved ones.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        captured: Capture,
        channels: HostChannels | None,
        arena: Arena | None,
        *,
        outputs: int,
    ) -> None:
        """Initialize with the capture and the joint graph `module`."""
        placeholders = module.graph.find_nodes(op="placeholder")
        self.device = get_graph_device(module)
        self._module, self._devices = module, Devices(captured.graph, self.device, channels)
        later = private.TangentAOTInput | private.BackwardTokenAOTInput
        self._primals = [node for node in placeholders if not isinstance(node.meta["desc"], later)]
        self._incoming = [node for node in placeholders if isinstance(node.meta["desc"], later)]
        static = {source.name: source.tensor for source in captured.program.sources if source.kind is Kind.INPUT}
        self.captured = captured
        self.eager: Graph | None = None
        self.tangents = tuple(static[node.name] for node in self._incoming if node.name in static)
        self.outputs = outputs
        self.without_gradient = _find_without_gradient(module.graph)
        self._results = _find_results(self._incoming, module.graph, outputs)
        self._leading = _find_leading_outputs(module.graph, outputs, self._results)
        self._strides: _Strides | None = None  # of the gradients of results in the present backward pass
        self._layouts: dict[_Strides, Capture] = {}  # by the strides that were seen
        self._laid_out: dict[_Strides, Passes] = {}  # of the last plan
        self._said = set[str]()  # warnings of layouts that plans do not follow
        self.laid_out: Capture | None = None
        self._plain = captured  # where gradients are laid out as the results are
        self.room_bytes = 0
        self.slots = (*(static[node.name] for node in self._primals if node.name in static), *_list_made_forward(captured.graph))
        self._slot = {t: i for i, t in enumerate(self.slots)}
        self.outline: Outline | None = None
        self.input_names: Mapping[int, str] = {}
        self.check_writes = False
        self.provisional = False
        self.arena = arena
        self.watch: Callable[[list[Any]], Callable[[list[Any], torch.Tensor], None]] | None = None
        self._arena_key = object()
        self._handing_over: set[int] = set()  # plans whose forward passes return more than tensors
        self._writing_over: set[int] = set()  # plans whose backward passes overwrite saved tensors
        self._passes: list[Passes] = []

    def list_static(self, inputs: Sequence[object], outputs: Sequence[object]) -> list[torch.Tensor | None]:
        """Return static tensors without memory, like those of a pass with these inputs and outputs; None for what they lack."""
        like: dict[str, object] = {}
        for node in (*self._primals, *self._incoming):
            match node.meta["desc"]:
                case private.PlainAOTInput(idx=index):
                    like[node.name] = inputs[index]
                case private.TangentAOTInput(output=private.PlainAOTOutput(idx=index)):
                    like[node.name] = outputs[index]
        found = (like.get(source.name) for source in self.captured.program.sources)
        with disable_current_modes():
            return [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if isinstance(t, torch.Tensor) else None
                for t in found
            ]

    def build_passes(self, schedule: Schedule, program: Program) -> Passes:
        """Return the two passes of `schedule`, whose saved tensors fill `slots`; slots of tensors that are not saved hold None.

        The forward pass returns values unknown to AOTAutograd separately.
        """
        graph = self.captured.graph
        code = compile_schedule(graph, program, schedule, self._devices, static_given_up=True)
        # With copies, the forward pass also returns the tensors that a failed backward pass needs to be undone.
        compiled = any(calls.launches for calls in program.calls)
        rollback = Rollback.of(graph, program, in_backward=compiled and bool(self._devices.channels))
        code = code.wrap_in_stages(None if self.arena is None else self.arena.build_stage(self._arena_key), rollback)
        position = self._slot
        among = [t in position for t in code.saved]  # others are on the host
        later = [i for i, reads in enumerate(code.backward_reads) if reads]

        def forward(args: list[Any]) -> tuple[list[Any], list[Any]]:
            static = self._select_static(self._primals, args)
            args.clear()
            saved = {program.sources[i].tensor: static[i] for i in later}
            first, others, alive = code.forward(static)
            saved |= zip(code.saved, alive, strict=False)
            apart = [value for value, known in zip(alive, among, strict=False) if not known] + alive[len(among) :]
            return [first, *others, *(saved.get(t) for t in self.slots)], apart

        def backward(args: list[Any]) -> Any:
            here = len(self.slots) + len(self._incoming)
            static = self._select_static(self._incoming, args[len(self.slots) : here])
            for i in later:
                if (t := program.sources[i].tensor) in position:
                    static[i] = args[position[t]]
            apart = deque(args[here:])
            alive = [args[position[t]] if known else apart.popleft() for t, known in zip(code.saved, among, strict=True)]
            alive += apart
            args.clear()
            apart.clear()
            return code.backward(static, alive)

        read = [program.sources[i].tensor for i in later if program.sources[i].tensor in position]
        changed = ChangedInputs(graph, [t for t in read if t not in self.tangents], self.captured.copied)
        return Passes(forward, backward, code.lines, changed)

    def _select_static(self, nodes: Sequence[fx.Node], given: Sequence[Any]) -> list[Any]:
        """Return the static tensors of a pass whose inputs `nodes` are `given`; None for those that are not among them."""
        program = self.captured.program
        known = {node.name: value for node, value in zip(nodes, given, strict=True)} | dict(program.constants)
        return [known.get(source.name) for source in program.sources]

    def build_interface(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the two passes as AOTAutograd sees them: inputs and outputs. The saved tensors end with the slot of the plan."""
        returned = list_outputs(self._module.graph)
        forward = fx.Graph()
        primals = [forward.node_copy(node) for node in self._primals]
        by_name = {node.name: node for node in primals}
        some = next(node for node in primals if isinstance(node.meta.get("val"), torch.Tensor))
        names = {source.tensor: source.name for source in self.captured.program.sources}
        made = [_create_node_like(forward, value) for value, _ in returned[: self.outputs]]
        saved = [by_name[names[t]] if t in names else _create_node_like(forward, some) for t in self.slots]
        output = forward.output([*made, *saved, _create_node_like(forward, some)])
        output.meta["desc"] = [
            *(desc for _, desc in returned[: self.outputs]),
            *(private.SavedForBackwardsAOTOutput(i) for i in range(len(saved) + 1)),
        ]
        backward = fx.Graph()
        for i in range(len(saved) + 1):
            backward.placeholder(f"saved_{i}").meta = {"val": some.meta["val"]}
        for node in self._incoming:
            backward.node_copy(node)
        gradients = [_create_node_like(backward, value) for value, _ in returned[self.outputs :]]
        backward.output(gradients).meta["desc"] = [desc for _, desc in returned[self.outputs :]]
        return fx.GraphModule(self._module, forward), fx.GraphModule(self._module, backward)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next forward passes."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        if find_overwritten_saved(self.captured.graph, schedule):
            self._writing_over.add(len(self._passes))
        # Passes of earlier plans stay: a backward pass may follow the plan of a forward pass that has run.
        self._passes.append(self.build_passes(schedule, self.captured.program))
        self._laid_out.clear()
        self._schedule, self.provisional, self.room_bytes = schedule, False, 0
        if self.arena is not None:
            self.arena.forget()
        self.copy_inputs(UNLIMITED_BYTES)

    @property
    def has_plan(self) -> bool:
        """True if it has a schedule."""
        return bool(self._passes)

    def plan_provisionally(self, room_bytes: int, schedule: Schedule) -> None:
        """Run by a schedule that keeps as little as it can within `room_bytes`."""
        self.schedule = schedule
        self.provisional, self.room_bytes = True, room_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes in memory between the passes, without static memory."""
        return count_kept_bytes(self.captured.graph, self._schedule)

    @property
    def on_host(self) -> tuple[int, int]:
        """The peak of the host memory that the plan uses, and its host memory between the passes."""
        graph = self.captured.graph
        if graph.plain:
            return 0, 0
        peaks = dict(zip((pool.name for pool in graph.pools), simulate(graph, self._schedule).pool_peaks_bytes, strict=True))
        return peaks[HOST], count_kept_bytes(graph, self._schedule, HOST)

    def forward(self, args: list[Any]) -> list[Any]:
        """Run the forward pass for AOTAutograd; `args` is emptied."""
        warn_of_saved_hooks()
        seen = None if self.watch is None else self.watch(args)
        number = len(self._passes) - 1
        with ErrorReport(self._describe_memory(number), "forward"):
            returned, handed_over = self._passes[number].forward(args)
        slots = returned[self.outputs :]
        unseen = UnseenWrites(self._iterate_inputs(slots)) if self.check_writes else None
        saved_inputs = self._save_inputs(number, slots)
        plan, nothing = torch.empty((number, 0)), torch.empty(0)  # empty in memory, whatever their shape
        if handed_over:
            # Autograd keeps the storage until no backward pass can follow, even if it makes other tensors of it.
            plan.untyped_storage().handed_over = handed_over  # type: ignore[attr-defined]
            self._handing_over.add(number)
        plan.untyped_storage().inputs, plan.untyped_storage().unseen = saved_inputs, unseen  # type: ignore[attr-defined]
        if seen is not None:
            seen(returned[: self.outputs], plan)
        return [*returned[: self.outputs], *(nothing if t is None else t for t in slots), plan]

    def backward(self, args: list[Any]) -> Any:
        """Run the backward pass for AOTAutograd; `args` is emptied.

        Raises:
            PlannerError: hooks have replaced saved tensors, or the backward pass may run again but overwrites saved tensors.
        """
        plan = args.pop(len(self.slots))
        number, handed_over = plan.shape[0], getattr(plan.untyped_storage(), "handed_over", [])
        if not handed_over and number in self._handing_over:
            raise PlannerError(
                "hooks on saved tensors (torch.autograd.graph.save_on_cpu, saved_tensors_hooks) have copied the tensors that a "
                "planned graph saves for its backward pass: leave the hooks out, because the plan decides where saved tensors "
                "are kept"
            )
        if number in self._writing_over and backward_retains_graph():
            raise PlannerError(
                "backward(retain_graph=True) needs tensors that the plan overwrites: leave out retain_graph=True, or the option "
                "'in-place'"
            )
        if is_plan(plan):  # else hooks on saved tensors have copied all
            self._restore_inputs(number, plan.untyped_storage().inputs, args)
        if (unseen := getattr(plan.untyped_storage(), "unseen", None)) is not None:
            unseen.check(tensor for _, tensor in self._iterate_inputs(args))
        args += handed_over
        del plan, handed_over  # frees tensors on the host, unless the backward pass may run again
        with ErrorReport(self._describe_memory(number), "backward"):
            return self._choose_passes(number).backward(args)

    @property
    def changed(self) -> frozenset[int]:
        """The inputs that were written between the passes, and whose copies the plan does not count."""
        return frozenset(self._passes[-1].changed_inputs.changed) - self.captured.copied

    def format_names(self, tensors: Iterable[int]) -> str:
        """Return the names of inputs."""
        return ", ".join(self.input_names[t] for t in sorted(tensors))

    def copy_inputs(self, room_bytes: int) -> int:
        """Copy inputs between the next two passes, in case they change, within the plan's peak; return what room is left."""
        if self.arena is not None:
            return room_bytes
        graph = self.captured.graph
        own_bytes = simulate(graph, self._schedule).peak_bytes - graph.static_bytes - self.kept_bytes
        allowed_bytes = min(own_bytes, room_bytes)
        return room_bytes - allowed_bytes + self._passes[-1].changed_inputs.begin(allowed_bytes)

    def list_copies(self, plan: torch.Tensor) -> list[torch.Tensor]:
        """Return the copies of inputs that a forward pass has taken beside its plan; `plan` is the last of its results."""
        taken = getattr(plan.untyped_storage(), "inputs", ())
        return [given.copy for given in taken if given.copy is not None and given.tensor not in self.captured.copied]

    def count_copies(self) -> None:
        """Keep copies of changed inputs for the backward pass, and count them: the graph must be planned again."""
        plain, self._plain = self._plain, keep_copies(self._plain, self.changed)
        self.captured = self._plain if self.captured is plain else keep_copies(self.captured, self.changed)

    def read_laid_out(self) -> None:
        """Let the next plans have room for gradients as they lie in eager PyTorch."""
        self.captured, self.laid_out = self.laid_out or self.captured, None

    def read_as_results(self) -> bool:
        """Let the next plans have room for gradients in the layouts of the results only; False if they do."""
        plans_change, self.captured = self.captured is not self._plain, self._plain
        return plans_change

    def follow_layouts(self, incoming: Sequence[object]) -> None:
        """Let the next backward pass read gradients as they lie in eager PyTorch, if its plan has room for copies.

        Otherwise ``laid_out`` is set. `incoming` are the gradients of the results; None where the loss does not read one.
        """
        self._strides = strides = tuple(value.stride() if isinstance(value, torch.Tensor) else None for value in incoming)
        if strides in self._layouts or _MANY_LAYOUTS in self._said or len(incoming) != self.outputs:
            return
        given = {node: strides[i] for node, i in self._results.items()}
        laid_out = [node for node, strides in given.items() if strides not in (None, get_fake(node).stride())]
        if len(self._layouts) == _MOST_LAYOUTS:
            self._said.add(_MANY_LAYOUTS)
            warn_caller(_MANY_LAYOUTS.format(self._name_results(laid_out), _MOST_LAYOUTS, self.rounding))
            return
        plain, known, graph = self._plain, self.laid_out or self.captured, self.captured.graph
        layout, others = lay_out_tangents(self._module.graph, plain, given) if plain.values else (plain, [])
        if others and _NOT_LAID_OUT not in self._said:
            self._said.add(_NOT_LAID_OUT)
            readers = ", ".join(dict.fromkeys(f"{node.name} ({format_node(node)})" for node in others))
            warn_caller(_NOT_LAID_OUT.format(readers, self.rounding))
        self._layouts[strides] = layout
        most_bytes = [max(a.workspace_bytes, b.workspace_bytes) for a, b in zip(known.graph.ops, layout.graph.ops, strict=True)]
        ops = (replace(op, workspace_bytes=n) for op, n in zip(known.graph.ops, most_bytes, strict=True))
        captured = replace(known, graph=replace(known.graph, ops=tuple(ops)))
        if captured.graph == known.graph:
            return
        room_bytes = max(self.room_bytes, simulate(graph, self._schedule).peak_bytes)
        if self.arena is None and simulate(captured.graph, self._schedule).peak_bytes <= room_bytes:
            self.captured = captured
            return
        self.laid_out = captured
        warn_caller(
            f"the gradient of what {self._name_results(laid_out)} returns is laid out otherwise "
            "than the result: gradients of this step that are sums over it may differ from eager PyTorch's in the last bit "
            f"({self.rounding}). The next steps are planned for its layout"
        )

    @property
    def rounding(self) -> str:
        """The size of a rounding in the types of the gradients of results."""
        return describe_rounding(node.meta["val"].dtype for node in self._results)

    def _name_results(self, tangents: Iterable[fx.Node]) -> str:
        """Return the lines that make the results whose gradients are `tangents`."""
        results = [list_outputs(self._module.graph)[self._results[node]][0] for node in tangents]
        return ", ".join(sorted({format_node(result) for result in results if isinstance(result, fx.Node)}))

    def _choose_passes(self, number: int) -> Passes:
        """Return the passes of the plan `number`, which read gradients as they now lie if that plan is the last and has room."""
        strides, self._strides = self._strides, None
        layout = None if strides is None else self._layouts.get(strides)
        if strides is None or layout is None or number != len(self._passes) - 1:
            return self._passes[number]
        if strides not in self._laid_out:
            pairs = zip(layout.graph.ops, self.captured.graph.ops, strict=True)
            is_plain = layout.program is self.captured.program or any(a.workspace_bytes > b.workspace_bytes for a, b in pairs)
            passes = self._passes[-1] if is_plain else self.build_passes(self._schedule, layout.program)
            self._laid_out[strides] = passes
        return self._laid_out[strides]

    def _save_inputs(self, number: int, slots: list[Any]) -> Sequence[Input]:
        """Replace the inputs in `slots` that are only read to recompute, so that autograd does not mind if they are written."""
        changed = self._passes[number].changed_inputs
        saved = changed.save(lambda t: slots[self._slot[t]])
        for given in saved:
            slots[self._slot[given.tensor]] = given.value.data if given.copy is None else given.copy
        return saved

    def _restore_inputs(self, number: int, saved: Sequence[Input], args: list[Any]) -> None:
        """Give the backward pass the inputs as the forward pass has read them."""
        changed = self._passes[number].changed_inputs
        values = changed.restore(saved, lambda t: self.format_names([t]))
        for t, value in zip(changed.recomputed_from, values, strict=True):
            args[self._slot[t]] = value

    def _iterate_inputs(self, saved: Sequence[torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the inputs to be checked with their names, from the `saved` tensors in the slots."""
        for t, value in zip(self.slots, saved, strict=False):
            if t in self.input_names and value is not None and tuple(value.shape) == self.captured.graph.tensors[t].shape:
                yield self.input_names[t], value

    def drop_unread(self, gradients: Sequence[object], incoming: Sequence[object]) -> tuple[object, ...] | None:
        """Return `gradients` without those that lead only to results which have no gradient themselves, as autograd would.

        Args:
            gradients: those that the backward pass has computed, in the order of its outputs; AOTAutograd makes zeros of missing
                ones before.
            incoming: the gradients of the results; None where the loss does not read a result.

        Returns:
            The gradients; None if all stay, or if AOTAutograd has other inputs or results than the graph.
        """
        if (len(gradients), len(incoming)) != (len(self._leading), self.outputs) or all(g is not None for g in incoming):
            return None
        return tuple(
            None if leading and all(incoming[j] is None for j in leading) else gradient
            for gradient, leading in zip(gradients, self._leading, strict=True)
        )

    def _describe_memory(self, number: int) -> PlannedMemory:
        """Return a description of the memory of the plan `number`, for out-of-memory errors."""
        return PlannedMemory(
            self.captured.graph,
            self._passes[number].lines,
            self.captured.program.calls,
            self._devices.places.__getitem__,
            afterwards="Parameters are unchanged, and no gradient of this graph has been written.",
        )

    # AOTAutograd passes arguments in a list that the callee empties.
    forward._boxed_call = True  # type: ignore[attr-defined]
    backward._boxed_call = True  # type: ignore[attr-defined]


def is_plan(saved: torch.Tensor) -> bool:
    """Return True if a planned graph has saved this tensor to know the plan of its forward pass."""
    return hasattr(saved.untyped_storage(), "inputs")


def _list_made_forward(graph: Graph) -> list[int]:
    """Return the tensors on the device that are made by ops of the forward pass, or only by optional ops."""
    made = dict.fromkeys(t for op in graph.program if op.phase is Phase.FORWARD for t in op.outputs)
    later = {t for op in graph.program if op.phase is not Phase.FORWARD for t in op.outputs}
    optional = [t for op in graph.ops if op.optional and op.stream == COMPUTE for t in op.outputs if t not in later]
    return list(made | dict.fromkeys(optional))


def _find_without_gradient(joint: fx.Graph) -> list[int]:
    """Return the positions of the inputs that require a gradient, get none, and share no memory with an output.

    None if no input gets a gradient: the outputs have to require one all the same, as in eager PyTorch.
    """
    nodes = [
        node for node, desc in list_outputs(joint) if isinstance(node, fx.Node) and not isinstance(desc, private.GradAOTOutput)
    ]
    returned = {get_storage(value) for node in nodes for value in list_tensors(node.meta["val"])}
    inputs = {node.meta["desc"]: node.meta["val"] for node in joint.find_nodes(op="placeholder")}
    gradients = [(value, desc.grad_of) for value, desc in list_outputs(joint) if isinstance(desc, private.GradAOTOutput)]
    missing = [desc for value, desc in gradients if value is None]
    if len(missing) == len(gradients):
        return []
    return [desc.idx for desc in missing if isinstance(desc, private.PlainAOTInput) and get_storage(inputs[desc]) not in returned]


def _find_results(incoming: Iterable[fx.Node], joint: fx.Graph, forward_outputs: int) -> dict[fx.Node, int]:
    """Return, for each of the `incoming` gradients, the output of the forward pass that it belongs to."""
    position = {desc: i for i, (_, desc) in enumerate(list_outputs(joint)[:forward_outputs])}
    descs = {node: node.meta["desc"] for node in incoming if isinstance(node.meta["desc"], private.TangentAOTInput)}
    return {node: position[desc.output] for node, desc in descs.items() if desc.output in position}


def _find_leading_outputs(joint: fx.Graph, forward_outputs: int, results: Mapping[fx.Node, int]) -> list[frozenset[int]]:
    """Return, for each output of the backward pass, the outputs of the forward pass whose gradients it is computed from."""
    leading: dict[object, frozenset[int]] = {}
    for node in joint.nodes:
        if node.op == "placeholder":
            leading[node] = frozenset({results[node]} if node in results else ())
        else:
            leading[node] = frozenset().union(*(leading[each] for each in node.all_input_nodes))
    return [leading.get(value, frozenset()) for value, _ in list_outputs(joint)[forward_outputs:]]


def _create_node_like(graph: fx.Graph, value: object) -> fx.Node | None:
    """Return a node with the metadata of a tensor like `value`; None if `value` is no tensor."""
    if not isinstance(value, fx.Node):
        return None
    node = graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
    node.meta = {"val": value.meta["val"]}
    return node


def describe_rounding(dtypes: Iterable[torch.dtype]) -> str:
    """Return how much one addition of a sum may be rounded otherwise, in each of the floating-point `dtypes`."""
    floating = sorted({dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}, key=str)
    sizes = (f"{torch.finfo(dtype).eps / 2:.0e} of it in {format_dtype(dtype)}" for dtype in floating)
    return f"each addition of a sum is rounded by at most {', '.join(sizes)}"


def get_graph_device(joint: fx.GraphModule) -> torch.device:
    """Return the device that a joint graph runs on."""
    values = (node.meta["val"] for node in joint.graph.find_nodes(op="placeholder"))
    return next(value.device for value in values if isinstance(value, torch.Tensor))
