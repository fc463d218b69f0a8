"""Time, workspace and allocated sizes of each op of a captured step, measured one op at a time.

An op is executed alone, on the static tensors of the step and on synthetic ones for its other inputs. Memory then holds no more
than the static tensors and the inputs, outputs and workspace of one op, which every schedule must hold at some point: measuring
never needs more than the least feasible budget. Ops with the same call on tensors of the same layout are measured once, and
once per process where the call means the same in other captures: repeated layers cost nothing.

Before, the whole step was run several times with everything kept, so that a step that does not fit could not be planned. Known
weaknesses: a small op alone was off by up to three times on a CPU, though the sums over a step came within 10%, so the first
training steps are timed in context (``observation``). Synthetic inputs are not the real ones: an op whose time depends on its
values, or that refuses them, is modelled or measured wrongly.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from planner.capture.frontend.random_states import RandomStates, list_gpus, preserve_random_states
from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes, format_dtype
from planner.capture.options.additions import get_value
from planner.capture.rewrites.explicit_generators import preserve_generator_states
from planner.graphs.errors import PlannerError, first_line
from planner.graphs.ir import Kind, Op, Tensor
from planner.graphs.provenance import Times
from planner.graphs.requests import MemoryRequest
from planner.graphs.short_tracebacks import warn_caller
from planner.measure.isolated_op import IsolatedOp, OpFunction
from planner.measure.kernel_settings import collect_kernel_settings, format_settings
from planner.measure.roofline import model_composed, model_node
from planner.measure.sizes import replace_ops_and_tensors
from planner.measure.synthetic_inputs import TensorSpec, is_taken_whole
from planner.measure.timing import compute_typical, time_call
from planner.measure.unrepeatable_ops import (
    compute_checksums,
    has_undeclared_draws,
    is_custom,
    mark_executed_once,
    warn_of_unrepeatable_ops,
)
from planner.plans.select_attributes import select_attributes
from planner.runtime.allocator import (
    Mark,
    add_state_requests,
    collect_requests,
    compute_rise,
    find_addresses,
    measure_cuda_context_bytes,
    measure_segment_peaks,
    record_cpu_segments,
    record_cuda_requests,
)
from planner.settings.devices import DEVICES, DeviceSpec, find_device, get_device
from planner.torch_private.core import FakeTensor, disable_current_modes, no_python_dispatcher, profiler_enabled

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DEPTH = 8
_LONG_S = 0.01  # an op that takes longer is timed once more; shorter ones repeatedly, for this long in all


@dataclass(slots=True)
class OpCost:
    """Cost of one op, as far as it is measured.

    Attributes:
        time_s: seconds of a typical execution.
        workspace_bytes: memory besides inputs and outputs.
        outputs: layout of each output; None if it is no tensor.
        repeats: False if a second execution would give other bits.
        requests, host_s: as in ``planner.graphs.ir.Op``.
    """

    time_s: float = 0.0
    workspace_bytes: int = 0
    outputs: tuple[TensorSpec | None, ...] = ()
    repeats: bool = True
    requests: tuple[MemoryRequest, ...] = ()
    host_s: float = 0.0


_Key = tuple[object, ...]
_COSTS: dict[_Key, OpCost] = {}


@dataclass(slots=True)
class MeasuredOp:
    """One of the distinct ops of a step, as a function to execute alone.

    Attributes:
        inputs: for each tensor that it reads, by id, a real tensor, the layout of a synthetic one, or the op that computes it.
    """

    call: IsolatedOp
    run: OpFunction
    inputs: Mapping[int, "torch.Tensor | TensorSpec | ComputedInput"]
    cost: OpCost = field(default_factory=OpCost)

    def build_tensors(self) -> dict[int, torch.Tensor]:
        """Return the inputs by id: new tensors, and the real ones, with copies of those that the op overwrites."""
        return {t: self._build_tensor(t, value) for t, value in self.inputs.items()}

    def _build_tensor(self, t: int, value: "torch.Tensor | TensorSpec | ComputedInput") -> torch.Tensor:
        match value:
            case TensorSpec():
                return value.make(self.call.op.target)
            case ComputedInput():
                return value.compute()
        return value.clone() if t in self.call.op.mutates else value

    def build_arguments(self) -> list[torch.Tensor]:
        """Return the arguments of `run`."""
        tensors = self.build_tensors()
        return [tensors[t] for t in self.call.reads]


@dataclass(frozen=True, slots=True)
class ComputedInput:
    """An output of one op as an input of another.

    Attributes:
        producer: the op, of which all inputs are real or synthetic.
        place: position among its outputs.
    """

    producer: MeasuredOp
    place: int

    def compute(self) -> torch.Tensor:
        """Return the tensor; nothing else that the producer made is kept."""
        made = self.producer.run(*self.producer.build_arguments())[self.place]
        assert made is not None
        return made


def profile(
    capture: Capture,
    static: Sequence[torch.Tensor],
    *,
    passes: int = 5,
    model: DeviceSpec | None = None,
    on_op: Callable[[int, int], None] | None = None,
) -> Capture:
    """Return `capture` with measured times, workspaces and allocated sizes.

    The model, the batch and the random state are not changed. On the CPU the time of an op is its fastest execution, since an
    interrupted process waits for milliseconds; on CUDA it is the median.

    Args:
        static: the static tensors, in the order of the program's sources; fake ones are replaced by synthetic tensors.
        passes: number of timings of short ops, at least 1.
        model: roofline for ops that cannot be executed on synthetic values; None: that of the step's device, if there is one.
        on_op: called with the number of measured ops and of all ops; ops from earlier profiles count as well.

    Raises:
        PlannerError: an op can be neither executed nor modelled.
    """
    device = static[0].device
    with isolate_ops(device), preserve_generator_states(capture.program):
        profiler = _Profiler(capture, static, device, passes, model, on_op)
        profiler.measure()
    once = [op for op in capture.graph.program if (cost := profiler.costs.get(op.id)) is not None and not cost.repeats]
    warn_of_unrepeatable_ops(once)
    _warn_of_modelled_ops(profiler.failed)
    return mark_executed_once(_set_costs(capture, profiler.costs, device, passes), {op.id for op in once})


def find_distinct_ops(
    capture: Capture, static: Sequence[torch.Tensor], among: Collection[int] | None = None
) -> list[tuple[MeasuredOp, tuple[int, ...]]]:
    """Return the first of each group of equal ops, of `among` if given, with the ids of the group, in program order."""
    device = static[0].device
    with isolate_ops(device), preserve_generator_states(capture.program):
        profiler = _Profiler(capture, static, device, 1, None, None)
        profiler.measure()
    equal: dict[_Key, list[int]] = {}
    for op, key in sorted(profiler.keys.items(), key=lambda item: item[0]):
        if among is None or op in among:
            equal.setdefault(key, []).append(op)
    return [(profiler.build_measured_op(capture.graph.ops[ops[0]]), tuple(ops)) for ops in equal.values()]


@contextmanager
def isolate_ops(device: torch.device) -> Iterator[None]:
    """Execute ops inside without recording, casting or tracing them; the random state is restored at the end."""
    with (
        disable_current_modes(),
        no_python_dispatcher(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        preserve_random_states(list_gpus(device)),
    ):
        yield


@dataclass
class _Profiler:
    """The measurement of the ops of one capture.

    Attributes:
        costs: cost by op id; ops that call nothing are missing.
        keys: by op id, all that its cost depends on.
        failed: ops whose costs are modelled, each with the error that it raised.
    """

    capture: Capture
    static: Sequence[torch.Tensor]
    device: torch.device
    passes: int
    model: DeviceSpec | None
    on_op: Callable[[int, int], None] | None
    costs: dict[int, OpCost] = field(default_factory=dict)
    keys: dict[int, _Key] = field(default_factory=dict)
    failed: list[tuple[Op, Exception]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sources = self.capture.program.sources
        self._layouts: dict[int, torch.Tensor | TensorSpec | None] = {
            source.tensor: TensorSpec.make_smallest(value) if isinstance(value, FakeTensor) else value
            for source, value in zip(sources, self.static, strict=True)
        }
        self._local_costs: dict[_Key, OpCost] = {}  # of calls that mean something else in other captures
        self._settings = (torch.get_num_threads(), *collect_kernel_settings(self.device).values())

    def measure(self) -> None:
        """Measure each distinct op without a cost, once the layouts of its inputs are known."""
        new: dict[_Key, MeasuredOp] = {}
        calls = []
        for op in self.capture.graph.ops:
            if (call := IsolatedOp.of(self.capture, op)) is not None:
                calls.append(call)
            # A recomputed random op sets the generator to the saved state: only a real one is valid.
            states = [t for t in op.outputs if self.capture.graph.tensors[t].kind is Kind.RANDOM_STATE]
            self._layouts |= dict.fromkeys(states, torch.default_generator.get_state())
        distinct = {call.identity for call in calls}  # and by the layouts of their inputs, which come to be known
        seen: set[Hashable] = set()
        while calls:
            waiting = []
            for call in calls:
                if all(t in self._layouts for t in (*call.reads, *call.op.inputs)):
                    self._measure_call(call, new)
                    seen.add(call.identity)
                    self._report(len(seen) / len(distinct) / 2)
                else:
                    waiting.append(call)
            assert len(waiting) < len(calls)  # every tensor has a producer
            calls = waiting
        self._measure_workspaces(list(new.values()))
        for key, measured in new.items():
            costs = _COSTS if measured.call.is_shared else self._local_costs
            costs[key] = measured.cost
        for number, key in self.keys.items():
            self.costs[number] = _COSTS.get(key) or self._local_costs[key]

    def _report(self, fraction: float) -> None:
        if self.on_op is not None:
            self.on_op(round(fraction * len(self.capture.graph.ops)), len(self.capture.graph.ops))

    def build_measured_op(self, op: Op) -> MeasuredOp:
        """Return `op` as a function, with inputs of measured layouts."""
        call = IsolatedOp.of(self.capture, op)
        assert call is not None
        return self._build_executable(call)

    def _build_executable(self, call: IsolatedOp, computed: Mapping[int, ComputedInput] | None = None) -> MeasuredOp:
        """Return `call` with its inputs; without those that are `computed`, masks select all where that takes more memory."""
        inputs: dict[int, torch.Tensor | TensorSpec | ComputedInput] = dict(computed or {})  # first, with no other in memory
        for t in (*call.reads, *call.op.inputs):
            value = self._layouts[t]
            if computed is None and isinstance(value, torch.Tensor) and is_taken_whole(call.op.target, value.dtype):
                value = TensorSpec.of(value)
            if value is not None:
                inputs.setdefault(t, value)
        return MeasuredOp(call, call.load(self.capture.program), inputs)

    def _find_computed_integers(self, call: IsolatedOp, depth: int = _DEPTH) -> dict[int, ComputedInput]:
        """Return the synthetic integers among the inputs as what their producers compute from theirs, up to `depth` ops before.

        0 may be no valid index, and a mask of zeros selects nothing.
        """
        found: dict[int, ComputedInput] = {}
        for t in dict.fromkeys((*call.reads, *call.op.inputs)):
            spec, producers = self._layouts[t], self.capture.graph.tensors[t].producers
            if not producers or not depth or not isinstance(spec, TensorSpec):
                continue
            if spec.dtype in _INTEGERS or self._is_constant(t, depth):
                before = IsolatedOp.of(self.capture, self.capture.graph.ops[producers[0]])
                assert before is not None
                producer = self._build_executable(before, self._find_computed_integers(before, depth - 1))
                found[t] = ComputedInput(producer, before.op.outputs.index(t))
        return found

    def _is_constant(self, tensor: int, depth: int) -> bool:
        """Return True if a tensor is computed from nothing, by at most `depth` ops one after another."""
        producers = self.capture.graph.tensors[tensor].producers
        inputs = self.capture.graph.ops[producers[0]].inputs if producers else ()
        return bool(producers and depth) and all(self._is_constant(each, depth - 1) for each in inputs)

    def _measure_call(self, call: IsolatedOp, new: dict[_Key, MeasuredOp]) -> None:
        specs = tuple(TensorSpec.of(v) if isinstance(v, torch.Tensor) else v for v in (self._layouts[t] for t in call.reads))
        key = (call.identity, specs, self._list_sizes(call), self.device, *self._settings)
        self.keys[call.op.id] = key
        if key in new:
            outputs = new[key].cost.outputs
        elif (cost := _COSTS.get(key) or self._local_costs.get(key)) is not None:
            outputs = cost.outputs
        else:
            outputs = self._execute_or_model(key, call, new)
        for t, spec in zip(call.op.outputs, outputs, strict=True):
            self._layouts.setdefault(t, spec)

    def _execute_or_model(self, key: _Key, call: IsolatedOp, new: dict[_Key, MeasuredOp]) -> tuple[TensorSpec | None, ...]:
        measured = self._build_executable(call)
        error = self._find_error(measured)
        if error is not None:
            error = None  # its traceback has the arguments
            measured = self._build_executable(call, self._find_computed_integers(call))
            error = self._find_error(measured)
        if error is not None:
            modelled = self._model_cost(call, error)
            self._local_costs[key] = modelled
            return modelled.outputs
        new[key] = measured
        return measured.cost.outputs

    def _find_error(self, measured: MeasuredOp) -> Exception | None:
        """Execute and time the op, and return the error that it raises; one if it gives other sizes than in the step."""
        try:
            self._run_and_time(measured)
        except Exception as error:  # noqa: BLE001  # any error of an op on synthetic values
            return error
        sizes, made = self._list_sizes(measured.call), [spec.shape for spec in measured.cost.outputs if spec is not None]
        return ValueError(f"its sizes depend on data: {made}") if sizes and list(sizes) != made else None

    def _list_sizes(self, call: IsolatedOp) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of the outputs in the step, if they depend on data; else nothing."""
        node = self.capture.nodes[call.op.id]
        if torch.Tag.dynamic_output_shape not in getattr(getattr(node, "target", None), "tags", ()):
            return ()
        assert node is not None
        return tuple(tuple(get_value(node, path).shape) for _, path in self.capture.program.calls[call.op.id].outputs)

    def _run_and_time(self, measured: MeasuredOp) -> None:
        """Execute the op once for the layouts of its outputs, then for its time; long ones again in ``_measure_workspaces``."""
        arguments = measured.build_arguments()
        times: list[tuple[float, float]] = []
        states = RandomStates(list_gpus(self.device))
        first_s, first_host_s, made = time_call(measured.run, arguments, self.device)
        measured.cost.outputs = tuple(TensorSpec.of(value) if isinstance(value, torch.Tensor) else None for value in made)
        measured.cost.repeats = not has_undeclared_draws(measured.call.op, states, self.device)
        sums = compute_checksums(made) if measured.cost.repeats and is_custom(self.capture, measured.call.op) else None
        del made
        if sums is not None:
            states.restore()
            del arguments
            arguments = measured.build_arguments()
            measured.cost.repeats = sums == compute_checksums(measured.run(*arguments))
        while first_s < _LONG_S and len(times) < self.passes and sum(seconds for seconds, _ in times) < _LONG_S:
            times.append(time_call(measured.run, arguments, self.device)[:2])
        times = times or [(first_s, first_host_s)]
        measured.cost.time_s = compute_typical([seconds for seconds, _ in times], self.device)
        measured.cost.host_s = min(host_s for _, host_s in times)

    def _measure_workspaces(self, ops: Sequence[MeasuredOp]) -> None:
        """Measure the workspace of each of `ops`: the rise of memory while it runs, without its outputs."""
        if not ops:
            return
        if self.device.type == "cpu" and profiler_enabled():
            warn_caller("a profiler is running, so the workspaces of ops cannot be measured: leave a margin")
            return
        places: list[dict[int, int]] = []
        run = partial(self._run_marked, ops, places)
        if self.device.type == "cpu":
            for measured, events, outputs in zip(ops, record_cpu_segments(run)[1::2], places, strict=True):
                self._set_workspace(measured.cost, compute_rise(events))
                measured.cost.requests = collect_requests(events, outputs)
            return
        for measured, rise in zip(ops, measure_segment_peaks(run, self.device)[1::2], strict=True):
            self._set_workspace(measured.cost, rise)
            measured.cost.requests = record_cuda_requests(partial(measured.run, *measured.build_arguments()), self.device)

    def _set_workspace(self, cost: OpCost, rise_bytes: int) -> None:
        output_bytes = sum(_count_asked_bytes(spec, self.device) for spec in cost.outputs)
        cost.workspace_bytes = compute_allocated_bytes(max(0, rise_bytes - output_bytes), self.device)

    def _run_marked(self, ops: Sequence[MeasuredOp], places: list[dict[int, int]], mark: Mark) -> None:
        """Run each of `ops` between two marks, and append the addresses of its outputs to `places`."""
        for done, measured in enumerate(ops):
            self._report((1 + done / len(ops)) / 2)
            arguments = measured.build_arguments()
            mark()
            seconds, host_s, made = time_call(measured.run, arguments, self.device)
            mark()
            measured.cost.time_s, measured.cost.host_s = min(measured.cost.time_s, seconds), min(measured.cost.host_s, host_s)
            places.append(find_addresses(made))
            del made, arguments

    def _model_cost(self, call: IsolatedOp, error: Exception) -> OpCost:
        """Return a modelled cost for an op that failed."""
        model = self.model or self._get_device_model(call, error)
        op, node = call.op, self.capture.nodes[call.op.id]
        calls = self.capture.program.calls[op.id]
        composed, fakes = calls.composed, calls.fakes or ()
        if composed is None and node is None:
            raise PlannerError(f"op {op.name} cannot be measured alone: {first_line(error)}") from error
        self.failed.append((op, error))
        if composed is not None:
            time_s, workspace = model_composed(composed, fakes, model)
            return OpCost(time_s, workspace, tuple(map(TensorSpec.make_smallest, composed(*fakes))))
        assert node is not None
        time_s, workspace = model_node(node, model)
        outputs = tuple(TensorSpec.make_smallest(get_value(node, path)) for _, path in calls.outputs)
        return OpCost(time_s, workspace, outputs, repeats=not is_custom(self.capture, op))

    def _get_device_model(self, call: IsolatedOp, error: Exception) -> DeviceSpec:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        found = get_device("cpu") if self.device.type == "cpu" else find_device(name)
        if found is None:
            raise PlannerError(
                f"op {call.op.name} cannot be measured alone ({first_line(error)}), and no times are known for {name!r}: name a "
                f"device like it, roofline=, of {', '.join(DEVICES)}"
            ) from error
        return found


def _warn_of_modelled_ops(failed: Sequence[tuple[Op, Exception]]) -> None:
    """Warn once of all ops that cannot be measured; those that differ in their inputs only count as one name."""
    if not failed:
        return
    op, error = failed[0]
    said = f"op {op.name} cannot be measured alone ({first_line(error)}): its time is modelled, and a workspace that it may need"
    if len(failed) > 1:
        targets = ", ".join(dict.fromkeys(op.target for op, _ in failed))
        said = (
            f"{len(failed)} ops cannot be measured alone ({targets}), the first of them {op.name} ({first_line(error)}): their "
            "times are modelled, and workspaces that they may need"
        )
    verb = "is" if len(failed) == 1 else "are"
    warn_caller(f"{said} {verb} not in the plan; leave a margin")


def _set_costs(capture: Capture, costs: Mapping[int, OpCost], device: torch.device, passes: int) -> Capture:
    graph = capture.graph
    tensors, ops = list(graph.tensors), list[Op]()
    for op in graph.ops:
        if (cost := costs.get(op.id)) is None:
            ops.append(op)
            continue
        # A recomputed random op restores the generator's present state, which passes through a tensor of its own.
        state = capture.program.calls[op.id].random_state
        swap_bytes = 0 if state is None else graph.tensors[state].size_bytes
        requests = add_state_requests(cost.requests, swap_bytes) if device.type == "cpu" else cost.requests
        measured = {"workspace_bytes": max(cost.workspace_bytes, swap_bytes), **select_attributes(cost, "time_s", "host_s")}
        ops.append(replace(op, requests=requests, **measured))
        for t, spec in zip(op.outputs, cost.outputs, strict=True):
            if graph.tensors[t].producers[0] == op.id:
                tensors[t] = _set_allocated_size(tensors[t], spec, device)
    provenance = graph.provenance.record(
        times=Times.MEASURED,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        threads=torch.get_num_threads(),
        settings=format_settings(collect_kernel_settings(device)),
        passes=passes,
        torch=torch.__version__,
    )
    if device.type == "cuda":
        provenance = provenance.record(context_bytes=measure_cuda_context_bytes(device))
    changed = (t for t, before in zip(tensors, graph.tensors, strict=True) if t.size_bytes != before.size_bytes)
    differing = [[t.id, t.size_bytes] for t in changed]
    if differing:
        provenance = provenance.record(allocated_bytes=[*map(list, provenance.allocated_bytes), *differing])
    return replace_ops_and_tensors(replace(capture, graph=replace(graph, provenance=provenance)), ops, tensors)


def _set_allocated_size(tensor: Tensor, spec: TensorSpec | None, device: torch.device) -> Tensor:
    if spec is None:
        return replace(tensor, size_bytes=0)
    tensor = replace(tensor, size_bytes=_count_bytes(spec, device))
    if tensor.dtype:
        return tensor
    return replace(tensor, shape=spec.shape, dtype=format_dtype(spec.dtype))  # a buffer without a description in Inductor's code


def _count_bytes(spec: TensorSpec | None, device: torch.device) -> int:
    return compute_allocated_bytes(_count_asked_bytes(spec, device), device)


def _count_asked_bytes(spec: TensorSpec | None, device: torch.device) -> int:
    return 0 if spec is None or spec.device.type != device.type else spec.elements * spec.dtype.itemsize
