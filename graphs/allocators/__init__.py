"""Models of memory allocators: where blocks lie, and what a process reserves for the requests of a training step."""
