"""Lossy compression of saved tensors: they are stored in few bits, and restored for the backward pass.

For each large floating-point tensor that the forward pass makes and the backward pass reads, and each form of ``FORMS``, two ops
are added: one that compresses it, and one that makes the *restored* tensor, of the same size and strides. The backward ops that
read the tensor have alternatives that read the restored one, and nothing else reads it: the forward pass, recomputed or not, is
exact, and so is the input of compression. The change of the gradients is measured on the real step
(``planner.capture.options.compress.sensitivity``); docs/options/compression.md describes all this.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from planner.capture.lowering.lower import Capture
from planner.capture.lowering.statics import compute_allocated_bytes
from planner.capture.options.additions import Additions, iterate_made_values
from planner.capture.options.compress.codec import DenseLayout, Keep, Restore
from planner.capture.options.compress.forms import FORMS
from planner.capture.rewrites.outputs import is_dense
from planner.graphs.ir import Kind, Op, Phase, Tensor
from planner.graphs.options.compress import COMPRESS, KEEP, RESTORE

_LEAST_ELEMENTS = 2048
_LEAST_SHARE = 1 / 100  # of the largest tensor that can be compressed
_MOST_READ = 3  # of the inputs of one op so many may be restored, the largest first
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def find_compressed(capture: Capture) -> Capture:
    """Return `capture` with ops that compress tensors; their times and variances are not measured."""
    additions = Additions(capture)
    found = _find_compressible(capture)
    restored: dict[int, int] = {}
    for t, value in found.items():
        restored[t] = _add_forms(additions, capture.graph.tensors[t], value)
    for op in _iterate_readers(capture):
        read = sorted((t for t in op.inputs if t in found), key=lambda t: -capture.graph.tensors[t].size_bytes)[:_MOST_READ]
        for count in range(1, len(read) + 1):
            for some in combinations(read, count):
                name = f"{op.name}_of_{'_'.join(map(str, sorted(some)))}"
                additions.add_variant(op, {t: restored[t] for t in some}, name, f"{COMPRESS}.read")
    return additions.build_capture()


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that may be compressed.

    Attributes:
        ops: by form, the op that compresses it, and the one that restores it.
    """

    tensor: int
    ops: Mapping[str, tuple[int, int]]


def list_kept_tensors(capture: Capture) -> list[Kept]:
    """Return the tensors that ``find_compressed`` has found."""
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for op in capture.graph.ops[len(capture.graph.program) :]:
        if op.target.startswith(f"{KEEP}."):
            (restore,) = capture.graph.consumers[op.outputs[0]]
            found.setdefault(op.inputs[0], {})[op.target.removeprefix(f"{KEEP}.")] = op.id, restore
    return [Kept(t, ops) for t, ops in found.items()]


def _find_compressible(capture: Capture) -> dict[int, torch.Tensor]:
    """Return the tensors that may be compressed, with their fake values."""
    graph = capture.graph
    found: dict[int, torch.Tensor] = {}
    readers = {t for op in _iterate_readers(capture) for t in op.inputs}
    for t, value in iterate_made_values(capture):
        tensor = graph.tensors[t]
        forward = graph.ops[tensor.producers[0]].phase is Phase.FORWARD
        if forward and tensor.kind is Kind.ACTIVATION and t in readers and _is_whole(tensor, value):
            found[t] = value
    least = _LEAST_SHARE * max((graph.tensors[t].size_bytes for t in found), default=0)
    return {t: value for t, value in found.items() if graph.tensors[t].size_bytes >= least}


def _is_whole(tensor: Tensor, value: torch.Tensor) -> bool:
    """Return True if the elements are numbers, sufficiently many, and fill the storage."""
    as_allocated = tensor.size_bytes == compute_allocated_bytes(value.untyped_storage().nbytes(), value.device)
    return value.dtype in _DTYPES and value.numel() >= _LEAST_ELEMENTS and is_dense(value) and as_allocated


def _iterate_readers(capture: Capture) -> Iterator[Op]:
    """Yield the ops of the backward pass that can read other tensors instead."""
    for op in capture.graph.program:
        movable = not (op.random or op.mutates or capture.program.calls[op.id].launches)
        if movable and op.phase is Phase.BACKWARD:
            yield op


def _add_forms(additions: Additions, tensor: Tensor, value: torch.Tensor) -> int:
    """Add ops that compress and restore `tensor` in each form; return the restored tensor."""
    capture = additions.capture
    producer = capture.graph.ops[tensor.producers[0]]
    made = additions.add_tensor(f"{tensor.name}.restored", value)
    for form, packing in FORMS.items():
        layout = DenseLayout(value, packing)
        kept = additions.add_tensor(f"{tensor.name}.{form}", layout.fake)
        additions.add_op(
            Keep(layout, tensor.id),
            [tensor.id],
            like=producer,
            name=f"{tensor.name}_keep_{form}",
            target=f"{KEEP}.{form}",
            outputs=[kept],
        )
        how = f"in {form} bits" if form.isdecimal() else f"as {form}"
        additions.add_op(
            Restore(layout),
            [kept],
            like=producer,
            name=f"{tensor.name}_restore_{form}",
            target=f"{RESTORE}.{form}",
            outputs=[made],
            differs=f"lossy: activations kept {how} for the backward pass (gradients)",
        )
    return made
