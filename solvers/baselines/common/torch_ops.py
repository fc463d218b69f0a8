"""Kinds of ops by their names in PyTorch, as its policies distinguish them (torch 2.13, functorch partitioner)."""

from planner.graphs.ir import Op

ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    }
)
MATMUL = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"})
CONVOLUTION = frozenset({"convolution", "cudnn_convolution", "_convolution"})
UPSAMPLING = frozenset({"upsample_bilinear2d"})
COMPUTE_INTENSIVE = ATTENTION | MATMUL | CONVOLUTION | UPSAMPLING

# Elementwise ops and data movement: free to recompute for the partitioner, as they may be fused.
CHEAP = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "abs", "reciprocal", "pow", "sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh"),
        *("sigmoid", "relu", "gelu", "silu", "leaky_relu", "hardtanh", "elu", "softplus", "threshold", "clamp", "erf"),
        *("where", "masked_fill", "tril", "triu", "to", "_to_copy", "clone", "copy", "cat", "stack", "expand", "repeat"),
        *("full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "arange", "index", "gather", "constant_pad_nd"),
        *("eq", "ne", "ge", "gt", "le", "lt", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_not"),
    }
)


def extract_base_name(target: str) -> str:
    """Return the name of a target without namespace, overload, and the suffix of in-place ops."""
    parts = target.split(".")
    return (parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[0]).rstrip("_") or target


def is_one_of(op: Op, names: frozenset[str]) -> bool:
    """Return True if `names` has the target of `op`, or its base name."""
    return op.target in names or extract_base_name(op.target) in names
