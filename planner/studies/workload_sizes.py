"""The training graph of a model at any batch size, or at values of another size option."""

from dataclasses import replace

import torch

from planner.capture.workload.workload import ModelSpec
from planner.graphs.errors import UnknownOptionError, UsageError
from planner.graphs.ir import Graph
from planner.studies.workload_tracing import Tracing


class SizedModel:
    """A model with a size, such as the batch, that is an option of the function that builds it.

    Args:
        model: the model; the search begins at its size, if given.
        way_out: advice for models without such an option.

    Attributes:
        first: the size in the model's options, in units; 1 if it has none.

    Raises:
        UsageError: that size is no positive integer.
    """

    def __init__(self, model: ModelSpec, option: str, tracing: Tracing, *, unit: int = 1, way_out: str) -> None:
        given = dict(model.options).get(option, str(unit))
        if not given.isdecimal() or int(given) < 1:
            raise UsageError(f"option {option!r} of {model} is {given!r}: a size that varies is a whole number above 0")
        self.first = max(1, int(given) // unit)
        self._model = model
        self._option = option
        self._tracing = tracing
        self._unit = unit
        self._way_out = way_out

    def trace_graph(self, units: int) -> Graph:
        """Return the graph of the training step at a size of `units` units.

        Raises:
            UsageError: the model has no such option, or cannot be built.
            TraceError: the step cannot be captured.
            MemoryError: it is to be measured, and the device has not enough memory.
        """
        options = {**dict(self._model.options), self._option: str(units * self._unit)}
        spec = replace(self._model, options=tuple(options.items()))
        try:
            return self._tracing.trace_graph(spec)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except UnknownOptionError as error:
            if error.option == self._option:
                raise UsageError(f"{error}; {self._way_out}") from error
            raise
