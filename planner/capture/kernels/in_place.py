"""Which outputs of a kernel of Inductor's may lie where one of its inputs does.

Inductor decides so while it generates a kernel, for inputs that nobody reads afterwards. Who reads what afterwards is for a
schedule to say, so that its decision is replaced: kernels get all their inputs and outputs as arguments of their own, and the
code around them says of which pairs both may be given the same memory.
"""

import ast
import math
from collections.abc import Iterator, Sequence
from typing import Any

from planner.torch_private.inductor import (
    BaseSchedulerNode,
    CppScheduling,
    Dep,
    MemoryDep,
    SchedulerNode,
    V,
    can_match_buffer_size,
    inductor_ir,
)

_MARK = "may be written over"


def note_pairs(node: BaseSchedulerNode) -> None:
    """Say in the code that is being generated of which pairs the kernel that `node` is part of may be given the same memory."""
    if isinstance(node, SchedulerNode):
        for read, made in _pairs(node):
            V.graph.wrapper_code.writeline(repr((_MARK, read, made)))


def noted(statement: ast.expr) -> tuple[str, str] | None:
    """Names of an input and of the output that may be written over it, where `statement` says so."""
    match statement:
        case ast.Tuple(elts=[ast.Constant(value=mark), ast.Constant(value=str(read)), ast.Constant(value=str(made))]):
            return (read, made) if mark == _MARK else None
    return None


def _pairs(node: SchedulerNode) -> Iterator[tuple[str, str]]:
    """Buffers that `node` reads, and what it makes that may be written over them.

    As by Inductor: an element is written where it is read, by all of the kernel that reads it, and what else reads it has done
    so before (``BaseSchedulerNode.decide_inplace_update``).
    """
    together = node.scheduler.get_fused_node(node).get_nodes()
    if any(other.is_template() for other in together):
        return
    inside = {output.get_name() for other in together for output in other.get_outputs()}
    for output in node.get_outputs():
        made = output.node
        if (
            not isinstance(made, inductor_ir.Buffer)
            or not made.should_allocate()
            or made.get_inputs_that_alias_output()
            or made.get_mutation_names()
        ):
            continue
        for read in node.read_writes.reads:
            if read.name in inside or not _same_element(node, read) or _shared_by_threads(read, together):
                continue
            others = [other for other in together if any(dep.name == read.name for dep in other.read_writes.reads)]
            places = {dep for other in others for dep in other.read_writes.reads if dep.name == read.name}
            done = all(other is node or other.get_name() in node.ancestors for other in others)
            if places == {read} and done and _fits(read.name, made):
                yield read.name, made.get_name()


def _same_element(node: SchedulerNode, read: object) -> bool:
    """Whether `node` writes one buffer, each element where it has `read` one, and no other adds to it."""
    writes = list(node.read_writes.writes)
    return (
        isinstance(read, MemoryDep)
        and node.can_inplace(read)
        and all(isinstance(write, MemoryDep) and write.mode is None for write in writes)
    )


def _shared_by_threads(read: Dep, together: Sequence[BaseSchedulerNode]) -> bool:
    """Whether several threads of a kernel on a GPU may read one element, which one of them writes before another has read it.

    They do where the kernel that all of `together` are part of iterates over more elements than it reads: the element is
    broadcast. For inputs that Inductor itself writes over it emits a barrier there, ``tl.debug_barrier()``.
    """
    if isinstance(together[0].scheduler.get_backend(together[0].get_device()), CppScheduling):
        return False  # one thread reads all that it writes over
    sizes: list[Any] = [node.group[1] for node in together]  # elements, and elements that each is reduced from
    return int(read.get_numel()) < max(int(math.prod(each)) for each in sizes)


def _fits(name: str, made: inductor_ir.Buffer) -> bool:
    """Whether the buffer `made` may lie where the one called `name` does."""
    found: object = V.graph.try_get_buffer(name)
    while isinstance(found, inductor_ir.MutableBox):  # an input of the graph
        found = found.data
    if not isinstance(found, inductor_ir.Buffer) or isinstance(found, inductor_ir.ConstantBuffer):
        return False
    several = isinstance(found.get_output_spec(), inductor_ir.NoneLayout | inductor_ir.MultiOutputLayout)
    return not several and can_match_buffer_size(found, made)
