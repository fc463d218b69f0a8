"""The eager runtime: any training loop within a memory budget, without a trace (``planner.rematerialize``).

Two mechanisms work with autograd. In one, a dispatch mode records each op as a closure over storages, and saved-tensor hooks
give autograd handles; in the other, a subclass of ``Tensor`` wraps a tensor that can be evicted, and autograd saves the
wrapper. The first is used:

- Everything outside of autograd's saved tensors is an ordinary tensor. What leaves the block, what C++ holds and what another
  library checks for its type is what it would be without the block. A wrapper has to be unwrapped in all of these places.
- Only saved tensors can be evicted. That loses little: a tensor that neither autograd nor the program holds is freed anyway,
  and one that the program holds could be read at any time. A wrapper could evict the latter too.
- An op costs one call from the dispatcher into Python in both; the wrapper adds a second tensor for each result.
- PyTorch checks versions of saved tensors only without hooks. So a handle compares the version counter itself, which an alias
  shares: writes in place raise as in plain eager PyTorch.

Memory is a set of storages, not of tensors: views cost nothing, and a reference is a storage with a geometry. A write in
place makes another version of the contents; a storage has a chain of the ops that made its versions, and is recomputed
through it. Contents that nothing can recompute (parameters, data from outside, outputs of operators with unknown effects) are
pinned, and copied before they are overwritten if a saved tensor may have to be recomputed from them. Records are freed by
reference counts: an op is known as long as a tensor that is alive may need it. When no tensor is saved, between two steps,
all of them are forgotten.

Of DTR's treatments of what the program lets go of (``solvers.online.ledger.Deallocation``), the runtime has eager eviction:
PyTorch frees a tensor that neither the program nor autograd holds, it is recomputed on the way to others, and evicted again when
memory runs out. Ignoring would have the runtime hold every tensor; but PyTorch tells that the program has let go only by freeing,
so that neither eager PyTorch's peak nor the lifetimes in recorded steps would be known. Banishing pins what was computed from a
tensor that is let go of, and most saved tensors are computed from such: too little would be left to evict.

A dispatch mode costs more than small ops take. While memory is far below the budget, nothing of what is recorded is needed; so on
the CPU, where there is a C++ compiler, ops come to a log in C++ (``deferred_log``), which executes them, counts bytes, and notes
what can be recorded later. If an op does not fit, or could not be noted, the recorder reads the log: it sees the same calls, with
the outputs that they had, and records what it would have recorded. From then on it sees the ops itself, until the step ends.

``recording`` sees the ops, ``saved_tensors`` has what autograd holds, ``log_reading`` leaves ops to the log and reads it,
``modules`` knows which module is running. ``sizes`` knows what ops will allocate, ``memory`` makes room and asks the ledger of
``solvers.online`` for the victim, ``recompute`` executes chains again, ``session`` is what users hold. ``following`` logs each
step; ``step_log`` makes it a graph, ``step_plans`` has it solved when it repeats, and offers what its plan has evicted.
``enough`` finds a budget that would have done.
"""
