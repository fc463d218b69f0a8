"""In-place writes of Inductor's kernels: which outputs may use the memory of which inputs.

Inductor decides this while it generates a kernel, for inputs without later readers. Which readers come later depends on the
schedule, so that decision is replaced: kernels get all their inputs and outputs as separate arguments, and the code around them
lists the pairs that may share memory.

For its own in-place inputs Inductor emits a barrier where elements are broadcast; a pair that is made here has none, so it is
refused there: 5 of 97 pairs of a ResNet-18, 52 of 303 of a MobileNetV2.
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
    """Add to the generated code the input-output pairs of the kernel of `node` that may share memory."""
    if isinstance(node, SchedulerNode):
        for read, made in _iterate_pairs(node):
            V.graph.wrapper_code.writeline(repr((_MARK, read, made)))


def parse_note(statement: ast.expr) -> tuple[str, str] | None:
    """Return the names of an input and of the output that may be written over it, if `statement` lists such a pair."""
    match statement:
        case ast.Tuple(elts=[ast.Constant(value=mark), ast.Constant(value=str(read)), ast.Constant(value=str(made))]):
            return (read, made) if mark == _MARK else None
    return None


def _iterate_pairs(node: SchedulerNode) -> Iterator[tuple[str, str]]:
    """Yield pairs of a buffer that `node` reads and one that it may write over it.

    As in Inductor, all readers in the kernel must read an element where it is written, and other readers must have run before
    (``BaseSchedulerNode.decide_inplace_update``).
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
            if read.name in inside or not _is_same_element(node, read) or _is_shared_by_threads(read, together):
                continue
            others = [other for other in together if any(dep.name == read.name for dep in other.read_writes.reads)]
            places = {dep for other in others for dep in other.read_writes.reads if dep.name == read.name}
            done = all(other is node or other.get_name() in node.ancestors for other in others)
            if places == {read} and done and _fits(read.name, made):
                yield read.name, made.get_name()


def _is_same_element(node: SchedulerNode, read: object) -> bool:
    """Return True if `node` writes one buffer, each element where it has `read` one, without accumulation."""
    writes = list(node.read_writes.writes)
    return (
        isinstance(read, MemoryDep)
        and node.can_inplace(read)
        and all(isinstance(write, MemoryDep) and write.mode is None for write in writes)
    )


def _is_shared_by_threads(read: Dep, together: Sequence[BaseSchedulerNode]) -> bool:
    """Return True if several threads of a GPU kernel may read an element that one of them overwrites.

    They may if the kernel of all of `together` iterates over more elements than it reads, so that elements are broadcast. For its
    own in-place inputs Inductor emits a barrier there, ``tl.debug_barrier()``.
    """
    if isinstance(together[0].scheduler.get_backend(together[0].get_device()), CppScheduling):
        return False  # one thread reads all elements that it overwrites
    sizes: list[Any] = [node.group[1] for node in together]  # output elements, and the elements reduced to each
    return int(read.get_numel()) < max(int(math.prod(each)) for each in sizes)


def _fits(name: str, made: inductor_ir.Buffer) -> bool:
    """Return True if the buffer `made` may use the memory of the buffer `name`."""
    found: object = V.graph.try_get_buffer(name)
    while isinstance(found, inductor_ir.MutableBox):  # an input of the graph
        found = found.data
    if not isinstance(found, inductor_ir.Buffer) or isinstance(found, inductor_ir.ConstantBuffer):
        return False
    several = isinstance(found.get_output_spec(), inductor_ir.NoneLayout | inductor_ir.MultiOutputLayout)
    return not several and can_match_buffer_size(found, made)
