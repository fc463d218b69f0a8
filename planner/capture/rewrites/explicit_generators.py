"""Random ops that draw from a generator of the user, given as ``generator=``.

No graph holds a generator: the argument is left out of the capture, the nodes are marked with the generator, and calls of the
ops name it again. Such ops keep the order of the program, and each is executed once, so that a generator draws the same numbers
as in eager PyTorch.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from planner.capture.program.program import Program, iterate_leaves
from planner.torch_private.capture import InstructionTranslatorBase, TensorVariable, TorchInGraphFunctionVariable, get_source_name
from planner.torch_private.patches import wrap

_MARK = "remat-planner: generator"


@dataclass(frozen=True, slots=True)
class _GeneratorMark:
    """A generator in the metadata of a node, shared by copies of the node."""

    generator: torch.Generator

    def __deepcopy__(self, _: object) -> "_GeneratorMark":
        return self


@contextmanager
def record_generators() -> Iterator[dict[str, torch.Generator]]:
    """Make Dynamo leave out generators that ops are given, and mark the nodes of these ops.

    Yields:
        The generators, by their names as Dynamo writes them.
    """
    found: dict[str, torch.Generator] = {}
    leave_out = partial(_leave_out_generator, found)
    with wrap(TorchInGraphFunctionVariable, "call_function", leave_out), wrap(TensorVariable, "call_method", leave_out):
        yield found


def _leave_out_generator(
    found: dict[str, torch.Generator], call: Callable[..., Any], variable: Any, tx: InstructionTranslatorBase, *args: Any
) -> Any:
    *first, kwargs = args
    generator = _record_generator(kwargs.get("generator"), found)
    if generator is None:
        return call(variable, tx, *args)
    graph = tx.output.current_tracer.graph
    before = set(graph.nodes)
    result = call(variable, tx, *first, {key: value for key, value in kwargs.items() if key != "generator"})
    for node in graph.nodes:
        if node not in before:
            node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: _GeneratorMark(generator)}
    return result


def _record_generator(variable: Any, found: dict[str, torch.Generator]) -> torch.Generator | None:
    """Return the generator that a variable of the user's code is; None for other values."""
    if variable is None:
        return None
    realized = variable.realize()
    value = getattr(realized, "value", None)
    if not isinstance(value, torch.Generator) or realized.source is None:
        return None
    found[get_source_name(realized.source)] = value
    return value


def get_explicit_generator(node: fx.Node) -> torch.Generator | None:
    """Return the generator that the random op `node` was given; None if it uses the default one."""
    found: _GeneratorMark | None = node.meta.get("custom", {}).get(_MARK)
    return None if found is None else found.generator


def list_generators(program: Program) -> list[torch.Generator]:
    """Return the generators of the user's own that the ops of `program` draw from."""
    ours = (program.generator, program.own_generator)
    found = (leaf for calls in program.calls for statement in calls.statements for leaf in iterate_leaves(statement.value))
    given = [leaf for leaf in found if isinstance(leaf, torch.Generator) and not any(leaf is own for own in ours)]
    return list(dict.fromkeys(given))


@contextmanager
def preserve_generator_states(program: Program) -> Iterator[None]:
    """Restore the states of the user's generators that `program` draws from at the end."""
    with ExitStack() as stack:
        for generator in list_generators(program):
            stack.callback(generator.set_state, generator.get_state())
        yield
