"""Measured time, workspace and sizes of compiled kernels, op by op, each on tensors that are made for it.

A step that does not fit with everything kept is measured so: besides the step's static tensors, no more is in memory than one
op needs. Buffers that an op reads are known from those that made them, so that ops are looked at in program order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from graphs.capture.lower import Capture
from graphs.capture.statics import allocated_bytes, dtype_name
from graphs.cost.allocator import Mark, segment_peaks
from graphs.cost.made_up import Like, least_time_s
from graphs.cost.replay import RealStep
from graphs.ir import Graph, Tensor

_Run = Callable[..., tuple[torch.Tensor | None, ...]]


@dataclass(frozen=True, slots=True)
class _Alone:
    """An op that can be executed: `run` with tensors like those of `reads`; None stands for what is no tensor."""

    run: _Run
    reads: tuple[Like | None, ...]

    def given(self, generator: torch.Generator) -> list[torch.Tensor | None]:
        return [None if like is None else like.make(generator) for like in self.reads]


def profile_launches(real: RealStep) -> Capture:
    """What was captured, with measured times, workspaces, and the sizes that its kernels really allocate.

    Numbers that ops read are made up, and whole numbers are 0: kernels take as long with them, as they do not branch. What is
    written of the model and the batch, and the random state, is afterwards as before.

    Args:
        real: what was captured, of compiled kernels; its sizes need not be real.
    """
    graph, device = real.capture.graph, real.device
    generator = torch.Generator(device).manual_seed(0)
    known: dict[int, Like | None] = {}
    tensors = list(graph.tensors)
    works: list[_Alone] = []
    times: list[float] = []
    with real.running():
        for op in graph.ops:
            work = _Alone(real.alone(op), tuple(known[t] for t in op.inputs if not graph.tensors[t].static))
            given = work.given(generator)
            for t, value in zip(op.outputs, work.run(*given), strict=True):
                known[t] = None if value is None else Like.whole(value)
                tensors[t] = _measured(tensors[t], value, device)
                del value
            times.append(least_time_s(lambda work=work, given=given: work.run(*given), device))  # type: ignore[misc]
            works.append(work)
            del given
        rises = _rises(works, generator, device)
    ops = tuple(
        replace(op, time_s=time_s, workspace_bytes=max(0, rise - sum(tensors[t].size_bytes for t in op.outputs)))
        for op, time_s, rise in zip(graph.ops, times, rises, strict=True)
    )
    provenance = {
        **graph.provenance,
        "times": "measured",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    return replace(real.capture, graph=Graph(ops, tuple(tensors), graph.kept, provenance))


def _measured(tensor: Tensor, value: torch.Tensor | None, device: torch.device) -> Tensor:
    if value is None or value.device != device:
        return replace(tensor, size_bytes=0)
    size_bytes = allocated_bytes(value.untyped_storage().nbytes(), device)
    return replace(tensor, size_bytes=size_bytes, shape=tuple(value.shape), dtype=dtype_name(value))


def _rises(works: Sequence[_Alone], generator: torch.Generator, device: torch.device) -> list[int]:
    """For each of `works` the bytes by which memory rises while it runs, outputs included."""

    def run(mark: Mark) -> None:
        for work in works:
            given = work.given(generator)
            mark()
            made = work.run(*given)
            mark()
            del made, given

    return segment_peaks(run, device)[1::2]
