"""The same through torch.compile: one line is added to a training loop, whatever the model returns and the loss is."""

import argparse

import torch
from own_model import build


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="80%", help="such as 8GB, 7.5GiB or 60%% of the peak without recomputation")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, loss_fn, (x, y) = build(batch=512, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    planned = torch.compile(model, backend="planner", options={"budget": arguments.budget})

    for i in range(arguments.steps):
        loss = loss_fn(planned(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 5 == 0:
            print(f"step {i}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
