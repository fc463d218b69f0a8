"""The ledger in C++ chooses the storages that the one of ``planner.solvers.online`` chooses."""

import random
from typing import Any

import pytest
import torch

from planner.native.library import wait_for_library
from planner.solvers.baselines.common import online
from planner.solvers.baselines.common.online import OnlineRun
from planner.solvers.online.heuristics import MEGENGINE, NAMES, Interpreter, make_heuristic
from planner.solvers.online.ledger import Ledger
from planner.solvers.order.peak import keep_everything_peak_bytes
from planner.train.eager.session import rematerialize
from tests.support.eager.chains import chain, with_statistics, written_in_steps
from tests.support.native import NEEDS_LIBRARY

pytestmark = NEEDS_LIBRARY


class BothLedgers:
    """A ledger in Python and one in C++ that make the same calls, and must return the same."""

    def __init__(self, name: str, *, spares_small: bool = True) -> None:
        heuristics = [make_heuristic(name) if spares_small or name != "megengine" else Interpreter(0) for _ in range(2)]
        self._both = Ledger(heuristics[0]), wait_for_library().ledger(name, heuristics[1])
        self.heuristic = heuristics[0]
        self.victims = 0

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            expected, found = (getattr(ledger, method)(*args) for ledger in self._both)
            assert found == expected, method
            assert len(self._both[0]) == len(self._both[1])
            self.victims += method == "choose_victim" and found is not None
            return found

        return call


def run_random_program(ledger: BothLedgers, seed: int) -> None:
    """Compute, write in place, pin, evict, recompute and drop at random."""
    draw, now_s, ops = random.Random(seed), 0.0, {}
    there: list[int] = []
    gone: list[int] = []
    pinned: list[int] = []
    for number in range(300):
        inputs = draw.sample(there + gone, min(len(there) + len(gone), draw.randrange(4)))
        for storage in inputs:
            if storage in gone:
                gone.remove(storage)
                there.append(storage)
                ledger.note_computed(storage)
                ledger.note_recomputed(ops[storage])
        ledger.touch(inputs, now_s)
        seconds = draw.choice((0.0, draw.random()))
        if there and draw.random() < 0.2:
            ledger.add_op(inputs, [draw.choice(there + gone)], seconds)
        made = [ledger.add_storage(draw.choice((0, 512, 2**20 + 3)), (number, place)) for place in range(draw.randrange(1, 3))]
        ops.update(dict.fromkeys(made, ledger.add_op(inputs, made, seconds)))
        now_s += seconds
        ledger.touch(made, now_s)
        there += made
        if draw.random() < 0.2:
            pinned.append(draw.choice(there))
            ledger.pin(pinned[-1])
        if pinned and draw.random() < 0.2:
            ledger.unpin(pinned.pop())
        while draw.random() < 0.55 and (victim := ledger.choose_victim(now_s)) is not None:
            ledger.note_evicted(victim)
            there.remove(victim)
            gone.append(victim)
        if len(there) > 30:
            dropped = draw.choice([storage for storage in there + gone if storage not in pinned])
            (there if dropped in there else gone).remove(dropped)
            ledger.drop(dropped)


@pytest.mark.parametrize("name", NAMES)
def test_random_programs_evict_the_same(name: str) -> None:
    victims = 0
    for seed in range(3):
        ledger = BothLedgers(name, spares_small=False)
        run_random_program(ledger, seed)
        victims += ledger.victims
    assert victims > 150


@pytest.mark.parametrize("name", NAMES)
def test_steps_within_a_budget_evict_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are recorded, and replayed with both."""
    ledgers: list[BothLedgers] = []

    def create(_: object) -> BothLedgers:
        ledgers.append(BothLedgers(name, spares_small=False))
        return ledgers[-1]

    monkeypatch.setattr(online, "Ledger", create)
    x = torch.randn(256, 64)
    for run in (with_statistics, written_in_steps):
        with rematerialize("1GB") as session:
            run(chain(), x).backward()
        step = session.plans.longest_step
        budget = int(0.75 * keep_everything_peak_bytes(step.graph))
        heuristic = Interpreter(0) if name == MEGENGINE else make_heuristic(name)
        OnlineRun(step.graph, budget, heuristic, thrash_factor=1000).run()
    assert sum(ledger.victims for ledger in ledgers) > 10


def test_the_library_refuses_unknown_heuristics() -> None:
    with pytest.raises(ValueError, match="no heuristic oldest"):
        wait_for_library().ledger("oldest", make_heuristic("dtr"))
