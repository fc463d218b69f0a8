"""NumPy's functions, which Dynamo captures as PyTorch's of the same name: those that compute may be rounded otherwise."""

import torch
from torch import fx

from planner.capture.frontend.source_lines import format_node
from planner.graphs.short_tracebacks import warn_caller
from planner.torch_private.capture import NUMPY_WRAPPERS

# They make, move or choose values, or round as the standard of floating-point numbers says.
_EXACT = {
    *("abs", "absolute", "add", "array", "asarray", "astype", "clip", "concatenate", "copy", "divide"),
    *("getitem", "max", "maximum", "min", "minimum", "mul", "multiply", "neg", "negative", "ones"),
    *("reshape", "sqrt", "stack", "sub", "subtract", "transpose", "truediv", "where", "zeros"),
}


def warn_of_numpy(graph: fx.Graph) -> None:
    """Warn of the functions of NumPy in `graph` whose results may differ from NumPy's, with the lines that call them."""
    found, eps = list[str](), 0.0
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(node.target, NUMPY_WRAPPERS) and isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            name = node.target.__name__.removeprefix("wrapped_")
            if name not in _EXACT:
                found.append(f"{name} ({format_node(node)})")
                eps = max(eps, torch.finfo(value.dtype).eps)
    if found:
        warn_caller(
            f"{', '.join(dict.fromkeys(found))} of NumPy runs as PyTorch's function of this name, which rounds otherwise: values "
            f"may differ from eager PyTorch's by a few times {eps:.0e} of them. Call NumPy outside of what is planned, or use "
            "PyTorch's function in both"
        )
