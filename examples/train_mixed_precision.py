"""Mixed precision, accumulated gradients, clipping and a learning-rate schedule around a planned step."""

import argparse

import torch
from own_model import build
from torch import nn

import planner

ACCUMULATED = 4


def main() -> None:
    """Train for some optimizer steps of four batches each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="80%", help="such as 8GB, 7.5GiB or 60%% of the peak without recomputation")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, loss_fn, (x, y) = build(batch=512, width=64)
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    scaler = torch.amp.GradScaler(device)
    autocast = torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16)  # float16 is slow on CPUs
    with autocast:  # the casts are part of the plan
        step = planner.compile(model, loss_fn, (x, y), budget=arguments.budget, optimizer="adamw", accumulate=True)
    print(step.plan)

    for i in range(arguments.steps):
        for _ in range(ACCUMULATED):
            with autocast:
                loss = step(x, y)
            scaler.scale(loss / ACCUMULATED).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {i}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
