"""What only CUDA devices have: CUDA graphs, their pool, and the arena of a device."""
