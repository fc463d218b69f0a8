"""What was proved of a plan is shown after each step of training."""

import importlib.util

import pytest

from benchmarks.kept_proofs import LOOPS, Proof, collect_proofs, list_lost

_LIBRARIES = {"loop": "torch", "bert": "transformers", "t5": "transformers", "lightning": "lightning"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_no_proof_is_lost_in_fifty_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(_LIBRARIES[name]) is None:
        pytest.skip(f"{_LIBRARIES[name]} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    proofs = collect_proofs(name, steps=50)
    assert len(proofs) >= 50
    assert proofs[-1].gap is not None
    assert list_lost(proofs) == []


def test_proofs_that_say_less_are_lost() -> None:
    found = [(None, None), (1.0, 0.02), (1.0, 0.02), (None, None), (1.1, 0.03), (1.2, 0.01), (1.2, 0.02)]
    proofs = [Proof(i, "feasible", bound_s, gap) for i, (bound_s, gap) in enumerate(found)]
    assert [proof.step for proof in list_lost(proofs)] == [3, 4, 6]


def test_a_larger_gap_is_not_lost_for_new_costs_within_the_tolerance() -> None:
    found = [("optimal", 0.0, "alone"), ("optimal", 1e-3, "in steps"), ("optimal", 2e-3, "in steps"), ("feasible", 0.1, "new")]
    proofs = [Proof(i, status, 1.0, gap, costs) for i, (status, gap, costs) in enumerate(found)]
    assert [proof.step for proof in list_lost(proofs)] == [2, 3]
