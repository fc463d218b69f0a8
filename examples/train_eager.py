"""A model without a static graph: it recurses over trees, each of another shape, within a budget."""

import argparse
import random

import torch
from torch import Tensor, nn

import planner


class TreeNet(nn.Module):
    """Reads a tree, given as nested pairs with words at the leaves, and returns a vector."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.leaf = nn.Embedding(words, width)
        self.join = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, tree: object) -> Tensor:
        """Recurse."""
        if isinstance(tree, tuple):
            return self.join(torch.cat([self(part) for part in tree], dim=-1)).tanh()
        return self.leaf(torch.full((64,), tree))


def random_tree(leaves: int) -> object:
    """Return a random tree of 10 words."""
    if leaves == 1:
        return random.randrange(10)
    left = random.randrange(1, leaves)
    return random_tree(left), random_tree(leaves - left)


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="8MB", help="such as 8GB or 7.5GiB, for all tensors on the device, or auto")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    model = TreeNet(words=10, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with planner.rematerialize(budget=arguments.budget) as session:
        for i in range(arguments.steps):
            loss = (model(random_tree(leaves=40))[:, 0] - 0.5).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 5 == 0:
                print(f"step {i}: loss {loss.item():.4f}")
    print(session)


if __name__ == "__main__":
    main()
