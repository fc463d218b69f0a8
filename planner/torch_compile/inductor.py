"""Inductor's kernels for what a plan keeps and computes again.

Inductor decomposes the joint graph before it is planned, and fuses what the two modules hold after: what it fuses takes no
memory in between, so that a predicted peak is one that is not reached.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx

from graphs.torch_private.inductor import CustomPartitionerFn, compile_fx

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def compile_kernels(module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """`module` compiled by Inductor, forward and backward apart as `partition` says.

    Args:
        module, inputs: what Dynamo captured.
        partition: called with the joint graph, as AOTAutograd's ``partition_fn`` is.
    """
    # A schedule depends on the budget, which Inductor's cache knows nothing of.
    patches = {"custom_partitioner_fn": _Partitioner(partition), "fx_graph_cache": False}
    return cast(Callable[..., Any], compile_fx(module, inputs, config_patches=patches))


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        """None: of no use to a cache."""
