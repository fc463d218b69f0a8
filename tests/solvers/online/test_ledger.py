"""The ledger of evictions: exact choices, flat memory, and its settings."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given, strategies as st

from planner.solvers.online.heuristics import NAMES, Interpreter, make_heuristic
from planner.solvers.online.ledger import Ledger
from tests.support.marks import slow_except

MiB = 2**20


class Program:
    """A random program that drives a ledger: ops, reads, evictions, recomputations and drops, by a seed."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger, self.draw = ledger, random.Random(seed)
        self.now_s = 0.0
        self.kept: list[int] = []
        self.ops: dict[int, int] = {}  # by storage

    def op(self) -> None:
        """Run an op on storages in memory, or on restored ones."""
        ledger, draw = self.ledger, self.draw
        inputs = draw.sample(self.kept, min(len(self.kept), draw.randrange(3)))
        for storage in inputs:
            if ledger.gone[storage]:
                ledger.note_computed(storage)
                ledger.note_recomputed(self.ops[storage])
        ledger.touch(inputs, self.now_s)
        made = [ledger.add_storage(draw.randrange(4) * MiB) for _ in range(draw.randrange(1, 3))]
        seconds = draw.randrange(5) / 4
        op = ledger.add_op(inputs, made, seconds)
        self.now_s += seconds
        ledger.touch(made, self.now_s)
        self.kept += made
        self.ops.update(dict.fromkeys(made, op))

    def candidates(self) -> list[int]:
        """The storages that may be evicted."""
        return [
            s for s in self.kept if not self.ledger.gone[s] and not self.ledger.heuristic.spares(int(self.ledger.size_bytes[s]))
        ]

    def drop_unneeded(self) -> None:
        """Free for good what is no longer read and was never evicted with a child."""
        for storage in self.kept[:-20]:
            if not self.ledger.is_needed(storage):
                self.kept.remove(storage)
                self.ledger.drop(storage)
                self.ops.pop(storage)


def by_brute_force(ledger: Ledger, candidates: list[int], now_s: float) -> int:
    """The candidate of least score; of equal ones the latest, but for scores of 0 the first."""
    scores = dict(zip(candidates, ledger.heuristic.score(np.array(candidates), now_s).tolist(), strict=True))
    least = min(scores.values())
    tied = sorted((s for s in candidates if scores[s] == least), key=lambda s: ledger.since[s])
    return tied[0] if least == 0 else tied[-1]


@pytest.mark.parametrize("name", slow_except(NAMES, "dtr", "lru"))
@given(seed=st.integers(0, 10**6))
def test_the_victim_has_the_least_score_of_all(name: str, seed: int) -> None:
    check_choices(name, seed, ops=150, drops=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_choices_stay_exact_when_ids_are_used_again(name: str, seed: int) -> None:
    assert len(check_choices(name, seed, ops=300, drops=True).parents) < 200


def check_choices(name: str, seed: int, *, ops: int, drops: bool) -> Ledger:
    """Compare the victims of a random program with brute force."""
    ledger = Ledger(Interpreter(0) if name == "megengine" else name)
    program = Program(ledger, seed)
    for _ in range(ops):
        program.op()
        if drops:
            program.drop_unneeded()
        if candidates := [s for s in program.candidates() if not ledger._pins[s]]:  # those of dropped ones are pinned
            least = by_brute_force(ledger, candidates, program.now_s)
            victim = ledger.choose_victim(program.now_s)
            assert victim == least
            if program.draw.random() < 0.6:
                assert victim is not None
                ledger.note_evicted(victim)
    return ledger


def victim_besides(ledger: Ledger, used: Collection[int], now_s: float = 0.0) -> int | None:
    """The storage that is evicted next while those in `used` may not be."""
    for storage in used:
        ledger.pin(storage)
    victim = ledger.choose_victim(now_s)
    for storage in used:
        ledger.unpin(storage)
    return victim


def in_use_as_well(ledger: Ledger, seed: int, tried: bool) -> list[int]:
    """The storages that a random program evicts, of which some are in use; these are tried first, or it is known ahead."""
    draw = random.Random(seed)
    found: list[int] = []
    there: list[int] = []
    for op in range(300):
        storage = ledger.add_storage(1, (op, 0))
        ledger.add_op([], [storage], 1.0)
        there.append(storage)
        in_use = {s for s in there if draw.random() < 0.3}
        if op < 20 or len(in_use) == len(there):
            continue
        barred: list[int] = []
        while (victim := victim_besides(ledger, barred if tried else in_use)) in in_use:
            barred.append(victim)
        assert victim is not None
        ledger.note_evicted(victim)
        there.remove(victim)
        found.append(victim)
        if op % 3 == 0:
            again = draw.choice(found)
            if again not in there:
                ledger.note_computed(again)
                there.append(again)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_random_victims_do_not_depend_on_rejected_candidates(seed: int) -> None:
    evicted = in_use_as_well(Ledger(make_heuristic("dtr-random", seed)), seed, tried=False)
    assert evicted == in_use_as_well(Ledger(make_heuristic("dtr-random", seed)), seed, tried=True)
    assert evicted != in_use_as_well(Ledger(make_heuristic("dtr-random", seed + 1)), seed, tried=False)


@pytest.mark.slow
def test_random_choices_are_uniform_whatever_was_chosen_before() -> None:
    """Of 8 storages 3 are chosen in turn, of which each comes back: all 336 orders are as likely as any other."""
    ledger = Ledger("dtr-random")
    storages = [ledger.add_storage(1, (op, 0)) for op in range(8)]
    choices = 40 * 336
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(choices):
        chosen: list[int] = []
        for _ in range(3):
            victim = ledger.choose_victim(0.0)
            assert victim is not None
            ledger.note_evicted(victim)
            chosen.append(victim)
        for storage in chosen:
            ledger.note_computed(storage)
        counts[tuple(chosen)] += 1
    expected = choices / 336
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in itertools.permutations(storages, 3))
    assert 335 - 4 * math.sqrt(2 * 335) < chi_square < 335 + 4 * math.sqrt(2 * 335)  # 4 standard deviations


def test_random_choices_treat_new_storages_as_those_that_were_spared() -> None:
    ages: Counter[int] = Counter()
    for seed in range(30):
        ledger = Ledger(make_heuristic("dtr-random", seed))
        age = {ledger.add_storage(1, (op, 0)): op for op in range(10)}
        for op in range(10, 210):
            victim = ledger.choose_victim(0.0)
            assert victim is not None
            ages[sorted(age.values()).index(age.pop(victim))] += 1
            ledger.drop(victim)
            age[ledger.add_storage(1, (op, 0))] = op
    assert all(abs(ages[rank] - 600) < 4 * math.sqrt(600) for rank in range(10)), ages


def test_memory_is_flat_over_a_thousand_steps() -> None:
    ledger = Ledger("dtr")
    program = Program(ledger, 5)
    most_labels = 0
    for step in range(1000):
        for _ in range(10):
            program.op()
            if (victim := ledger.choose_victim(program.now_s)) is not None and program.draw.random() < 0.5:
                ledger.note_evicted(victim)
        for storage in program.kept:
            ledger.drop(storage)
        program.kept.clear()
        program.ops.clear()
        assert (len(ledger), len(ledger.ops)) == (0, 0)
        most_labels = max(most_labels, len(ledger.heuristic.classes))
        assert len(ledger.size_bytes) == 1024, step
    assert most_labels == 0
    assert len(ledger.parents) < 30  # ids of dropped storages are used again


@pytest.mark.parametrize("name", ["dtr", "dtr-full", "msps"])
def test_scores_do_not_depend_on_evictions_before_or_after_add_op(name: str) -> None:
    # a -> b -> c -> d, of which b and c are evicted: before the ops are entered, or after.
    scores = []
    for late in (False, True):
        ledger = Ledger(name)
        a, b, c, d = (ledger.add_storage(MiB) for _ in range(4))
        ledger.touch([a, b, c, d], 0.0)
        if late:
            ledger.note_evicted(b)
            ledger.note_evicted(c)
        for read, made, seconds in ((a, b, 2.0), (b, c, 3.0), (c, d, 5.0)):
            ledger.heuristic.score(np.array([a, d]), 1.0)
            ledger.add_op([read], [made], seconds)
        if not late:
            ledger.note_evicted(b)
            ledger.note_evicted(c)
        scores.append((ledger.heuristic.score(np.array([a, d]), 1.0) * MiB).tolist())
    assert scores[0] == scores[1] == ([0.0, 10.0] if name == "msps" else [5.0, 10.0])


# --- what may be evicted --------------------------------------------------------------------------


def test_neither_pinned_nor_excluded_storages_are_evicted() -> None:
    ledger = Ledger("lru")
    a, b, c = (ledger.add_storage(1) for _ in range(3))
    for i, storage in enumerate((a, b, c)):
        ledger.touch([storage], i + 1.0)
    ledger.pin(a)
    ledger.pin(a)
    assert ledger.choose_victim(5.0) == b
    assert victim_besides(ledger, [b], 5.0) == c
    assert victim_besides(ledger, [b, c], 5.0) is None
    ledger.unpin(a)
    assert ledger.choose_victim(5.0) == b
    ledger.unpin(a)
    assert ledger.choose_victim(5.0) == a


def test_a_storage_computed_from_a_dropped_one_is_pinned() -> None:
    ledger = Ledger("lru")
    a = ledger.add_storage(1)
    ledger.add_op([], [a], 1.0)
    b = ledger.add_storage(1)
    ledger.add_op([a], [b], 1.0)
    ledger.note_evicted(b)
    assert ledger.is_needed(a)
    ledger.note_computed(b)
    assert not ledger.is_needed(a)
    ledger.drop(a)
    assert ledger.choose_victim(3.0) is None
    assert ledger.add_storage(1) == a
    assert ledger.choose_victim(3.0) == a


def test_in_place_write_adds_its_cost_and_parents() -> None:
    ledger = Ledger("dtr-local")
    x, y = ledger.add_storage(4), ledger.add_storage(4)
    ledger.add_op([], [x], 1.0)
    ledger.add_op([], [y], 1.5)
    ledger.touch([x, y], 0.0)
    assert ledger.choose_victim(1.0) == x
    ledger.add_op([x, y], [x], 2.0)
    assert ledger.own_s[x] == 3.0
    assert list(ledger.parents[x]) == [y]
    assert ledger.choose_victim(1.0) == y


def test_an_unknown_heuristic_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no heuristic 'best'; choose one of dtr, dtr-full"):
        make_heuristic("best")
