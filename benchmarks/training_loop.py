"""A training loop as people write it, one step at a time, so that two loops can take turns."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from planner.capture.signature import Batch, call
from planner.capture.workload.models import Workload
from planner.measure.steps import Step, get_loss, wait_for_device
from planner.torch_private.core import pytree

_PART = 2**16  # values that are drawn at once
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The training of a model.

    Attributes:
        make: called with a device; returns model, loss function and a batch there.
        optimizer: as for ``planner.compile``, a name in OPTIMIZERS.
    """

    make: Callable[..., Workload]
    optimizer: str
    rate: float


def generate_batches(like: Batch, count: int, *, seed: int) -> Iterator[Batch]:
    """Yield random batches, the same every time, with values drawn from those in `like`."""
    tensors, structure = pytree.tree_flatten(like)
    generator = torch.Generator(tensors[0].device).manual_seed(seed)
    for _ in range(count):
        yield pytree.tree_unflatten([_draw_like(tensor, generator) for tensor in tensors], structure)


def _draw_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values drawn from those of `tensor`, in parts: places for all would take twice their memory beside a step's."""
    drawn, values = tensor.new_empty(tensor.shape), tensor.flatten()
    for part in drawn.view(-1).split(_PART):
        part.copy_(values[torch.randint(len(values), part.shape, generator=generator, device=tensor.device)])
    return drawn


class Loop:
    """A training loop: `model` starts at `start`, the random state at `seed`.

    Args:
        step: returns its loss for a batch, ready for ``backward()``.
        start: state dict of the model.
        seed: of the random state, which is this loop's own: loops that take turns do not share it.
    """

    def __init__(self, model: nn.Module, step: Step, recipe: Recipe, start: Mapping[str, torch.Tensor], *, seed: int) -> None:
        model.load_state_dict(start)
        self._model = model
        self._step = step
        self._device = next(model.parameters()).device
        self._optimizer = OPTIMIZERS[recipe.optimizer](model.parameters(), lr=recipe.rate)
        self._optimizer.zero_grad()
        with self._fork_random_state():
            torch.manual_seed(seed)
            self._keep_random_state()

    def time_step(self, batch: Batch) -> tuple[float, float, float]:
        """Take a step: its loss, and the seconds of its forward and backward pass, and of all of it."""
        with self._keep_own_random_state():
            wait_for_device(self._device)
            began = time.perf_counter()
            loss = get_loss(call(self._step, batch))
            loss.backward()
            wait_for_device(self._device)
            passed = time.perf_counter()
            self._optimizer.step()
            self._optimizer.zero_grad()
            wait_for_device(self._device)
            ended = time.perf_counter()
        return loss.item(), passed - began, ended - began

    def compute_digest(self) -> str:
        """Return the digest of all bits of parameters, buffers and random state."""
        found = hashlib.sha256()
        for value in (*self._model.state_dict().values(), *self._random_state):
            found.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
        return found.hexdigest()[:16]

    @contextmanager
    def _keep_own_random_state(self) -> Iterator[None]:
        with self._fork_random_state():
            torch.set_rng_state(self._random_state[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._random_state[1], self._device)
            yield
            self._keep_random_state()

    def _keep_random_state(self) -> None:
        on_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        self._random_state = [torch.get_rng_state(), *on_gpu]

    def _fork_random_state(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self._device] if self._device.type == "cuda" else [])
