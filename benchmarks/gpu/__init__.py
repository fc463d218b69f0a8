"""Tests and benchmarks that need a GPU: ``make gpu`` (``docs/gpu.md``)."""
