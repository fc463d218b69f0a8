"""Lowering of kernel launches to ops and tensors, and to the program that executes them.

Sizes of what external kernels allocate are known only after they have run once. A saved tensor is found by its name in both
halves, not by its position: results of the forward pass and inputs of the backward pass are not always in the same order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from planner.capture.kernels.halves import Half, Halves
from planner.capture.kernels.merge import Group, group_launches
from planner.capture.kernels.wrapper import Launch, Value, Wrapper
from planner.capture.lowering.lower import Capture, build_graph
from planner.capture.lowering.statics import StaticTensors, format_dtype
from planner.capture.program.program import Argument, Call, OpCalls, Program, Ref, Statement, map_leaves, read_by
from planner.capture.rewrites.convolutions import is_chosen_by_timing, warn_not_recomputed
from planner.capture.rewrites.outputs import check_outputs, choose_memory_format, is_layout_kept
from planner.capture.signature import Signature
from planner.graphs.errors import TraceError
from planner.graphs.ir import Kind, Op, Phase, Tensor
from planner.graphs.provenance import Provenance
from planner.torch_private import capture as private


def lower_step(
    halves: Halves,
    statics: StaticTensors,
    signature: Signature,
    *,
    generator: torch.Generator,
    provenance: Provenance,
) -> Capture:
    """Return a whole step as ops, each one or several launches of kernels.

    Raises:
        TraceError: the graph is no training step, or Inductor's code contains something that no static graph can hold.
    """
    check_outputs(halves.joint.graph_module.graph)
    lowering = _KernelLowering(halves, statics, generator)
    (loss, *extras), gradients = lowering.read_step()
    # A saved output would keep itself alive through its own backward pass.
    detached = [Call("detach", (extra,)) for extra in extras]
    return lowering.finish([loss, *detached], gradients, signature, provenance)


def lower_graph(
    halves: Halves,
    statics: StaticTensors,
    signature: Signature,
    *,
    generator: torch.Generator,
) -> Capture:
    """Return one graph of a model that is compiled to several, as in ``lower_step``.

    Its program returns what AOTAutograd expects: all results of the forward pass except saved tensors, the first in place of a
    loss; and a value, or None, for each output of the backward pass.
    """
    lowering = _KernelLowering(halves, statics, generator)
    forward, saved = lowering.read_forward()
    backward = lowering.read_backward(saved)
    returned = [value for desc, value in forward if not isinstance(desc, private.SavedForBackwardsAOTOutput)]
    return lowering.finish(returned, [(-1, value) for _, _, value in backward], signature, Provenance())


class _KernelLowering:
    def __init__(self, halves: Halves, statics: StaticTensors, generator: torch.Generator) -> None:
        self.halves = halves
        self.statics = statics
        self.wrapper = Wrapper()
        self.generator = generator
        self.constants: dict[str, torch.Tensor] = {}
        self.static: dict[int, int] = {}  # static values, and their tensors
        self.known: dict[int, Ref] = {}  # static tensors, and their values
        self.tensors = statics.tensors
        self.tensor_of: dict[int, int] = {}  # by number of a value
        placeholders = halves.joint.graph_module.graph.find_nodes(op="placeholder")
        self.inputs: dict[private.AOTInput, torch.Tensor] = {
            node.meta["desc"]: node.meta["val"] for node in placeholders if isinstance(node.meta.get("val"), torch.Tensor)
        }

    def read_forward(self) -> tuple[list[tuple[private.AOTOutput, Argument]], dict[str, Argument]]:
        """Read the forward pass; return its results, and by name the values that it may save."""
        half = self.halves.forward
        inputs = [self._lower_input(desc) for _, desc in half.inputs]
        made = self._read(half, inputs, Phase.FORWARD)
        saved = {name: value for (name, _), value in zip(half.inputs, inputs, strict=True) if value is not None}
        saved |= {name: value for (name, _, _), value in zip(half.outputs, made, strict=True) if name is not None}
        return [(desc, value) for (_, desc, _), value in zip(half.outputs, made, strict=True)], saved

    def read_backward(self, saved: Mapping[str, Argument]) -> list[tuple[private.AOTOutput, torch.Tensor | None, Argument]]:
        """Read the backward pass; return its results."""
        half = self.halves.backward
        # A saved parameter may be a copy in another layout, which kernels of this pass rely on.
        inputs = [saved[name] if name in saved else self._get_incoming(name, desc) for name, desc in half.inputs]
        made = self._read(half, inputs, Phase.BACKWARD)
        return [(desc, fake, value) for (_, desc, fake), value in zip(half.outputs, made, strict=True)]

    def read_step(self) -> tuple[list[Argument], list[tuple[int, Argument]]]:
        """Read both passes; return the results for the caller, and the gradients with their static tensors."""
        forward, saved = self.read_forward()
        returned = []
        for desc, value in forward:
            if isinstance(desc, private.PlainAOTOutput):
                returned.append(value)
            elif isinstance(desc, private.InputMutationAOTOutput):
                self._write_back(desc.mutated_input, value)
            elif not isinstance(desc, private.SavedForBackwardsAOTOutput):
                raise TraceError(f"the step returns {desc!r}, a kind of output that is not supported: return plain tensors")
        gradients: list[tuple[int, Argument]] = []
        taken = set(self.static)
        for output, fake, value in self.read_backward(saved):
            if isinstance(output, private.GradAOTOutput) and fake is not None:
                given = self.inputs[output.grad_of]
                (owner,) = read_by(value)
                own = value if owner not in taken and is_layout_kept(fake, given) else self._add_clone(value, given)
                taken.update(read_by(own))
                gradients.append((self.statics.find(output.grad_of), own))
        return returned, gradients

    def finish(
        self,
        returned: Sequence[Argument],
        gradients: Sequence[tuple[int, Argument]],
        signature: Signature,
        provenance: Provenance,
    ) -> Capture:
        """Return the captured graph and program; `gradients` as in ``Program``, with numbers of values."""
        groups = group_launches(self.wrapper.launches, self.static)
        self.tensor_of |= self.static
        ops, calls = self._build_ops(groups)
        loss, *extras = map(self._renumber, returned)
        program = Program(
            calls=tuple(calls),
            sources=tuple(self.statics.sources),
            loss=loss,
            extras=tuple(extras),
            gradients=tuple((tensor, self._renumber(value)) for tensor, value in gradients),
            constants=self.constants,
            generator=self.generator,
            guard=self.wrapper.guard,
            aligned=self._find_aligned(ops),
            names=self.wrapper.names,
        )
        return Capture(build_graph(ops, self.tensors, program, provenance), program, signature, (None,) * len(ops))

    def _read(self, half: Half, inputs: Sequence[Argument | None], phase: Phase) -> list[Argument]:
        constants = {}
        for name, value in half.constants.items():
            known_as = f"{phase}_{name}"
            self.constants[known_as] = value
            constants[name] = self._add_static(self.statics.add(Kind.CONSTANT, known_as, value))
        return self.wrapper.read(half.source, half.namespace, inputs, constants, phase)

    def _lower_input(self, desc: private.AOTInput | None) -> Argument | None:
        """Return the value of an input of the joint graph; None if it is no tensor."""
        if desc not in self.inputs:
            return None
        if isinstance(desc, private.TangentAOTInput):
            return self._add_static(self.statics.add_tangent(self.inputs[desc]))
        return self._add_static(self.statics.find(desc))

    def _add_static(self, tensor: int) -> Ref:
        if tensor not in self.known:
            self.known[tensor] = self.wrapper.add_value(Value())
            self.static[self.known[tensor].tensor] = tensor
        return self.known[tensor]

    def _get_incoming(self, name: str, desc: private.AOTInput | None) -> Argument | None:
        if not isinstance(desc, private.TangentAOTInput):
            raise TraceError(f"Inductor's backward pass reads {name!r}, which its forward pass does not return")
        return self._lower_input(desc)

    def _write_back(self, desc: private.AOTInput, value: Argument) -> None:
        """Add the write of a new value to an input that the step changes."""
        target = self._add_static(self.statics.find(desc))
        write, read = Statement(Call("copy_", (target, value))), {target.tensor, *read_by(value)}
        self.wrapper.launches.append(Launch("aten.copy_.default", Phase.FORWARD, [write], reads=read, writes={target.tensor}))

    def _add_clone(self, value: Argument, given: torch.Tensor) -> Argument:
        """Return `value` cloned to its own storage, in the layout of a gradient of `given`."""
        made = self.wrapper.add_value(Value(tuple(given.shape), format_dtype(given.dtype)))
        copy = Statement(Call("clone", (value,), {"memory_format": choose_memory_format(given)}), ((made.tensor, ()),))
        launch = Launch("aten.clone.default", Phase.BACKWARD, [copy], makes=[made.tensor], reads=set(read_by(value)))
        self.wrapper.launches.append(launch)
        return made

    def _build_ops(self, groups: Sequence[Group]) -> tuple[list[Op], list[OpCalls]]:
        written = {value for group in groups for value in group.writes if value in self.static}
        names = _build_unique_names(groups)
        followed = {i for group in groups for i in group.follows}
        marks: dict[int, int] = {}  # tensors that mark an op as done
        ops, calls, timed = [], [], 0
        for i, (group, name) in enumerate(zip(groups, names, strict=True)):
            chosen = any(is_chosen_by_timing(launch.target, self.statics.device) for launch in group.launches)
            timed += chosen
            makes = sorted(group.makes)
            for number, value in enumerate(makes):
                about = self.wrapper.values[value]
                self.tensor_of[value] = self._add_tensor(i, f"{name}[{number}]", about.shape, about.dtype)
            statements = [
                Statement(self._renumber(statement.value), tuple((self.tensor_of[v], path) for v, path in statement.outputs))
                for launch in group.launches
                for statement in launch.statements
            ]
            outputs = [self.tensor_of[value] for value in makes]
            if i in followed:
                marks[i] = self._add_tensor(i, f"{name}.done", (), "")
                statements.append(Statement(None, ((marks[i], ()),)))
                outputs.append(marks[i])
            read = dict.fromkeys(self.tensor_of[v] for v in sorted(group.reads | group.writes))
            ops.append(
                Op(
                    id=i,
                    name=name,
                    target=group.launches[-1].target,
                    inputs=(*read, *(marks[j] for j in sorted(group.follows))),
                    outputs=tuple(outputs),
                    time_s=0.0,
                    phase=group.launches[-1].phase,
                    # Readers of memory that the step overwrites are valid only before the write.
                    recomputable=not (group.once or group.random or chosen or written.intersection(group.reads | group.writes)),
                    random=group.random,
                    mutates=tuple(self.static[v] for v in sorted(group.writes) if v in self.static),
                )
            )
            over = ((self.tensor_of[made], self.tensor_of[read], self._renumber(call)) for made, read, call in group.over)
            calls.append(OpCalls(tuple(statements), over=tuple(over), launches=True))
        if timed:
            warn_not_recomputed(timed)
        return ops, calls

    def _find_aligned(self, ops: Sequence[Op]) -> frozenset[int]:
        """Return the static tensors that CUDA kernels expect to start at a multiple of 16 bytes, as in Inductor's own code."""
        if self.statics.device.type != "cuda":
            return frozenset()
        written = {t for op in ops for t in op.mutates}
        read = {t for op in ops for t in op.inputs} & {source.tensor for source in self.statics.sources}
        return frozenset(read - written)

    def _add_tensor(self, op: int, name: str, shape: tuple[int, ...], dtype: str) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, 0, (op,), Kind.ACTIVATION, shape, dtype))
        return len(self.tensors) - 1

    def _renumber(self, value: Argument) -> Argument:
        """Return `value` with ids of tensors in place of numbers of values."""
        return map_leaves(value, lambda leaf: Ref(self.tensor_of[leaf.tensor]) if isinstance(leaf, Ref) else leaf)


def _build_unique_names(groups: Sequence[Group]) -> list[str]:
    """Return a unique name for each op: the target of its last launch, with a number for repetitions."""
    seen: Counter[str] = Counter()
    names = []
    for group in groups:
        target = group.launches[-1].target
        seen[target] += 1
        names.append(target if seen[target] == 1 else f"{target}.{seen[target]}")
    return names
