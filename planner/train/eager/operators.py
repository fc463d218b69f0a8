"""The effects of PyTorch's operators on memory and random generators, from their schemas and tags."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from planner.capture.rewrites.outputs import KNOWN_NAMESPACES
from planner.torch_private.core import OpOverload
from planner.train.eager.tensor_arguments import list_names_of_outs

# These give a tensor another storage, or resize its storage.
_REBIND = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}
# Operators that update running statistics: positions of the running mean, which the variance follows, and of the training flag
# (None: always). Only some of their schemas declare these writes.
_RUNNING_STATISTICS: dict[str, tuple[int, int | None]] = {
    "aten::native_batch_norm": (3, 5),
    "aten::cudnn_batch_norm": (3, 5),
    "aten::miopen_batch_norm": (3, 5),
    "aten::_native_batch_norm_legit": (3, 5),
    "aten::_batch_norm_with_update": (3, None),
    "aten::batch_norm_update_stats": (1, None),
    "aten::batch_norm_gather_stats": (3, None),
    "aten::batch_norm_gather_stats_with_counts": (3, None),
}
# The sizes of their outputs depend on data, although some of their overloads have no tag that says so.
_SIZED_BY_DATA = {"aten::_pack_padded_sequence", "aten::_padded_dense_to_jagged_forward", "aten::index"}


class Replay(IntEnum):
    """How an operator that updates statistics computes the same outputs without doing so; as in op_records.h."""

    NONE = 0
    WITH_NONE = 1
    WITHOUT_STATISTICS = 2


_REPLAYS = {
    "aten::native_batch_norm": Replay.WITH_NONE,
    "aten::cudnn_batch_norm": Replay.WITH_NONE,
    "aten::miopen_batch_norm": Replay.WITH_NONE,
    "aten::_native_batch_norm_legit": Replay.WITHOUT_STATISTICS,
}


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts about one operator.

    Attributes:
        function: the operator.
        name: its name, without the overload.
        passes: it only makes views or reads sizes: neither memory nor contents change.
        mutated: positions of the arguments that it writes, without running statistics.
        allocates_first: it allocates before it writes: if the allocator fails, it has written nothing.
        rebinds: it gives its argument another storage, or resizes it.
        resizes_out: it resizes the tensors that are given for its results (``out=``).
        is_plain_write: it returns nothing new, and the tensors that it writes keep their storages and sizes.
        random: it draws from a generator.
        draws: the same, or it is a custom operator that may draw from one without saying so.
        repeatable: executed again, it has the same outputs for the same inputs and the same random state.
        sized_by_data: the sizes of its outputs may depend on the contents of its inputs.
        reads_to_host: its result is a Python number, read from a tensor.
        statistics: position of the running mean, which the running variance follows; None if it has none.
        training: position of the flag that enables the update; None if it always updates them.
        replay: how its outputs are recomputed after an update: by itself with None for the statistics, by its overload without
            them, or not.
    """

    function: Callable[..., Any]
    name: str
    passes: bool
    mutated: tuple[int, ...]
    allocates_first: bool
    rebinds: bool
    resizes_out: bool
    is_plain_write: bool
    random: bool
    draws: bool
    repeatable: bool
    sized_by_data: bool
    reads_to_host: bool
    statistics: int | None
    training: int | None
    replay: Replay

    @classmethod
    @cache
    def of(cls, op: OpOverload) -> "Operator":
        """Return the facts about `op`, which are never freed: the C++ library refers to them."""
        schema, tags = op._schema, op.tags
        name = schema.name
        rebinds, is_known = name in _REBIND, op.namespace in KNOWN_NAMESPACES
        is_random = torch.Tag.nondeterministic_seeded in tags
        mutated = tuple(
            i for i, argument in enumerate(schema.arguments) if argument.alias_info is not None and argument.alias_info.is_write
        )
        returns_nothing_new = all(value.alias_info is not None for value in schema.returns)
        resizes_out = bool(list_names_of_outs(op))
        statistics, training = _RUNNING_STATISTICS.get(name, (None, None))
        return cls(
            function=op,
            name=name,
            passes=(op.is_view or torch.Tag.inplace_view in tags or not _has_tensors(schema)) and not rebinds,
            mutated=() if statistics is not None else mutated,
            # Batch norm allocates its outputs before it writes statistics, and pointwise ops are one kernel.
            allocates_first=not mutated or statistics is not None or torch.Tag.pointwise in tags,
            rebinds=rebinds,
            resizes_out=resizes_out,
            is_plain_write=bool(mutated) and returns_nothing_new and not rebinds and not resizes_out,
            random=is_random,
            draws=is_random or (not is_known and torch.Tag.pt2_compliant_tag in tags),
            repeatable=is_known or torch.Tag.pt2_compliant_tag in tags,
            sized_by_data=torch.Tag.dynamic_output_shape in tags or name in _SIZED_BY_DATA,
            reads_to_host=name == "aten::_local_scalar_dense",
            statistics=statistics,
            training=training,
            replay=_REPLAYS.get(name, Replay.NONE),
        )


def _has_tensors(schema: Any) -> bool:
    """Return True if an operator of this schema reads or returns tensors whose memory may matter."""
    return any("Tensor" in str(value.type) for value in (*schema.returns, *schema.arguments))
