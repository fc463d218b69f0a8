"""Synthetic graphs from few parameters: small ones with known optima, random ones, and large training steps.

They serve tests and benchmarks of solvers, and do not need torch.
"""
