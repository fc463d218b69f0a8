"""``torch.compile(model, backend="planner", options={"budget": "8GB"})``: Dynamo's graphs, each planned within the budget.

AOTAutograd makes forward and backward of what Dynamo captures; which tensors are kept between them, and what is computed
again when, is ours (``planner.partition``). Guards, graph breaks and recompilations stay Dynamo's.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._guards import CompileContext

from graphs.devices import DEVICES, Device, get_device
from graphs.errors import InfeasibleError, PlannerError
from graphs.units import format_bytes
from planner.partition import capture_joint, kept_bytes, split
from planner.solving import budget_in_bytes, solve, summarize

_OPTIONS = ("budget", "compile", "roofline", "time_limit", "tolerance")
_COMPILERS = ("eager", "inductor")


@dataclass
class _Budget:
    """What one call of ``torch.compile`` may use, and what each of its graphs keeps of it until the backward pass.

    Attributes:
        options: as given; held, so that no other dict gets its identity.
        kept_bytes: by graph; the most of those that are compiled for it, one for each shape.
    """

    options: Mapping[str, object]
    kept_bytes: dict[object, int] = field(default_factory=dict)

    def left_for(self, graph: object, peak_bytes: int) -> int:
        """Bytes for `graph`, whose peak without recomputation is `peak_bytes`, beside what the others keep."""
        budget = self.options["budget"]
        assert isinstance(budget, str | int)
        whole = budget_in_bytes(budget, peak_bytes)
        others = sum(kept for other, kept in self.kept_bytes.items() if other != graph)
        if others and not str(budget).endswith("%"):
            warnings.warn(
                f"the model is captured as several graphs: this one gets {format_bytes(max(0, whole - others))} of the budget of "
                f"{format_bytes(whole)}, for those before it keep {format_bytes(others)} until the backward pass",
                stacklevel=2,
            )
            return max(1, whole - others)
        return whole


_BUDGETS: dict[int, _Budget] = {}


def planner(module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, object] | None = None) -> Callable[..., Any]:
    """The backend, for ``torch.compile`` to call.

    Args:
        module, inputs: what Dynamo captured.
        options: ``budget`` (as in ``planner.compile``; of parameters, inputs, gradients and activations of each graph, less
            what earlier graphs keep; a percentage is of each graph's own peak), ``compile`` (whose kernels run: those of
            eager PyTorch, or ``inductor``), ``roofline`` (the device whose times
            are modelled; by default the one the model is on), ``time_limit`` (seconds per graph, 60), ``tolerance`` (0.001).

    Raises:
        PlannerError: unknown options, or no budget.
        InfeasibleError, LimitError: as ``planner.solve``, for a graph that does not fit.
    """
    budget = _BUDGETS.setdefault(id(options), _Budget(_checked(options)))
    context = CompileContext.try_get()
    frame = None if context is None or context.compile_id is None else context.compile_id.frame_id

    def partition(
        joint: fx.GraphModule, _: object, *, num_fwd_outputs: int, **__: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return _plan(joint, budget, frame, num_fwd_outputs)

    # As training loops do it: backward() is called outside autocast.
    with functorch_config.patch(backward_pass_autocast="off"):
        if budget.options.get("compile") == "inductor":
            from planner.inductor import compile_kernels  # importing Inductor takes a second

            return compile_kernels(module, inputs, partition)
        compiled: Callable[..., Any] = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)(module, inputs)
    return compiled


def _plan(joint: fx.GraphModule, budget: _Budget, frame: object, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    captured = capture_joint(
        joint,
        _device(joint, budget.options),
        measure="roofline" not in budget.options and budget.options.get("compile") != "inductor",
    )
    allowed = budget.left_for(frame, summarize(captured.graph).store_all_peak_bytes)
    limit, tolerance = budget.options.get("time_limit", 60.0), budget.options.get("tolerance", 1e-3)
    assert isinstance(limit, float | int) and isinstance(tolerance, float | int)
    try:
        plan = solve(captured.graph, allowed, time_limit_s=limit, tolerance=tolerance)
    except InfeasibleError as error:
        if budget.kept_bytes.keys() <= {frame}:
            raise
        raise InfeasibleError(
            f"{error} The model is captured as several graphs, and this is not the first: what breaks it "
            "(TORCH_LOGS=graph_breaks says where) costs memory too"
        ) from error
    budget.kept_bytes[frame] = max(budget.kept_bytes.get(frame, 0), kept_bytes(captured.graph, plan.schedule))
    return split(joint, captured, plan.schedule, forward_outputs=forward_outputs)


def _checked(options: Mapping[str, object] | None) -> Mapping[str, object]:
    given = options or {}
    for name, value in given.items():
        if name not in _OPTIONS:
            raise PlannerError(f"unknown option {name!r} of the backend planner: choose from {', '.join(_OPTIONS)}")
        if name in ("time_limit", "tolerance") and not (isinstance(value, int | float) and math.isfinite(value)):
            raise PlannerError(f"option {name!r} is {value!r}: must be a number")
    if given.get("compile", "eager") not in _COMPILERS:
        raise PlannerError(f"option 'compile' is {given['compile']!r}: choose from {', '.join(_COMPILERS)}")
    if not isinstance(given.get("budget"), str | int):
        raise PlannerError(
            'the backend planner needs a budget: torch.compile(model, backend="planner", options={"budget": "8GB"})'
        )
    return given


def _device(joint: fx.GraphModule, options: Mapping[str, object]) -> Device:
    """The device whose times are modelled."""
    if "roofline" in options:
        return get_device(str(options["roofline"]))
    where = next(
        n.meta["val"].device for n in joint.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)
    )
    if where.type == "cpu":
        return get_device("cpu")
    name = torch.cuda.get_device_name(where).lower().replace(" ", "")
    for known in DEVICES:
        if known in name:
            return get_device(known)
    raise PlannerError(
        f"no times are known for {name!r}: name a device like it, options={{'roofline': ...}}, of {', '.join(DEVICES)}"
    )
