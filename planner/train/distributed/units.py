"""The units of a model under ``fully_shard``: what is gathered and reduced together, and the model as it is captured."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from planner.capture.signature import Batch
from planner.graphs.errors import MismatchError, PlannerError, TraceError
from planner.runtime.code import Backward, Forward, Returned
from planner.runtime.sharding import Unsharded
from planner.torch_private.core import FakeTensorMode, get_local_tensor, pytree
from planner.torch_private.fsdp import (
    build_dtensor,
    collect_gradient_sum,
    find_own_communication,
    flatten_mesh,
    get_gradient_divide_factors,
    get_mixed_precision,
    get_shard,
    get_sharding,
    list_groups,
    list_modules,
    list_states,
    set_gradient_sum,
)
from planner.train.distributed.collectives import Addition, Gather, Packed, Reduction
from planner.train.distributed.failures import tell_failures
from planner.train.distributed.ranks import SingleProcess, agree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of a unit.

    Attributes:
        name: its first name in the model.
        sharded: the parameter, of which this process holds a shard.
        packed: its place in the buffer of a unit, when it is gathered.
        shard_bytes: of the storage of a shard.
        sum_dtype: of a sum of whole gradients of several batches.
        state: the parameter as FSDP2 describes it, which holds that sum.
    """

    name: str
    sharded: nn.Parameter
    packed: Packed
    shard_bytes: int
    sum_dtype: torch.dtype
    state: Any

    @property
    def sum_name(self) -> str:
        """The name of the sum among the tensors of a step."""
        return f"{self.name}.sum"

    def make_sum(self) -> torch.Tensor:
        """Return the sum of earlier gradients; begin one at -0.0, to which any gradient can be added without changing a bit."""
        total = collect_gradient_sum(self.state)
        if total is None:
            total = torch.full(self.packed.shape, -0.0, dtype=self.sum_dtype, device=self.sharded.device)
            set_gradient_sum(self.state, total)
        return total


class ShardedUnit:
    """Parameters that ``fully_shard`` gathers together, and whose gradients it reduces together.

    Attributes:
        name: path of its module in the model.
        modules: the paths of each of its modules.
        world: number of processes that hold a part each.
    """

    def __init__(self, group: Any, name: str, modules: Sequence[Sequence[str]], names: Mapping[int, str]) -> None:
        """Initialize for a group of parameters of FSDP2.

        Args:
            names: names of the model's parameters, by identity.

        Raises:
            TraceError: it is sharded in a way that is not planned; names the parameter or the unit.
        """
        self.name, self.modules = name, modules
        self._group = group
        self._mesh = group.mesh_info
        _check_group(group, name)
        for parameter in group.fsdp_params:
            _check_parameter(parameter, names[id(parameter.sharded_param)])
        self.world: int = self._mesh.shard_process_group.size()
        self.parameters = tuple(self._describe(p, names[id(p.sharded_param)]) for p in group.fsdp_params)

    def _describe(self, parameter: Any, name: str) -> ShardedParameter:
        sharded, wanted = parameter.sharded_param, self._group.mp_policy.param_dtype
        dtype = wanted if wanted is not None and sharded.dtype.is_floating_point else sharded.dtype
        packed = Packed(tuple(sharded.shape), -(-sharded.shape[0] // self.world), dtype)
        sum_dtype = self._group.mp_policy.reduce_dtype or dtype
        return ShardedParameter(name, sharded, packed, packed.elements * sharded.dtype.itemsize, sum_dtype, parameter)

    @property
    def rank(self) -> int:
        """Position of this process among those that hold other parts."""
        rank: int = self._mesh.shard_process_group.rank()
        return rank

    @property
    def _replicas(self) -> dist.ProcessGroup | None:
        """The processes that hold the same part; None if there are no others."""
        found: dist.ProcessGroup | None = getattr(self._mesh, "replicate_process_group", None)
        return found

    @property
    def reduces(self) -> bool:
        """True if gradients are to be reduced, as ``set_requires_gradient_sync`` says.

        Raises:
            PlannerError: they are to be reduced in a way that is not planned.
        """
        reduces: bool = self._group.reduce_grads
        if reduces and not self._group.all_reduce_grads and self._replicas is not None:
            raise PlannerError(
                f"set_requires_all_reduce(False) on {self.name}, but a planned step reduces gradients over the whole mesh: use "
                "set_requires_gradient_sync(False), which keeps whole gradients"
            )
        if setter := find_own_communication(self._group):
            raise PlannerError(f"{setter}() on {self.name}, but a planned step has its own collectives: leave it out")
        return reduces

    @property
    def division(self) -> tuple[float | None, bool]:
        """The divisor of gradients that FSDP2 was given, and True if its collectives are to be sums only."""
        return self._group.gradient_divide_factor, self._group.force_sum_reduction_for_comms

    @property
    def reduces_unused(self) -> bool:
        """True if parameters that a step does not train are to have zeros as gradients (PyTorch 2.13)."""
        return getattr(self._group, "reduce_scatter_unused_params", False)

    @property
    def adds(self) -> bool:
        """True if gradients are added to sums: they are not to be reduced, or there are sums of earlier ones."""
        return not self.reduces or any(collect_gradient_sum(p.state) is not None for p in self.parameters)

    def build_gather(self, parameters: Sequence[ShardedParameter]) -> Gather:
        """Return the gather of some of the parameters."""
        return Gather(tuple(p.packed for p in parameters), self._mesh.shard_process_group)

    def build_addition(self, parameter: ShardedParameter) -> Addition:
        """Return the addition of a gradient of a parameter to those of earlier batches."""
        return Addition((parameter.packed,), parameter.sum_dtype)

    def build_reduction(self, parameters: Sequence[ShardedParameter]) -> Reduction:
        """Return the reduction of the gradients of some of the parameters."""
        replicas = self._replicas
        dtypes = {p.packed.dtype for p in parameters}
        shard_dtypes = {p.sharded.dtype for p in parameters}
        if len(dtypes) > 1 or len(shard_dtypes) > 1:
            raise TraceError(
                f"the trained parameters of {self.name} are {' and '.join(sorted(map(str, dtypes | shard_dtypes)))}: fully_shard "
                "reduces those of one dtype together"
            )
        dtype, device = self._group.mp_policy.reduce_dtype or dtypes.pop(), parameters[0].sharded.device.type
        before, after, op, op_of_replicas = get_gradient_divide_factors(
            self._mesh.shard_process_group, replicas, dtype, device, *self.division
        )
        if device == "cpu" and op == dist.ReduceOp.PREMUL_SUM:
            raise TraceError(
                f"set_gradient_divide_factor({self.division[0]}) on {self.name} needs a reduction that gloo does not have: call "
                "set_force_sum_reduction_for_comms(True) too"
            )
        packed, group = tuple(p.packed for p in parameters), self._mesh.shard_process_group
        between = None
        if device == "cpu" and op == dist.ReduceOp.AVG:  # gloo sums and divides, with the same bits, in memory of its own
            between, op = group.size(), dist.ReduceOp.SUM
            if replicas is not None and op_of_replicas == dist.ReduceOp.AVG:
                after, op_of_replicas = replicas.size(), dist.ReduceOp.SUM
        return Reduction(packed, group, replicas, dtype, shard_dtypes.pop(), (before, between, after), (op, op_of_replicas))


def _check_group(group: Any, name: str) -> None:
    """Raise a TraceError if the unit `name` is sharded in a way that is not planned."""
    after = group.post_forward_mesh_info
    reason = None
    if not hasattr(group.mesh_info, "shard_process_group"):
        reason = "is replicated without being sharded: use DistributedDataParallel"
    elif getattr(group.mesh_info, "is_spmd_mesh", False):
        reason = "is sharded with dp_mesh_dims=: leave it out"
    elif after is not None and after.shard_mesh_size != group.mesh_info.shard_mesh_size:
        reason = f"has reshard_after_forward={after.shard_mesh_size}: give True or False, as the plan decides what stays gathered"
    elif type(group.offload_policy).__name__ == "CPUOffloadPolicy":
        reason = "has a CPUOffloadPolicy: leave out offload_policy="
    if reason is not None:
        raise TraceError(f"the unit {name} of fully_shard {reason}")


def _check_parameter(parameter: Any, name: str) -> None:
    """Raise a TraceError if a parameter is sharded in a way that is not planned."""
    reason = None
    if parameter.is_dtensor:
        reason = "was a DTensor before fully_shard (tensor parallelism), which is not planned"
    elif type(parameter.fsdp_placement) is not Shard or parameter.fsdp_placement.dim != 0:
        reason = f"is sharded as {parameter.fsdp_placement!r} by shard_placement_fn: only Shard(dim=0) is planned"
    elif hasattr(get_shard(parameter), "fsdp_pre_all_gather"):
        reason = f"is a {type(get_shard(parameter)).__name__}, whose fsdp_pre_all_gather is not planned"
    if reason is not None:
        raise TraceError(f"the parameter {name} {reason}")


def list_units(model: nn.Module) -> list[ShardedUnit]:
    """Return the units of `model`; raise a TraceError if one is sharded in a way that is not planned."""
    names = {id(p): name for name, p in reversed([*model.named_parameters(remove_duplicate=False)])}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    units, used = list[ShardedUnit](), set[str]()
    for group in list_groups(list_states(model)):
        modules = [paths[id(module)] for module in group.modules]
        name = modules[0][0] or "root"
        name = next(n for n in (name, *(f"{name}.{i}" for i in range(2, len(used) + 3))) if n not in used)
        used.add(name)
        units.append(ShardedUnit(group, name, modules, names))
    return units


class ConstantsAndSums(dict[str, torch.Tensor]):
    """Constants of a step by name, and the sums of gradients, which are looked up in each step and begin when they are read."""

    def __init__(self, constants: Mapping[str, torch.Tensor], units: Iterable[ShardedUnit]) -> None:
        super().__init__(constants)
        self._parameters = {p.sum_name: p for unit in units for p in unit.parameters}

    def __missing__(self, name: str) -> torch.Tensor:
        """Return the sum with this name."""
        return self._parameters[name].make_sum()


class UnitPasses:
    """A stage of a step on units: sums of gradients are freed once they are reduced, and failures of backward passes are told.

    Like FSDP2, a backward pass does what methods as ``set_requires_gradient_sync`` have said before it. But the forward pass has
    chosen its plan by then.
    """

    def __init__(self, units: Sequence[ShardedUnit]) -> None:
        self._units = units

    def run_forward(self, run: Forward, static: Sequence[Any]) -> Returned:
        """Run the forward pass; pass on what is to be done with gradients."""
        loss, extras, saved = run(static)
        return loss, extras, [*saved, describe_synchronization(self._units)]

    def run_backward(self, run: Backward, static: Sequence[Any], saved: list[Any]) -> tuple[Any, ...]:
        """Run the backward pass.

        Raises:
            PlannerError: gradients are to be added or reduced in another way than in the forward pass.
        """
        with tell_failures():
            if saved.pop() != describe_synchronization(self._units):
                raise PlannerError(
                    "set_requires_gradient_sync was called between a forward and its backward pass, or another method that "
                    "changes reductions, or the sums of gradients that this step adds to have been reduced by another one: set "
                    "it before the forward pass, and run its backward pass before the next step"
                )
            gradients = run(static, saved)
        for unit in self._units:
            if unit.reduces:
                for parameter in unit.parameters:
                    set_gradient_sum(parameter.state, None)
        return gradients


def describe_synchronization(units: Sequence[ShardedUnit]) -> Hashable:
    """Return what is done with the gradients of each unit: all that methods of FSDP2 may change between two steps."""
    return tuple((unit.reduces, unit.adds, unit.division, unit.reduces_unused) for unit in units)


class Sharding(Unsharded):
    """The sharded parameters of a model, which is captured with whole ones without memory, and without hooks but casts.

    Guards of a capture look at these objects, so they are the same each time. Copies of inputs that change between the passes
    stay beside the plan, since several processes plan nothing again; they have room below its peak only.
    """

    keeps_peak = True

    def __init__(self, model: nn.Module, units: Sequence[ShardedUnit], ranks: SingleProcess) -> None:
        self._ranks = ranks
        packed = [(unit.name, unit.world, [p.packed for p in unit.parameters]) for unit in units]
        self.description = blake2b(repr(packed).encode(), digest_size=16).hexdigest()
        mode, whole = FakeTensorMode(allow_non_fake_inputs=True), dict[int, nn.Parameter]()
        for parameter in (p for unit in units for p in unit.parameters):
            sharded, place = parameter.sharded, parameter.packed
            with mode:
                value = torch.empty(place.shape, dtype=place.dtype, device=sharded.device)
            whole[id(sharded)] = nn.Parameter(value, requires_grad=sharded.requires_grad)
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = [
            (owner._parameters, name, whole[id(parameter)])
            for owner in model.modules()
            for name, parameter in owner._parameters.items()
            if id(parameter) in whole
        ]
        self._hooks = [
            table for state in list_states(model) for module in list_modules(state) for table in _list_hooks(module, state)
        ]

    @contextmanager
    def enter_captured_state(self) -> Iterator[None]:
        """Put whole parameters in place of the shards, and casts in place of the hooks."""
        hooks_before = [dict(hooks) for hooks, _ in self._hooks]
        for parameters, name, whole in self._places:
            whole.requires_grad_(parameters[name].requires_grad)
        try:
            for hooks, cast in self._hooks:
                for key in [key for key, hook in hooks.items() if hook.__module__.startswith("torch.distributed.fsdp")]:
                    if cast is None:
                        del hooks[key]
                    else:
                        hooks[key] = cast
            with put_parameters(self._places):
                yield
        finally:
            for (hooks, _), before in zip(self._hooks, hooks_before, strict=True):
                hooks.clear()
                hooks.update(before)

    def agree(self, plan: Hashable, batch: Batch, check: Callable[[], T]) -> T:
        """Return the result of `check` if it passes on all processes, before a step issues a collective.

        Raises:
            MismatchError, PlannerError: as `agree` of the processes.
        """
        try:
            found = check()
        except MismatchError as error:
            agree(self._ranks, plan, batch, error)
            raise
        agree(self._ranks, plan, batch)
        return found

    def unwrap(self, static: Sequence[Any], trained: Sequence[int]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return `static` with local tensors in place of DTensors, and the shardings of those that are `trained`, or None."""
        return [get_local_tensor(value) for value in static], [get_sharding(static[i]) for i in trained]

    def wrap(self, gradients: Sequence[torch.Tensor | None], shardings: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Return `gradients` as DTensors where there is a sharding."""
        return [
            gradient if gradient is None or sharding is None else build_dtensor(gradient, sharding)
            for gradient, sharding in zip(gradients, shardings, strict=True)
        ]


@contextmanager
def put_parameters(places: Sequence[tuple[dict[str, Any], str, nn.Parameter]]) -> Iterator[None]:
    """Put each parameter into its place: a table of a module, and a name."""
    before = [parameters[name] for parameters, name, _ in places]
    try:
        for parameters, name, parameter in places:
            parameters[name] = parameter
        yield
    finally:
        for (parameters, name, _), parameter in zip(places, before, strict=True):
            parameters[name] = parameter


def _list_hooks(module: nn.Module, state: Any) -> list[tuple[dict[int, Any], Callable[..., Any] | None]]:
    """Return the tables of hooks of a module, each with what replaces the hook of FSDP2; None for nothing."""
    policy = get_mixed_precision(state)
    inputs, outputs = policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype

    is_first = module is list_modules(state)[0]  # of a group, FSDP2's hook runs for the first one

    def prepare_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        given = (args, kwargs) if inputs is None else pytree.tree_map(partial(_cast, inputs), (args, kwargs))
        return _separate_gradients(given) if is_first else given

    def cast_outputs(_: nn.Module, __: Any, output: Any) -> Any:
        return pytree.tree_map(partial(_cast, outputs), output)

    return [
        (module._forward_pre_hooks, prepare_inputs),
        (module._forward_hooks, None if outputs is None else cast_outputs),
    ]


def _separate_gradients(given: Any) -> Any:
    """Return the inputs of a unit, whose gradients are summed in the unit before those of others are added, as in FSDP2.

    There one node of autograd has all inputs, and passes their gradients on in their order. Here each has a node, the last first,
    since autograd runs the nodes that were made last first.
    """
    leaves, spec = pytree.tree_flatten(given)
    for i in reversed(range(len(leaves))):
        if isinstance(leaves[i], torch.Tensor) and leaves[i].requires_grad:
            leaves[i] = leaves[i].view_as(leaves[i])
    return pytree.tree_unflatten(leaves, spec)


def _cast(dtype: torch.dtype | None, value: Any) -> Any:
    """Return `value` in `dtype` if it is a tensor of floating point."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def get_process_group(mesh: dist.device_mesh.DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all processes of `mesh`."""
    return flatten_mesh(mesh).get_group()
