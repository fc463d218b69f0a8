"""Graphs made from a few numbers: small ones with known optima, random ones, and large training steps.

For tests and for benchmarks of solvers: nothing here needs torch.
"""
