"""Capture of a training step as the kernels that Inductor compiles.

AOTAutograd's joint graph is partitioned and both halves are compiled as ``torch.compile`` would (``halves``). The code around the
kernels is read as launches of kernels on buffers (``wrapper``, ``writes``), and these become ops and tensors (``lower``):
recomputation launches a kernel again.

The generated code is read, and neither the lines from which Inductor writes it (``codegen/wrapper.py``) nor the graph that it can
write instead (``codegen/wrapper_fxir.py``): the code is the one form that C++ and Triton, all kinds of calls, and Inductor's
cache on disk share, and the one that is executed.
"""
