"""Embeddings that change or compress what a plan needs: refused in one line, or trained as eager PyTorch does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.graphs.errors import TraceError
from planner.measure.steps import measure_outcome
from planner.train.compile.step import PlannedStep
from tests.support.models.planned import BATCH, assert_no_trace, plan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what a planned step does not change


class Embeds(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.last = embedding, nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.last(hidden.mean(1) if hidden.dim() == 3 else hidden)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Embedding(20, 16, sparse=True), "the gradient of 'embedding.weight' is sparse.*leave out sparse=True"),
        (lambda: nn.EmbeddingBag(20, 16, sparse=True), "the gradient of 'embedding.weight' is sparse.*leave out sparse=True"),
        (lambda: nn.Embedding(20, 16, max_norm=1.0, sparse=True), "the gradient of 'embedding.weight' is sparse"),
    ],
)
def test_embeddings_that_cannot_be_planned_are_one_error(make: Callable[[], nn.Module], said: str) -> None:
    torch.manual_seed(0)
    model = Embeds(make())

    def act() -> None:
        with pytest.raises(TraceError, match=said) as caught:
            plan(model, (torch.randint(20, (8, 5), generator=torch.Generator().manual_seed(1)), BATCH[1]))
        assert "\n" not in str(caught.value)

    assert_no_trace(model, act)


@pytest.mark.parametrize(("kind", "trained"), [(nn.Embedding, True), (nn.EmbeddingBag, False)])
def test_an_embedding_with_max_norm_trains_as_eager_does(kind: type[nn.Module], *, trained: bool) -> None:
    torch.manual_seed(0)
    model = Embeds(kind(20, 16, max_norm=1.0).requires_grad_(trained))
    batch = (torch.randint(20, (8, 5)), BATCH[1])
    steps: list[PlannedStep] = []
    assert_no_trace(model, lambda: steps.append(plan(model, batch)))
    step, before = steps[0], model.embedding.weight.clone()
    found = measure_outcome(step, model, batch, seed=1, written=[model.embedding.weight])
    planned = step(*batch).detach()
    after = model.embedding.weight.clone()
    with torch.no_grad():
        model.embedding.weight.copy_(before)
    assert torch.equal(F.cross_entropy(model(batch[0]), batch[1]), planned)
    assert torch.equal(model.embedding.weight, after)
    assert not torch.equal(before, after)
    assert torch.equal(found.values["loss"], planned)
