"""Random states outside of the graph: those of the default generators of PyTorch, NumPy and Python."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

NUMPY, PYTHON = "numpy.random", "random"


class RandomStates:
    """A snapshot of the default generators of PyTorch (CPU and some GPUs), NumPy and Python."""

    def __init__(self, gpus: Iterable[int] = ()) -> None:
        self._cpu = torch.get_rng_state()
        self._gpus = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        self._numpy = np.random.get_state()  # noqa: NPY002  # the one that models use by default
        self._python = random.getstate()

    def restore(self) -> None:
        """Set the generators to the states of the snapshot."""
        torch.set_rng_state(self._cpu)
        for gpu, state in self._gpus.items():
            torch.cuda.set_rng_state(state, gpu)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)

    def find_changed(self) -> set[str]:
        """Return the generators whose state has changed: device types, ``NUMPY`` and ``PYTHON``."""
        now = RandomStates(self._gpus)
        same = {
            "cpu": torch.equal(self._cpu, now._cpu),
            "cuda": all(torch.equal(state, now._gpus[gpu]) for gpu, state in self._gpus.items()),
            NUMPY: all(map(np.array_equal, self._numpy, now._numpy)),
            PYTHON: self._python == now._python,
        }
        return {name for name, unchanged in same.items() if not unchanged}


def list_gpus(device: torch.device) -> tuple[int, ...]:
    """Return the number of a CUDA device, whose generator ops draw from; () for others."""
    return (torch.cuda.current_device() if device.index is None else device.index,) if device.type == "cuda" else ()


@contextmanager
def preserve_random_states(gpus: Iterable[int]) -> Iterator[None]:
    """Restore the states of the generators at the end."""
    states = RandomStates(gpus)
    try:
        yield
    finally:
        states.restore()
