"""What ops cost on a device that is not there, in place of ``planner.eager.device_costs.DeviceCosts``."""

from collections.abc import Callable

from planner.eager.sizes import KnownOp


class Costs:
    """Every op takes a second, and as much memory as it is told; there is always enough."""

    def __init__(self, taken_bytes: int = 0) -> None:
        self.taken_bytes = taken_bytes
        self.ops = 0

    def start(self, known: KnownOp) -> bool:
        self.ops += 1
        known.measurements += 1
        return known.measurements == 1

    def stop(self) -> tuple[float, int]:
        return 1.0, self.taken_bytes

    def forget_failures(self) -> None:
        pass

    def find_block(self, size_bytes: int, evict_after: Callable[[Exception], bool]) -> None:
        pass

    def check_memory(self, function: object) -> None:
        pass
