"""A Hugging Face model within a memory budget: the model makes its loss, the batch is given by name."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planner


def main() -> None:
    """Train a small Llama, randomly initialised, on one batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="70%", help="such as 8GB, 7.5GiB or 60%% of the peak without recomputation")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(500, (4, 64))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = planner.compile(model, None, batch, budget=arguments.budget, optimizer="adamw")
    print(step.plan)

    for i in range(arguments.steps):
        loss = step(**batch)  # your loader's batches, padded to this shape
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {i}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
