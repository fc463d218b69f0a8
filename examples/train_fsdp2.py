"""On several processes that share parameters, gradients and optimizer state: FSDP2, with its gathers in one plan.

``torchrun --nproc-per-node 2 examples/train_fsdp2.py``
"""

import argparse

import torch
import torch.distributed as dist
from own_model import build
from torch.distributed.fsdp import fully_shard

import planner
from planner.measure.steps import measure_memory


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
    model.to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shards = 3 * sum(p.to_local().nbytes for p in model.parameters())  # with the optimizer's state
    plain = measure_memory(lambda x, y: loss_fn(model(x), y), (x, y), static_bytes=shards + x.nbytes + y.nbytes, device=device)
    model.zero_grad()
    step = planner.compile(model, loss_fn, (x, y), budget=arguments.budget, optimizer="adamw")
    if rank == 0:
        print(step.plan)
        print(f"peak of FSDP2 without a plan: {plain.peak_bytes / 1e6:.2f} MB measured")

    for i in range(arguments.steps):
        loss = step(x, y)
        loss.backward()  # each process gets its part of the averaged gradients
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and i % 5 == 0:
            print(f"step {i}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
