"""Steps over kernels of Triton, which its interpreter executes on the CPU where TRITON_INTERPRET=1 is set.

Called with the name of one of ``kernel_steps.CASES`` and shares of the way from the least budget to the peak, it prints what
comes of a plan for each as a line of JSON. It is for a process of its own.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import triton.language as tl
from torch._inductor import config
from torch._inductor.runtime import triton_helpers
from torch.utils import _triton
from triton.backends import backends
from triton.runtime import driver

from planner.graphs.schedule import Compute
from planner.settings.budget import Bytes
from tests.support.budgets import on_the_way
from tests.support.inductor.no_gpu import Driver
from tests.support.inductor.steps import CASES, differences, freed_over, prepare


class _Library:
    """Functions of CUDA's library for devices, which the interpreter has not, as Triton's own."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: getattr(tl, name)(*args)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, Inductor generates Triton's kernels for the CPU."""
    backends["cpu"] = backends["nvidia"]  # there is a backend for each device that Inductor asks for
    _triton.has_triton.cache_clear()
    assert _triton.has_triton()
    del backends["cpu"]  # and one only for the device that kernels would be compiled for
    driver.set_active(Driver())
    triton_helpers.libdevice = _Library()
    with config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1):
        yield


def main(name: str, shares: Sequence[str]) -> None:
    """Print what comes of a plan for each share."""
    with interpreted():
        known = prepare(CASES[name])
        for share in map(float, shares):
            (budget,) = on_the_way(known.graph, share)
            plan = known.compiler._find_first_plan(known.graph, Bytes(budget))
            # Its peak is not measured: the interpreter copies what it is given.
            step = known.compiler.wrapper.wrap(known.compiler._make_executor(known.captured, plan))
            steps = plan.schedule.steps
            found = {
                "kernels": sum(op.target.startswith("triton_") for op in known.graph.ops),
                "recomputed": sum(isinstance(step, Compute) for step in steps) - len(known.graph.ops),
                "overwritten": sum(len(freed_over(known.graph, plan.schedule, i)) for i in range(len(steps))),
                "differences": differences(known.wanted, known.found(step)),
            }
            sys.stdout.write(f"{json.dumps(found)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
