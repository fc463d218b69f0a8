"""Random ops that draw from a generator of the user's own, which is given as ``generator=``.

No graph holds a generator: the argument is left out while the step is captured, the nodes that are made are marked with what it
was, and calls of the ops name it again. The order of such ops is that of the program, and each is executed once: a generator
then draws what it draws in eager PyTorch.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from planner.capture.lowering.program import Program
from planner.torch_private.capture import InstructionTranslatorBase, TensorVariable, TorchInGraphFunctionVariable, source_name

_MARK = "remat-planner: generator"


@dataclass(frozen=True, slots=True)
class _Given:
    """A generator in what is known of a node, which is copied with the node."""

    generator: torch.Generator

    def __deepcopy__(self, _: object) -> "_Given":
        return self


@contextmanager
def own_generators() -> Iterator[dict[str, torch.Generator]]:
    """Inside, Dynamo leaves out generators that ops are given, and marks the nodes that it makes for these ops.

    Returns:
        The generators, by where they are, as Dynamo writes it.
    """
    found: dict[str, torch.Generator] = {}

    def leaving_out(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, tx: InstructionTranslatorBase, *args: Any) -> Any:
            *first, kwargs = args
            generator = _generator(kwargs.get("generator"), found)
            if generator is None:
                return call(self, tx, *args)
            graph = tx.output.current_tracer.graph
            before = set(graph.nodes)
            result = call(self, tx, *first, {key: value for key, value in kwargs.items() if key != "generator"})
            for node in graph.nodes:
                if node not in before:
                    node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: _Given(generator)}
            return result

        return called

    with ExitStack() as stack:
        for variable, method in ((TorchInGraphFunctionVariable, "call_function"), (TensorVariable, "call_method")):
            stack.enter_context(patch.object(variable, method, leaving_out(getattr(variable, method))))
        yield found


def _generator(variable: Any, found: dict[str, torch.Generator]) -> torch.Generator | None:
    """Return the generator that stands in the user's code; None for other values."""
    if variable is None:
        return None
    realized = variable.realize()
    value = getattr(realized, "value", None)
    if not isinstance(value, torch.Generator) or realized.source is None:
        return None
    found[source_name(realized.source)] = value
    return value


def own_generator(node: fx.Node) -> torch.Generator | None:
    """Return the generator that the random op `node` was given; None for one that draws from the default one."""
    found: _Given | None = node.meta.get("custom", {}).get(_MARK)
    return None if found is None else found.generator


def given_to(program: Program) -> list[torch.Generator]:
    """Return the generators of the user's own that the ops of `program` draw from."""
    ours = {program.namespace.get(name) for name in (program.generator, program.own_generator)}
    return [value for value in program.namespace.values() if isinstance(value, torch.Generator) and value not in ours]


@contextmanager
def states_kept(program: Program) -> Iterator[None]:
    """Afterwards the generators of the user's own that `program` draws from are as they were."""
    with ExitStack() as stack:
        for generator in given_to(program):
            stack.callback(generator.set_state, generator.get_state())
        yield
