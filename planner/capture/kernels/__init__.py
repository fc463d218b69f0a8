"""Capture of a training step as the kernels that Inductor compiles it to.

AOTAutograd's joint graph is partitioned and both halves are compiled as ``torch.compile`` would (``halves``). What the code
around the kernels does is read as launches of kernels on buffers (``wrapper``, ``writes``), and these become ops and tensors
(``lower``): recomputation is launching a kernel again.

The code is read, and not the lines from which Inductor writes it (``codegen/wrapper.py``) or the graph that it can write
instead (``codegen/wrapper_fxir.py``): it is the one form that C++ and Triton, all kinds of calls, and Inductor's cache on disk
share, and the one that is executed.
"""
