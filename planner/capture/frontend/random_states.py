"""Random states outside of the graph: of the generators that code draws from unless it has one of its own."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

NUMPY, PYTHON = "numpy.random", "random"


class RandomStates:
    """States of the generators of PyTorch on the CPU and on some GPUs, of NumPy and of Python, as they are when this is made."""

    def __init__(self, gpus: Iterable[int] = ()) -> None:
        self._cpu = torch.get_rng_state()
        self._gpus = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        self._numpy = np.random.get_state()  # noqa: NPY002  # the one that a model may draw from
        self._python = random.getstate()

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu)
        for gpu, state in self._gpus.items():
            torch.cuda.set_rng_state(state, gpu)
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)

    def moved(self) -> set[str]:
        """Return the names of the generators whose states are others now: a type of device, ``NUMPY`` or ``PYTHON``."""
        now = RandomStates(self._gpus)
        same = {
            "cpu": torch.equal(self._cpu, now._cpu),
            "cuda": all(torch.equal(state, now._gpus[gpu]) for gpu, state in self._gpus.items()),
            NUMPY: all(map(np.array_equal, self._numpy, now._numpy)),
            PYTHON: self._python == now._python,
        }
        return {name for name, unmoved in same.items() if not unmoved}


@contextmanager
def random_states_kept(gpus: Iterable[int] = ()) -> Iterator[None]:
    """Afterwards the generators have the states that they had before."""
    states = RandomStates(gpus)
    try:
        yield
    finally:
        states.restore()
