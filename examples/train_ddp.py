"""On several processes, a GPU or a share of the CPU each: one plan for all of them, found on the first.

``torchrun --nproc-per-node 2 examples/train_ddp.py``
"""

import argparse

import torch
import torch.distributed as dist
from own_model import build
from torch.nn.parallel import DistributedDataParallel

import planner


def main() -> None:
    """Train for some steps on this process's part of the batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="80%", help="of each process, such as 8GB, 7.5GiB or 60%%")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model, loss_fn, batch = build(batch=512 * size, width=64)
    x, y = (part.chunk(size)[rank].to(device) for part in batch)  # your loader's batches, by a DistributedSampler
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = planner.compile(model, loss_fn, (x, y), budget=arguments.budget, optimizer="adamw")
    if rank == 0:
        print(step.plan)

    for i in range(arguments.steps):
        loss = step(x, y)
        loss.backward()  # gradients are averaged over the processes
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and i % 5 == 0:
            print(f"step {i}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
