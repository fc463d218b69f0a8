"""The memory that PyTorch reserves on the device for a step, by a model of its allocator, as a budget counts it.

Never imports torch.

Sizes of workspaces and of generator states are PyTorch's own, and named by the file that has them. Known weaknesses: the
optimizer with ``fused=True`` takes no temporaries, which the model does not know; a batch that is made anew while the last one
exists is not modelled.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from planner.graphs.addresses import Buffer
from planner.graphs.allocators.caching import DEFAULT, EXPANDABLE, Rules
from planner.graphs.allocators.glibc import GlibcAllocator
from planner.graphs.allocators.steering import Steering
from planner.graphs.allocators.training import (
    Training,
    Usage,
    combine_passes,
    compute_reserved_in_arena_bytes,
    find_growth_above,
    least_capacity_bytes,
    play,
    training_of,
    usage_of,
)
from planner.graphs.ir import Graph, Kind
from planner.graphs.optimizers import get_optimizer_memory
from planner.graphs.options import extract_eager_program
from planner.graphs.options.option import Feature
from planner.graphs.pools import DEVICE
from planner.graphs.schedule import Schedule, keep_everything
from planner.graphs.simulate import simulate
from planner.graphs.units import format_bytes, format_enough
from planner.memory.arena_rules import bound_slab_bytes, plan_device_arena
from planner.memory.reserved_prediction import Reserved
from planner.settings.compatibility import check_compatible
from planner.settings.counted_memory import CountedMemory
from planner.settings.devices import USUAL_CONTEXT_BYTES, find_device
from planner.solvers.order.peak import keep_everything_peak_bytes

# parseChosenWorkspaceSize of aten/src/ATen/cuda/CublasHandlePool.cpp: :4096:2:16:8, and 32 MiB on Hopper.
_WORKSPACE_BYTES, _HOPPER_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 1024, 32 * 2**20
# Seed and offset for all graphs: CUDAGeneratorState::register_graph of aten/src/ATen/cuda/CUDAGeneratorImpl.cpp.
_GENERATOR_BYTES = (8, 8)
# _parseChosenWorkspaceSize of aten/src/ATen/cuda/CUDABlas.cpp, for cuBLASLt.
_BIASED_WORKSPACE_BYTES = 2**20
_HOPPER = ("gh200", "h200", "h100")
_PRODUCT = re.compile(r"(mm|mv|dot|matmul|linear|linalg\w*|rnn\w*|cdist\w*|[bm]m_(dtype|activation))\b")  # ends of names


def is_on_cuda(graph: Graph) -> bool:
    """Return True if the step runs on a device whose memory PyTorch's caching allocator hands out: traced there, or modelled."""
    return not (graph.device or "cpu").startswith("cpu")


def needs_libraries(graph: Graph) -> bool:
    """Return True if the step multiplies matrices on such a device, for which libraries keep workspaces."""
    return is_on_cuda(graph) and any(_PRODUCT.search(op.target) for op in graph.ops)


def choose_memory(graph: Graph, asked: CountedMemory | None) -> CountedMemory:
    """Return the kind of memory that a budget of `graph` counts; as ``choose_memory_on``."""
    return choose_memory_on("cuda" if is_on_cuda(graph) else "cpu", asked)


def choose_memory_on(device: str, asked: CountedMemory | None) -> CountedMemory:
    """Return the kind of memory that a budget counts on a kind of device: `asked`, or the default of the device.

    Raises:
        UsageError: reserved memory is asked for on the CPU.
    """
    if asked is None:
        return CountedMemory.RESERVED if device == "cuda" else CountedMemory.ALLOCATED
    if asked is not CountedMemory.ALLOCATED and device != "cuda":
        check_compatible({Feature.RESERVED, Feature.ON_CPU})
    return asked


def get_rules(memory: CountedMemory) -> Rules:
    """Return the settings of the allocator: the default ones where the budget counts allocated memory."""
    return EXPANDABLE if memory.is_expandable else DEFAULT


def get_context_bytes(graph: Graph) -> int:
    """Return the bytes of CUDA's context: as measured when `graph` was traced, else those usual for its device; 0 on the CPU."""
    if not is_on_cuda(graph):
        return 0
    if (measured := graph.provenance.context_bytes) is not None:
        return measured
    device = find_device(graph.device)
    return USUAL_CONTEXT_BYTES if device is None else device.context_bytes


def _get_counted_context_bytes(graph: Graph, memory: CountedMemory) -> int:
    return get_context_bytes(graph) if memory.counts_context else 0


def build_training(graph: Graph, schedule: Schedule) -> Training:
    """Return the requests of a training loop by `schedule`, with the workspaces of cuBLAS where matrices are multiplied.

    They belong to a thread and a stream: the forward pass runs in the caller's thread, the backward pass in autograd's.
    """
    return training_of(graph, schedule, library_bytes=_list_libraries(graph))


@dataclass(frozen=True, slots=True)
class Beside:
    """Memory that training needs whatever the plan.

    Attributes:
        library_bytes: workspaces of libraries.
        context_bytes: CUDA's context, if the budget counts it, else 0.
        optimizing_bytes: all that is in use while the optimizer runs: static memory, gradients, its temporaries, and libraries.
    """

    library_bytes: int
    context_bytes: int
    optimizing_bytes: int

    @property
    def kept_bytes(self) -> int:
        """Bytes that no tensor can have, whatever the plan."""
        return self.library_bytes + self.context_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that a budget must have whatever the plan, as the optimizer needs them."""
        return self.optimizing_bytes + self.context_bytes

    def bound(self, allocated_bytes: int) -> int:
        """Return the least that a budget must have, given a bound on the allocated bytes of the step."""
        return max(allocated_bytes + self.kept_bytes, self.least_bytes)

    def describe_parts(self) -> str:
        """Return the parts of `kept_bytes` in words; "" if there are none."""
        parts = [(self.library_bytes, "workspaces that libraries keep"), (self.context_bytes, "CUDA's context")]
        return " and ".join(f"{format_bytes(size)} are {name}" for size, name in parts if size)

    def explain_refusal(self, budget_bytes: int) -> str:
        """Return a message that no plan can meet a budget too small for this memory, and what to do; "" if it is large enough."""
        if budget_bytes >= self.least_bytes:
            return ""
        context = ", with CUDA's context" if self.context_bytes else ""
        return (
            f"budget {format_bytes(budget_bytes)} is below the {format_enough(self.least_bytes)} in use while the optimizer "
            f"runs, whatever the plan: static memory, gradients, workspaces of libraries and its own temporaries{context}. An "
            "optimizer with fused=True needs less; otherwise raise the budget, or let it count only allocated memory "
            f"(memory={CountedMemory.ALLOCATED.value!r})"
        )


def predict_beside(graph: Graph, memory: CountedMemory) -> Beside:
    """Return the memory that a budget of `memory` must have for the step of `graph` whatever the plan."""
    library_bytes, parameters = sum(_list_libraries(graph)), graph.static_bytes_by_kind.get(Kind.PARAMETER, 0)
    temporaries = get_optimizer_memory(graph.provenance.optimizer).list_temporary_sizes([parameters])
    kept_bytes = sum(graph.tensors[t].size_bytes for t in graph.kept if graph.tensors[t].pool == DEVICE)
    in_use_bytes = graph.static_bytes + kept_bytes + sum(temporaries) + library_bytes
    return Beside(library_bytes, _get_counted_context_bytes(graph, memory), in_use_bytes)


@dataclass(frozen=True)
class DeviceTraining:
    """A training loop by a schedule on a CUDA device, and the memory reserved for it, each computed once.

    Attributes:
        memory: the kind of memory that the budget counts.
        context_bytes: CUDA's context, if the budget counts it, else 0.
    """

    training: Training
    memory: CountedMemory
    context_bytes: int

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, memory: CountedMemory = CountedMemory.RESERVED) -> Self:
        """Return training by `schedule`, which is valid on `graph`."""
        return cls(build_training(graph, schedule), memory, _get_counted_context_bytes(graph, memory))

    @cached_property
    def usage(self) -> Usage:
        """The memory that it takes in no arena."""
        return usage_of(self.training, get_rules(self.memory))

    @property
    def usual_bytes(self) -> int:
        """Bytes reserved in no arena."""
        return self.usage.reserved_bytes + self.context_bytes

    @cached_property
    def arena(self) -> Steering:
        """The arena that its steps may run in."""
        return plan_device_arena(self.training)

    @property
    def arena_bytes(self) -> int:
        """Bytes reserved with the arena."""
        return self._count_in_arena(self.arena.pool_bytes, serves_optimizer=self.arena.serves_optimizer)

    @cached_property
    def least_arena_bytes(self) -> int:
        """A lower bound on the bytes reserved in an arena; addresses are not planned."""
        slab_bytes = bound_slab_bytes(self.training)
        return min(self._count_in_arena(slab_bytes, serves_optimizer=serves) for serves in (False, True))

    def _count_in_arena(self, pool_bytes: int, *, serves_optimizer: bool) -> int:
        rules = get_rules(self.memory)
        in_arena_bytes = compute_reserved_in_arena_bytes(self.training, pool_bytes, rules, serves_optimizer=serves_optimizer)
        return in_arena_bytes + self.context_bytes

    def is_in_arena(self, budget_bytes: int, *, arena: bool | None) -> bool:
        """Return True if steps run in an arena: as `arena` says, or if they would reserve more than the budget without."""
        return self.usual_bytes > budget_bytes if arena is None else arena

    def predict(self, eager_bytes: int, *, in_arena: bool) -> Reserved:
        """Return the memory reserved for it, given the bytes for plain eager PyTorch."""
        return Reserved(
            total_bytes=(self.arena_bytes if in_arena else self.usual_bytes) - self.context_bytes,
            allocated_bytes=self.usage.allocated_bytes,
            eager_bytes=eager_bytes,
            library_bytes=sum(self.training.libraries),
            optimizer_bytes=sum(self.training.temporaries),
            context_bytes=self.context_bytes,
            expandable=self.memory.is_expandable,
        )

    def find_growth_above(self, budget_bytes: int) -> dict[int, int]:
        """Return, by step of the schedule, the bytes by which the reserved memory grows above a budget in that step."""
        return find_growth_above(self.training, self.usage, budget_bytes - self.context_bytes)


def predict_reserved_with_graphs(
    graph: Graph, schedule: Schedule, memory: CountedMemory, eager_bytes: int, pool_bytes: int
) -> Reserved:
    """Return the memory reserved for training where both passes of `schedule` are replayed as CUDA graphs.

    Tensors of the passes are in the graphs' pool. Outside the pool are the static tensors that the passes read, the optimizer's
    memory, copies of results and gradients, which each step allocates and the caller keeps until the optimizer has run, and a
    segment of the stream of the captures, for the state of the random generator.

    Args:
        graph: the step with the copies as static memory (``planner.runtime.cuda.graphed_step.prepare_for_recording``).
        memory: the kind of memory that the budget counts.
        eager_bytes: bytes for plain eager PyTorch, from ``predict_eager_reserved_bytes``.
    """
    copied = [graph.tensors[t].size_bytes for t in sorted(graph.kept)]
    copies = tuple(Buffer(f"copy {i}", i, len(copied) + 1, size) for i, size in enumerate(copied) if size)
    tensors = (replace(t, size_bytes=0) if t.static and t.kind in (Kind.OUTPUT, Kind.GRADIENT) else t for t in graph.tensors)
    training = DeviceTraining.of(replace(graph, tensors=tuple(tensors)), schedule, memory)
    outside = replace(training, training=replace(training.training, buffers=copies, moments=1))
    reserved, rules = outside.predict(eager_bytes, in_arena=False), get_rules(memory)
    return replace(
        reserved,
        total_bytes=reserved.total_bytes + rules.choose_segment_bytes(sum(_GENERATOR_BYTES)) + pool_bytes,
        allocated_bytes=reserved.allocated_bytes + sum(map(rules.round_bytes, _GENERATOR_BYTES)) + pool_bytes,
        pool_bytes=pool_bytes,
    )


def predict_kept_beside_passes(graphs: Sequence[Graph], memory: CountedMemory) -> int:
    """Return the bytes that no tensor of a step of several graphs can have in a budget of `memory`."""
    if memory is CountedMemory.ALLOCATED:
        return 0
    return max(predict_beside(graph, memory).kept_bytes for graph in graphs)


def predict_reserved_for_passes(parts: Sequence[tuple[Graph, Schedule]], static: Sequence[int], memory: CountedMemory) -> int:
    """Return the bytes reserved on CUDA for training by several graphs (``combine_passes``), as `memory` counts them."""
    training = combine_passes(parts, static, library_bytes=max((_list_libraries(graph) for graph, _ in parts), key=sum))
    return usage_of(training, get_rules(memory)).reserved_bytes + _get_counted_context_bytes(parts[0][0], memory)


def predict_reserved_bytes(graph: Graph, schedule: Schedule | None, memory: CountedMemory) -> int | None:
    """Return the bytes reserved on CUDA for training by `schedule` in no arena; None without a schedule, or on the CPU."""
    return None if schedule is None or not is_on_cuda(graph) else DeviceTraining.of(graph, schedule, memory).usual_bytes


def choose_arena(graph: Graph, memory: CountedMemory, *, asked: bool | None = None) -> bool | None:
    """Return True or False if steps of `graph` run in an arena or in none, None if that is decided for each schedule.

    An arena on CUDA is reserved memory of PyTorch's allocator without expandable segments, of steps that use no other memory.
    """
    if asked is not None:
        return asked
    countable = is_on_cuda(graph) and memory in (CountedMemory.RESERVED, CountedMemory.DEVICE)
    return None if countable and len(graph.pools) == 1 else False


def predict_counted_bytes(graph: Graph, schedule: Schedule, memory: CountedMemory, *, arena: bool | None = None) -> int:
    """Return the bytes of `memory` that training by `schedule` needs, which a budget that counts it must have.

    Args:
        arena: as in ``choose_arena``. If it is decided for each schedule, the least counts.
    """
    if memory is CountedMemory.ALLOCATED:
        return simulate(graph, schedule).peak_bytes
    arena = choose_arena(graph, memory, asked=arena)
    training = DeviceTraining.of(graph, schedule, memory)
    if arena:
        return training.arena_bytes
    if arena is False or training.usual_bytes <= training.least_arena_bytes:
        return training.usual_bytes
    return min(training.usual_bytes, training.arena_bytes)


def predict_reserved_at(graph: Graph, schedule: Schedule | None, memory: CountedMemory, budget_bytes: int) -> int | None:
    """Return the bytes reserved for training by a plan of `schedule` for a budget of `memory`.

    None as ``predict_reserved_bytes``.
    """
    if schedule is None or not is_on_cuda(graph):
        return None
    training = DeviceTraining.of(graph, schedule, memory)
    in_arena = training.is_in_arena(budget_bytes, arena=choose_arena(graph, memory))
    return training.arena_bytes if in_arena else training.usual_bytes


def predict_eager_bytes(graph: Graph, memory: CountedMemory) -> int:
    """Return the bytes of `memory` that plain eager PyTorch needs for the step of `graph`, which shares are shares of."""
    if memory is CountedMemory.ALLOCATED:
        return keep_everything_peak_bytes(extract_eager_program(graph))
    return predict_eager_reserved_bytes(graph, memory)


def predict_eager_reserved_bytes(graph: Graph, memory: CountedMemory) -> int:
    """Return the bytes that plain eager PyTorch reserves on CUDA for the step of `graph`, as the budget counts `memory`."""
    return usage_of(_build_eager_training(graph), get_rules(memory)).reserved_bytes + _get_counted_context_bytes(graph, memory)


@dataclass(frozen=True, slots=True)
class EagerMemory:
    """The memory that training with plain eager PyTorch takes, by models of allocators.

    Attributes (None for those of another kind of device):
        reserved_bytes, expandable_bytes: bytes reserved on CUDA with default settings, and with expandable segments.
        least_device_bytes: least capacity of a CUDA device on which it runs; the allocator then returns unused memory meanwhile.
        context_bytes: bytes of CUDA's context, which are not in the others.
        resident_bytes: resident bytes on the CPU with glibc, without the interpreter and its libraries.
    """

    reserved_bytes: int | None = None
    expandable_bytes: int | None = None
    least_device_bytes: int | None = None
    context_bytes: int | None = None
    resident_bytes: int | None = None

    def list_lines(self) -> list[tuple[str, str]]:
        """Return the facts as names and values, for people."""
        if self.resident_bytes is not None:
            return [("resident", f"{format_bytes(self.resident_bytes)} with glibc's allocator, besides Python and its libraries")]
        reserved, expandable, least = (
            format_bytes(size or 0) for size in (self.reserved_bytes, self.expandable_bytes, self.least_device_bytes)
        )
        least = f"on a full device it runs with {least}"
        context = (
            f"{format_bytes(self.context_bytes or 0)}, in addition to reserved memory; a budget counts it with memory='device'"
        )
        return [
            ("reserved", f"{reserved} by PyTorch's allocator, {expandable} with expandable segments; {least}"),
            ("CUDA's context", context),
        ]


def predict_eager_memory(graph: Graph) -> EagerMemory:
    """Return the memory that training with plain eager PyTorch takes on the device of `graph`, by models of allocators."""
    training = _build_eager_training(graph)
    if not is_on_cuda(graph):
        return EagerMemory(resident_bytes=play(training, GlibcAllocator()).reserved_bytes)
    return EagerMemory(
        usage_of(training).reserved_bytes,
        usage_of(training, EXPANDABLE).reserved_bytes,
        least_capacity_bytes(training),
        get_context_bytes(graph),
    )


def _build_eager_training(graph: Graph) -> Training:
    """Return the requests of training with plain eager PyTorch."""
    program = extract_eager_program(graph)
    return build_training(program, keep_everything(program))


def _list_libraries(graph: Graph) -> tuple[int, ...]:
    if not needs_libraries(graph):
        return ()
    device = find_device(graph.device)
    is_hopper = device is not None and device.name in _HOPPER
    return 2 * (_HOPPER_WORKSPACE_BYTES if is_hopper else _WORKSPACE_BYTES, _BIASED_WORKSPACE_BYTES)  # warmed up in both passes
