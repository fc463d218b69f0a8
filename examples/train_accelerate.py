"""A planned step in a loop of Hugging Face Accelerate: prepared model, mixed precision, accumulated gradients."""

import argparse

import torch
from accelerate import Accelerator
from own_model import build
from torch.utils.data import DataLoader, TensorDataset

import planner

ACCUMULATED = 2


def main() -> None:
    """Train for some optimizer steps of two batches each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="80%", help="such as 8GB, 7.5GiB or 60%% of the peak without recomputation")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model, loss_fn, batch = build(batch=512, width=64)
    data = DataLoader(TensorDataset(*batch), batch_size=256)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATED)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
    step = planner.compile(model, loss_fn, tuple(next(iter(data))), budget=arguments.budget, optimizer=optimizer, accumulate=True)
    print(step.plan)

    for epoch in range(arguments.steps):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = step(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
