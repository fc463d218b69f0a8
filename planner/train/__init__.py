"""Training: whole steps, pieces of ``torch.compile``, eager blocks, and several processes."""
