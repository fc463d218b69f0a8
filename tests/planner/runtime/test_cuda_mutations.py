"""Each wait, event, hold and rounding of the runtime on CUDA is held by a test: without it, that one fails."""

import pytest

from tests.support.cuda_device.mutations import MUTATIONS, ROOT, Mutation, path_of_test, survives


def name_of(mutation: Mutation) -> str:
    return mutation.takes_away.replace(" ", "-")


def test_mutated_text_is_in_the_sources_once() -> None:
    assert len(MUTATIONS) >= 38
    for mutation in MUTATIONS:
        compile(mutation.change((ROOT / mutation.file).read_text()), mutation.file, "exec")
        file, *_ = mutation.test.split()
        assert (ROOT / path_of_test(ROOT, file)).exists()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_mutation_makes_its_test_fail(mutation: Mutation) -> None:
    assert not survives(mutation)
