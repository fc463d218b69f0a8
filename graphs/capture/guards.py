"""What a capture took from Python, and would silently keep: each is a guard, checked before every step.

Dynamo knows every value that it read while it captured: a coefficient, ``Dropout.p``, the class of a submodule, its hooks,
which weights are one tensor. ``torch.compile`` checks these guards at each call, in microseconds; so does a planned step. What
is left out are guards that need not hold for a plan to be right, or that the step checks itself with its own words.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn

from graphs.errors import MismatchError
from graphs.torch_private.capture import CaptureOutput, CheckFunctionManager, Guard, GuardsSet, dynamo_phase
from graphs.torch_private.core import disable_current_modes, is_in_torch_dispatch_mode, nn_module

WAYS_OUT = (
    "plan again (planner.compile), or plan with replan=True, which does so by itself; a number that changes often may be a "
    "tensor that is changed in place, which a plan reads at every step"
)

OTHER_MODE = (
    "To evaluate, call model(...) itself, or the step under torch.no_grad(). To train, call model.{mode}() first, or plan in "
    "this mode too: planner.compile again, or with replan=True"
)

# Whether a step records gradients, how many threads it has, and what runs around it, is no part of a plan.
_AMBIENT = {
    "GRAD_MODE",
    "DETERMINISTIC_ALGORITHMS",
    "GLOBAL_STATE",
    "TORCH_FUNCTION_STATE",
    "SHAPE_ENV",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
}
# Names of modules and builtins do not change while a program trains.
_FIXED = {"MODULE_MATCH", "BUILTIN_MATCH"}
# What is called with is checked by a step's signature; here only that what was one tensor still is, and values inside of objects.
_OF_ARGUMENTS = {"DUPLICATE_INPUT", "CONSTANT_MATCH", "EQUALS_MATCH"}
_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)

Scope = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that the step reads, and that is neither a parameter nor a buffer nor an input: an attribute, a global.

    Attributes:
        name: where it is, as Dynamo writes it.
        find: finds it there.
        tensor: the one that was captured.
    """

    name: str
    find: Callable[[Scope, Scope], object]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards of one capture.

    Attributes:
        manager: of Dynamo.
        scope: the globals that guards name.
        outside: tensors that must still be the same objects.
        state: of PyTorch as a whole.
    """

    manager: CheckFunctionManager
    scope: Scope
    outside: tuple[Outside, ...]
    state: Mapping[str, object]

    def check(self, step: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Refuse a step that is no longer as it was captured.

        Args:
            step: as it was captured, or another ``TrainingStep`` of the same model and loss function.
            args, kwargs: what it is called with.

        Raises:
            MismatchError: says what changed, from what to what, where it is read, and what to do.
        """
        local = {"self": step, "args": args, "kwargs": kwargs}
        # A mode around the step, such as a counter of FLOPs, changes how tensors are dispatched: not what the step is.
        with disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext():
            if not self.manager.guard_manager.check(local):
                raise MismatchError(self._why(local))
        for outside in self.outside:
            if outside.find(local, self.scope) is not outside.tensor:
                name = readable(outside.name, local, self.scope)
                raise MismatchError(
                    f"{name} is another tensor than when the step was planned: change that one in place ({name}.copy_(...)), or "
                    f"{WAYS_OUT}"
                )
        if self.state != (now := state()):
            name = next(name for name, value in self.state.items() if value != now[name])
            raise MismatchError(
                f"{name} was {self.state[name]!r} when the step was planned, and is {now[name]!r} now; {WAYS_OUT}"
            )

    def _why(self, local: Scope) -> str:
        found = self.manager.guard_manager.check_verbose(local)
        parts = [part for part in found.verbose_code_parts if _fails(part, local, self.scope)] or found.verbose_code_parts
        why = explain(parts[0] if parts else "something that the step depends on", local, self.scope)
        where = _where(found.user_stack)
        if parts and _is_mode(parts[0]):
            mode = "train" if "== True" in _code(parts[0]) else "eval"
            return f"{why}{where}. {OTHER_MODE.format(mode=mode)}"
        return f"{why}{where}: it is part of the plan, as it was; {WAYS_OUT}"


def build_guards(
    output: CaptureOutput, code: Any, step: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Guards:
    """The guards of what Dynamo captured of `step`, called with these arguments.

    Args:
        output: of ``fullgraph_capture``.
        code: the code object that was captured.

    Raises:
        AssertionError: Dynamo finds that a guard does not hold right after it was made.
    """
    captured = output.graph_capture_output
    graph = captured.output_graph
    graph._guards = GuardsSet(type(graph.guards.inner)(guard for guard in graph.guards if _matters(guard)))
    with dynamo_phase("build_guards"):
        manager = captured.build_guards(code)
    local, scope = {"self": step, "args": args, "kwargs": kwargs}, captured.f_globals
    sources = [source.name for source in graph.export_metadata.graph_input_idx_to_local_source.values() if source]
    return Guards(manager, scope, tuple(_outside(sources, step, local, scope)), state())


def guarded_names(output: CaptureOutput) -> frozenset[str]:
    """Names of all that guards look at, as Dynamo writes them."""
    return frozenset(guard.name for guard in output.graph_capture_output.output_graph.guards)


def state() -> dict[str, object]:
    """What a capture depends on in PyTorch as a whole; autocast is looked at by the step itself."""
    hooks = [getattr(nn_module, name) for name in _HOOKS]
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "the kernels that scaled_dot_product_attention may choose from": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ),
        "the number of hooks on all modules": tuple(map(len, hooks)),
    }


def _matters(guard: Guard) -> bool:
    kind, name = guard.create_fn_name(), guard.name
    if kind in _AMBIENT or kind in _FIXED or name.startswith(("G['__builtins_dict__", "__import__(")):
        return False
    if name.startswith(("L['args']", "L['kwargs']")):
        return kind in _OF_ARGUMENTS
    if kind == "DUPLICATE_INPUT":  # modules are often known under several names
        return "._modules[" in name or name.startswith("L[")
    return not name.startswith("G['__import_torch_dot_")


def _outside(sources: Iterable[str], step: nn.Module, local: Scope, scope: Scope) -> Iterable[Outside]:
    """Of the graph's inputs those that a program holds as constants."""
    known = {id(tensor) for tensor in (*step.parameters(), *step.buffers())}
    for name in sources:
        if name.startswith(("L['args']", "L['kwargs']")):
            continue
        find = eval(f"lambda L, G: {name}", {})
        tensor = find(local, scope)
        if isinstance(tensor, torch.Tensor) and id(tensor) not in known:
            yield Outside(name, find, tensor)


_PATHS = (
    (r"L\['self'\]\._modules\['(model|loss_fn)'\]", r"\1"),
    (r"L\['self'\]\.(model|loss_fn)", r"\1"),
    (r"L\['self'\]", "the step"),
    (r"L\['args'\]\[(\d+)\]", r"input \1"),
    (r"L\['kwargs'\]\['([^']+)'\]", r"input '\1'"),
    (r"\.__dict__\['(\w+)'\]", r".\1"),
    (r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1"),
    (r"(?<![\w.])G\['__import_([^']+)'\]", lambda found: found[1].replace("_dot_", ".").replace("__main__.", "")),
    (r"(?<![\w.])G\['([^']+)'\]", r"\1"),
    (r"__main__\.", ""),
)


def readable(text: str, local: Scope, scope: Scope) -> str:
    """Dynamo's names in `text` as a person would write them: ``model.bn.momentum``, ``config.alpha``."""
    closure = re.compile(r"((?:L|G)\[[^ ]*?)\.__closure__\[(\d+)\]\.cell_contents")
    while found := closure.search(text):
        try:
            variable = eval(found[1], {"L": local, "G": scope}).__code__.co_freevars[int(found[2])]
        except Exception:  # noqa: BLE001  # a name that cannot be found is shown as it is
            break
        text = text[: found.start()] + variable + text[found.end() :]
    for pattern, path in _PATHS:
        text = re.sub(pattern, path, text)
    return text


_PATTERNS = (
    (r"(?P<source>.+) == (?P<planned>.+)", "{name} was {planned} when the step was planned, and is {now} now"),
    (r"(?P<source>.+) is (?P<planned>None|True|False)", "{name} was {planned} when the step was planned, and is {now} now"),
    (
        r"___check_type_id\((?P<source>.+), \d+\), type=<class '(?P<planned>.+)'>",
        "{name} was a {planned} when the step was planned, and is a {type} now",
    ),
    (
        r"not ___dict_contains\('(?P<planned>\w+)', (?P<source>.+)\.__dict__\)",
        "{name}.{planned} was set since the step was planned",
    ),
    (r"not (?P<source>.+)\.(?P<planned>_\w*hooks\w*)", "hooks of {name} were added since the step was planned"),
    (
        r"len\((?P<source>.+)\.(?P<planned>_\w*hooks\w*)\) != .*",
        "hooks of {name} were added or removed since the step was planned",
    ),
    (r"len\((?P<source>.+)\) != (?P<planned>\d+)", "{name} had {planned} items when the step was planned, and has {length} now"),
    (r"len\((?P<source>.+)\) == (?P<planned>\d+)", "{name} had {planned} items when the step was planned, and has {length} now"),
    (
        r"tensor '(?P<source>.+)' requires_grad mismatch\. expected requires_grad=(?P<planned>\d).*",
        "{name}.requires_grad was {planned_flag} when the step was planned, and is not now",
    ),
    (
        r"tensor '(?P<source>.+)' (?P<planned>.+? mismatch.*?)(?:\. Guard failed.*)?",
        "{name} is not as it was when the step was planned: {planned}",
    ),
    (
        r"expected type of '(?P<source>.+)' to be a tensor type.*",
        "{name} was a tensor when the step was planned, and is {now} now",
    ),
    (
        r"(?P<source>[LG]\[.+) is (?P<planned>[LG]\[.+)",
        "{name} and {planned} were one object when the step was planned (tied weights, say), and are two now",
    ),
)


def explain(part: str, local: Scope, scope: Scope) -> str:
    """What a guard that does not hold says, in words."""
    code = _code(part)
    for pattern, words in _PATTERNS:
        if (found := re.fullmatch(pattern, code, re.DOTALL)) is None:
            continue
        now = _value(found["source"], local, scope)
        groups = found.groupdict()
        planned = readable(str(groups.get("planned", "")), local, scope)
        text = words.format(
            name=readable(found["source"], local, scope),
            planned=planned,
            planned_flag=planned == "1",
            now=_shown(now),
            type=f"{type(now).__module__}.{type(now).__qualname__}",
            length=len(now) if hasattr(now, "__len__") else "none",
        )
        return text + (" (train() or eval() was called)" if _is_mode(part) else "")
    return f"{readable(code, local, scope)} does not hold any more, as it did when the step was planned"


def _shown(value: object) -> str:
    text = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _value(name: str, local: Scope, scope: Scope) -> Any:
    try:
        return eval(name, {"L": local, "G": scope})
    except Exception:  # noqa: BLE001  # what is not there any more
        return None


def _code(part: str) -> str:
    """A guard without the comment that says where it comes from."""
    return re.split(r"\s{2,}# ", part, maxsplit=1)[0].strip()


def _is_mode(part: str) -> bool:
    """Return whether the guard `part` is for the train or eval mode of a module."""
    return _code(part).split(" == ")[0].endswith(".training")


def _fails(part: str, local: Scope, scope: Scope) -> bool:
    """Whether the guard `part` is known not to hold: several are listed where they are checked together."""
    try:
        return not eval(_code(part), {"L": local, "G": scope})
    except Exception:  # noqa: BLE001  # not every guard is an expression
        return True


def _where(stack: Iterable[FrameSummary] | None) -> str:
    frames = list(stack or ())
    return f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
