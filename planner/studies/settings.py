"""Common settings of the solves of a study, and its total limits. Never imports torch."""

import math
from dataclasses import dataclass

from planner.settings.counted_memory import CountedMemory
from planner.settings.option_settings import RECOMPUTATION, OptionSettings


@dataclass(frozen=True, slots=True)
class StudySettings:
    """Settings of a study of many budgets or methods.

    Attributes:
        model: name of the graph in rows.
        tolerance: on gaps, relative to the whole step.
        time_limit_s: seconds for each solve.
        total_time_limit_s: seconds for all of them.
        memory: kind of memory that budgets count; None: on CUDA what PyTorch's allocator reserves, on the CPU the bytes of
            tensors.
        jobs: processes that solve at the same time. With more than one, the main module is imported in each: a script needs
            ``if __name__ == "__main__":``.
        cluster: address of a Dask scheduler, whose workers solve instead.
        repeats, seed: number of timed steps, and seed of the weights.
    """

    model: str = ""
    tolerance: float = 1e-3
    time_limit_s: float = 60.0
    total_time_limit_s: float = math.inf
    options: OptionSettings = RECOMPUTATION
    memory: CountedMemory | None = None
    jobs: int = 1
    cluster: str | None = None
    repeats: int = 5
    seed: int = 0
