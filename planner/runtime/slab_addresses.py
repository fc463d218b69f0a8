"""Addresses in a slab for the requests of steps, and of the steps of optimizers behind them.

The requests of a step are those of a plan where the profile knows those of its ops, and the addresses those that were found with
the plan. Otherwise a step is recorded and addresses are searched: a function of what was recorded, which knows nothing of the
allocator that serves it. Every first step was recorded before. It took its memory from the usual allocator and the next one its
pages anew, so that a better plan cost about a step; and the search here did not always find what the plan had counted on. The
search counts work, not seconds, so that every machine gets the same addresses; most end at the bound before their limit.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from planner.graphs.addresses import AddressError, Buffer, Offsets, live_bytes
from planner.graphs.ir import Graph, Kind, Phase
from planner.graphs.requests import WORKSPACE
from planner.graphs.schedule import Compute, Schedule, find_boundary
from planner.memory.arena_rules import ALIGNMENT, LEAST_BYTES, build_arena_rules
from planner.runtime.arena_allocator import Addresses, RecordedRequest, Recording
from planner.solvers.addresses.solve import solve
from planner.solvers.arena.needs import count_known_moments

_SEARCH_WORK = (
    5.0  # limit of the search for addresses, in work: the same addresses on every machine; most end at the bound before
)
MOST_RECORDINGS = 3  # of steps whose requests differ from those recorded before, and of those of an optimizer
_NO_OPTIMIZERS: Mapping[Optimizer, "OptimizerStep"] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class OptimizerStep:
    """A recorded step of an optimizer.

    Attributes:
        requests: those that it frees before it ends, with ends among them.
        recordings: number of recordings so far.
        differs: True if it was interrupted, or a step since has had other requests.
    """

    requests: tuple[RecordedRequest, ...]
    recordings: int
    differs: bool = False

    @property
    def takes_slab(self) -> bool:
        """True if requests are large enough to be served from a slab."""
        return any(request.size_bytes >= LEAST_BYTES for request in self.requests)

    @property
    def is_final(self) -> bool:
        """True if the next step is not to be recorded."""
        return not self.differs or self.recordings == MOST_RECORDINGS


@dataclass(eq=False, slots=True)
class RecordedStep:
    """A step that is recorded, or that a plan predicts.

    Attributes:
        recording: the requests of its passes while they are recorded.
        requests: those until the end of the last backward pass so far.
        passes: its passes in order: key and number of the run, phase, and position of the first request.
        returned: positions of the requests for what the caller got from forward passes.
        staying: of those for gradients.
        runs: number of runs by key.
        left: number of runs whose backward pass is missing.
    """

    recording: Recording = field(default_factory=Recording)
    requests: tuple[RecordedRequest, ...] = ()
    passes: list[tuple[object, int, Phase, int]] = field(default_factory=list)
    returned: set[int] = field(default_factory=set)
    staying: set[int] = field(default_factory=set)
    runs: Counter[object] = field(default_factory=Counter)
    left: int = 0

    def begin(self, key: object, number: int, phase: Phase) -> None:
        """Record a pass from here on, of the run with this number of the code with this key."""
        self.passes.append((key, number, phase, self.recording.length))
        self.recording.start()


@dataclass(frozen=True, slots=True)
class SlabAddresses:
    """Addresses for a step, and for those of optimizers behind it.

    Attributes:
        passes: for the runs of each key, the requests of both passes.
        outside_bytes: the most bytes that a step takes outside of the slab.
        version: number of recordings of optimizers.
        found: the offsets that the addresses are made of.
    """

    addresses: Addresses
    passes: Mapping[object, Sequence[Mapping[Phase, range]]]
    optimizers: Mapping[Optimizer, range]
    outside_bytes: int
    version: int
    found: Offsets

    @property
    def step_bytes(self) -> int:
        """Bytes that the steps take, with the slab that they need."""
        return self.addresses.height_bytes + self.outside_bytes


def predict_step(graph: Graph, schedule: Schedule, offsets: Sequence[int]) -> tuple[RecordedStep, Offsets] | None:
    """Return the requests of a step by `schedule`, of one code, and their offsets.

    Return None if the requests of ops are not known, or `offsets` are for another schedule.

    Args:
        offsets: of the buffers in the arena, in the order of ``ArenaRules.divide_buffers``.
    """
    rules, moments = build_arena_rules(graph), count_known_moments(graph)
    inside, outside = rules.divide_buffers(graph, schedule)
    if moments == 1 or len(inside) != len(offsets):
        return None
    unsaved = _find_unsaved_states(graph, schedule)
    buffers = sorted((buffer for buffer in (*inside, *outside) if buffer.id not in unsaved), key=attrgetter("lower"))
    lowers, end = [buffer.lower for buffer in buffers], moments * len(schedule.steps)
    backward = bisect_left(lowers, moments * find_boundary(graph, schedule))
    ends = [None if buffer.upper == end else bisect_left(lowers, buffer.upper) for buffer in buffers]
    step = RecordedStep(
        requests=tuple(RecordedRequest(buffer.size, end, 0) for buffer, end in zip(buffers, ends, strict=True)),
        passes=[(None, 0, Phase.FORWARD, 0), (None, 0, Phase.BACKWARD, backward)],
        staying={i for i, end in enumerate(ends) if end is None},
        runs=Counter({None: 1}),
    )
    offset = dict(zip((buffer.id for buffer in inside), offsets, strict=True))
    placed = [i for i, buffer in enumerate(buffers) if buffer.id in offset]
    found = tuple(_build_buffer(step.requests, i) for i in placed)
    try:
        return step, Offsets(found, tuple(offset[buffers[i].id] for i in placed))
    except AddressError:  # of another schedule
        return None


def _find_unsaved_states(graph: Graph, schedule: Schedule) -> set[str]:
    """Return the buffers for states of generators that are not asked for: an op saves its own when it is first executed of many.

    They are the first and the last request of a random op (``planner.runtime.allocator.add_state_requests``).
    """
    found, executions, done = set[str](), Counter(schedule.computed), set[int]()
    for index, step in enumerate(schedule.steps):
        if not isinstance(step, Compute) or not (op := graph.ops[step.op]).random:
            continue
        saves = executions[op.id] > 1 and op.id not in done
        done.add(op.id)
        workspaces = sum(request.output == WORKSPACE for request in op.requests)
        if not saves and any(graph.tensors[t].kind is Kind.RANDOM_STATE for t in op.inputs):
            found |= {f"workspace of step {index}", f"workspace {workspaces} of step {index}"}
    return found


def plan_slab_addresses(
    recorded: RecordedStep,
    optimizers: Mapping[Optimizer, OptimizerStep] = _NO_OPTIMIZERS,
    *,
    gradients_stay: bool = True,
    version: int = 0,
    found: Offsets | None = None,
) -> SlabAddresses:
    """Return addresses for the requests of a step, and of steps of `optimizers` behind it.

    Args:
        gradients_stay: True if its gradients are in use until the last of these has ended.
        version: number of recordings of optimizers.
        found: offsets for the step, if they are known and optimizers take no slab.
    """
    requests, begins = list(recorded.requests), dict[Optimizer, int]()
    if not gradients_stay:
        for i in recorded.staying:
            requests[i] = replace(requests[i], end=len(recorded.requests))
    for optimizer, step in optimizers.items():
        begins[optimizer] = begin = len(requests)
        requests += [replace(request, end=begin + (request.end or 0)) for request in step.requests]
    found = found or _find_offsets(recorded, requests)
    offsets = {int(buffer.id): offset for buffer, offset in zip(found.buffers, found.offsets, strict=True)}
    large = [i for i, request in enumerate(requests) if request.size_bytes >= LEAST_BYTES]
    addresses = Addresses(
        max(found.height_bytes, ALIGNMENT), [requests[i].size_bytes for i in large], [offsets.get(i) for i in large]
    )
    ranges = {
        optimizer: range(bisect_left(large, begin), bisect_left(large, begin + len(optimizers[optimizer].requests)))
        for optimizer, begin in begins.items()
    }
    return SlabAddresses(
        addresses,
        _find_passes(recorded, large),
        WeakKeyDictionary(ranges),
        # The most bytes in use at once outside of the slab.
        live_bytes([_build_buffer(requests, i) for i in range(len(requests)) if i not in offsets]),
        version,
        found,
    )


def _find_offsets(recorded: RecordedStep, requests: Sequence[RecordedRequest]) -> Offsets:
    """Return offsets for those of `requests`, which begin with those of a step, that are to be in the slab."""
    buffers = [
        _build_buffer(requests, i)
        for i, request in enumerate(requests)
        if request.size_bytes >= LEAST_BYTES and i not in recorded.returned and (request.end is not None or i in recorded.staying)
    ]
    found = solve(buffers, work_limit=_SEARCH_WORK).offsets if buffers else Offsets((), ())
    assert found is not None  # any arena will do
    return found


def _find_passes(recorded: RecordedStep, large: Sequence[int]) -> dict[object, list[dict[Phase, range]]]:
    """Return for the runs of each key which of the requests at the positions `large` are of its passes."""
    found: dict[object, list[dict[Phase, range]]] = {key: [{} for _ in range(runs)] for key, runs in recorded.runs.items()}
    begins = [bisect_left(large, position) for *_, position in recorded.passes]
    ends = [*begins[1:], bisect_left(large, len(recorded.requests))]
    for (key, number, phase, _), begin, end in zip(recorded.passes, begins, ends, strict=True):
        found[key][number][phase] = range(begin, end)
    return found


def select_freed_requests(requests: Sequence[RecordedRequest]) -> tuple[RecordedRequest, ...]:
    """Return the requests that were freed, with ends among them; the others are for what stays, such as state."""
    kept = [i for i, request in enumerate(requests) if request.end is not None]
    return tuple(replace(requests[i], end=bisect_left(kept, requests[i].end or 0)) for i in kept)


def _build_buffer(requests: Sequence[RecordedRequest], i: int) -> Buffer:
    """Return request `i` as a buffer; one that was not freed stays to the end."""
    end = requests[i].end
    return Buffer(str(i), i, len(requests) if end is None else end, requests[i].size_bytes, ALIGNMENT)


def find_requests(requests: Sequence[RecordedRequest], tensors: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """Return the positions of the requests that `tensors` lie in."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
    return frozenset(i for i, request in enumerate(requests) if request.end is None and request.address in addresses)
