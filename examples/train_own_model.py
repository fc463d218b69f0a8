"""A training loop with a memory budget: your module, your loss, your batches.

The plan is kept in a folder: the second run finds it there and neither profiles nor solves.
"""

import argparse

import torch
from own_model import build

import planner


def main() -> None:
    """Train for some steps and print the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="70%", help="such as 8GB, 7.5GiB or 60%% of the peak without recomputation")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cache", default="~/.cache/remat-planner", help="where plans are kept")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, loss_fn, batch = build(batch=512, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = planner.compile(model, loss_fn, batch, budget=arguments.budget, optimizer="adamw", cache=arguments.cache)
    print(step.plan)

    x, y = batch  # your loader's batches, all of this shape
    for i in range(arguments.steps):
        loss = step(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 5 == 0:
            print(f"step {i}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
