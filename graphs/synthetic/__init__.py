"""Synthetic graphs from few parameters: small ones with known optima, random ones, and large training steps.

For tests and for benchmarks of solvers; they do not need torch.
"""
