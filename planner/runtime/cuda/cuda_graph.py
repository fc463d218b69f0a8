"""CUDA graphs as recordings: what ``torch.cuda.graph`` captures, and the memory it keeps.

Warm-up, stream and pool are as in ``torch.cuda.make_graphed_callables`` and Inductor's CUDA graph trees.

Known weakness: a recording keeps whole segments of its pool, also where it uses a part of them. ``graph_pool`` predicts how much,
and ``planner.train.compile.graph_room`` leaves room for it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from planner.graphs.errors import TraceError, is_handled_by_a_caller
from planner.torch_private.core import clear_cublas_workspaces

T = TypeVar("T")

_WARM_UPS = 3
_DEFAULT_POOL = (0, 0)


class CudaGraphs:
    """A recorder of functions as CUDA graphs that share a memory pool, to be replayed in the order of recording."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], object]) -> None:
        """Call `run` on the capture stream, so that libraries allocate their workspaces and choose their kernels."""
        present = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(present)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
        finally:  # also after a failure: memory restored or freed then is used on this stream until here
            present.wait_stream(self._stream)

    def record(self, function: Callable[..., T], *args: Any) -> tuple[T, Callable[[], None]]:
        """Capture the launches of `function`; return its result, empty until the first replay, and what replays it."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may prepare batches meanwhile. A failed capture leaves its stream as the current one.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        # The workspaces of cuBLAS must be in the pool too: elsewhere others may free them while the graph still uses them.
        clear_cublas_workspaces()
        try:
            with torch.cuda.stream(self._stream), capture:
                returned = function(*args)
        except RuntimeError as error:
            why = str(_find_first(error)).strip().partition("\n")[0]
            raise TraceError(f"the step cannot be captured as a CUDA graph: {why}; leave out cuda_graph=True") from error
        finally:
            clear_cublas_workspaces()
        return returned, graph.replay

    def count_held_bytes(self) -> int:
        """Return the bytes of the private pool, including fragments and rounding."""
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self._pool)


def count_hidden_pool_bytes(device: torch.device) -> int:
    """Return the bytes that CUDA graphs keep on `device` and that the allocator does not count as allocated.

    Between replays, tensors inside a graph are free for the allocator, but their memory is reserved for the graph.
    """
    if device.type != "cuda":
        return 0
    own = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index and s["segment_pool_id"] != _DEFAULT_POOL]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def _find_first(error: BaseException) -> BaseException:
    """Return the first error before `error`: after a failure the end of the capture fails too, without the reason."""
    while error.__context__ is not None and not is_handled_by_a_caller(error.__context__):
        error = error.__context__
    return error
