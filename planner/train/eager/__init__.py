"""The eager runtime: any training loop within a memory budget, without a trace (``planner.rematerialize``).

There are two ways to work with autograd. In the first, a dispatch key records each op as a closure over storages, and
saved-tensor hooks give autograd handles. In the second, a subclass of ``Tensor`` wraps a tensor that can be evicted, and autograd
saves the wrapper. The runtime uses the first:

- Everything outside of autograd's saved tensors is an ordinary tensor. Code outside of the block, C++ code and libraries that
  check types see the tensors that they would see without the block. A wrapper has to be unwrapped in all of these places.
- Only saved tensors can be evicted. That loses little: a tensor that neither autograd nor the program holds is freed anyway,
  and one that the program holds could be read at any time. A wrapper could evict the latter too.
- In both, each op costs one call from the dispatcher into Python. The wrapper also needs a second tensor for each result.
- PyTorch checks versions of saved tensors only without hooks. So a handle compares the version counter itself, which aliases
  share: in-place writes raise as in plain eager PyTorch.

Memory is a set of storages, not of tensors: views cost nothing, and a reference is a storage with a geometry. An in-place write
makes another version of the contents. A storage has a chain of the ops that made its versions, and is recomputed by executing the
chain. Contents that cannot be recomputed (parameters, data from outside, outputs of operators with unknown effects) are pinned.
They are copied before they are overwritten if a saved tensor may have to be recomputed from them. Records are freed by reference
counting: an op is known as long as a live tensor may need it. Between two steps no tensor is saved, and all records are dropped.

DTR has three treatments of tensors that the program releases (``planner.solvers.online.ledger.Deallocation``). The runtime uses
eager eviction: PyTorch frees a tensor that neither the program nor autograd holds. It is recomputed if other tensors need it, and
evicted again when memory runs out. Ignoring is not used: the runtime would have to hold every tensor, but PyTorch only shows that
the program has released one by freeing it. Then neither eager PyTorch's peak nor the lifetimes in recorded steps would be known.
Banishing is not used either: it pins what was computed from a released tensor. That is true of most saved tensors, so too little
would be left to evict.

A dispatch mode in Python takes longer than small ops do. So the C++ library receives the ops below autograd, executes and records
them (``native_recording``), far below the budget as near it. Before, ops far below it went to a log, which was read for the
recorder when memory ran out, and without a compiler all ops went to a dispatch mode: three ways to record the same ops. The first
ops of each signature are measured (``device_costs``).

What is in memory, what is evicted and how it is recomputed is the library's too (``storages`` has what Python sees of it), with
the ledger, as ``planner.solvers.online`` defines it: an op that evicts or recomputes calls Python only for the plan of its step.

``recording`` has what the library asks of Python. ``modules`` knows which module is running, and ``sizes`` what ops will
allocate, beside the library's rules for common ones; ``session`` has the public API. ``step_follower`` logs each step;
``step_log`` turns it into a graph; ``step_plans`` has repeated steps solved, and returns what their plans evict.
``enough_budget`` finds a budget that is large enough for a recorded step.
"""
