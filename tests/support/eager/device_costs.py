"""What ops cost on a device that is not there."""

from collections import defaultdict

import pytest
import torch

from planner.train.eager.device_costs import DeviceCosts, _Measured
from planner.train.eager.sizes import KnownOp


class Costs(DeviceCosts):
    """Every op takes a second, and as much memory as it is told; there is always enough.

    Attributes:
        taken_bytes: bytes that each op takes, with its outputs.
        started: the signatures of the ops that the recorder has executed.
        measured: number of ops that were measured.
        blocks: bytes of the blocks that were asked for.
    """

    def __init__(self, taken_bytes: int = 0) -> None:
        self.taken_bytes = taken_bytes
        self.measured = 0
        self.started: list[KnownOp] = []
        self.blocks: list[int] = []
        self._device = torch.device("cpu", 0)
        self._measured = defaultdict(_Measured)

    def get_in_use_bytes(self) -> int:
        return 0

    def find_missing_block(self, size_bytes: int) -> torch.OutOfMemoryError | None:
        self.blocks.append(size_bytes)
        return None

    def start(self, known: KnownOp) -> bool:
        self.started.append(known)
        return super().start(known)

    def begin(self) -> bool:
        self.measured += 1
        return True

    def stop(self) -> tuple[float, int]:
        return 1.0, self.taken_bytes


def measure_by(costs: Costs, patch: pytest.MonkeyPatch) -> Costs:
    """Let blocks on the CPU measure their ops by `costs`, and return it."""

    def create(_: torch.device) -> Costs:
        costs._measured.clear()  # each block begins without
        return costs

    patch.setattr("planner.train.eager.session.create_costs", create)
    return costs
