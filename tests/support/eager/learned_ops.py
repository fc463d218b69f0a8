"""What the eager runtime asks Python about signatures."""

from typing import Any

import pytest

from planner.train.eager.recording import Recorder
from planner.train.eager.sizes import KnownOp


def watch_learned(recorder: Recorder, patch: pytest.MonkeyPatch) -> list[KnownOp]:
    """Return a list to which each signature is added whose size no rule of the C++ library knows."""
    learned: list[KnownOp] = []
    learn = recorder.learn_sizes

    def learn_and_add(known: KnownOp, *args: Any) -> None:
        learn(known, *args)
        learned.append(known)

    patch.setattr(recorder, "learn_sizes", learn_and_add)
    return learned
