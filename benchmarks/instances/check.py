"""Check a solution of an instance, and print its peak and time: ``python check.py gpt2-12.json.gz solution.json``.

A solution is a list of steps, or an object with a list "steps": n >= 0 executes op n, and ~t (which is -1 - t) frees tensor t.
Needs nothing but Python and ``read.py`` in the same folder.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace


class NotValidError(Exception):
    """An invalid solution; the message names the step."""


def check(instance: SimpleNamespace, steps: list[int]) -> tuple[int, float]:
    """Return the peak in bytes and the time in seconds of a solution.

    Raises:
        NotValidError: an op reads a freed tensor or is missing, or another rule of README.md is broken.
    """
    ops, sizes = instance.ops, instance.tensors
    made = {t for op in ops for t in op.outputs}
    writers: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        for t in op.mutates:
            writers.setdefault(t, []).append(i)
    waiting = [i for i, op in enumerate(ops) if op.random]
    live: set[int] = set()
    done: set[int] = set()
    level = peak = instance.static_bytes
    times = []
    for index, step in enumerate(steps):

        def refuse(why: str, index: int = index, step: int = step) -> None:
            raise NotValidError(f"step {index} ({step}) {why}")

        if step < 0:
            if ~step not in live or ~step in instance.kept:
                refuse("frees what is not in memory, or must stay there")
            live.remove(~step)
            level -= sizes[~step]
            continue
        if step >= len(ops):
            refuse("is no op")
        op = ops[step]
        if any(t in made and t not in live for t in op.inputs):
            refuse("reads what is not in memory")
        if step in done and not op.recomputable:
            refuse("recomputes an op that must be executed only once")
        if step not in done and op.random and waiting.pop(0) != step:
            refuse("executes a random op out of order")
        if any((w in done) != (w < step) for t in (*op.inputs, *op.mutates) for w in writers.get(t, ()) if w != step):
            refuse("is on the wrong side of a write in place")
        peak = max(peak, level + sum(sizes[t] for t in op.outputs) + op.workspace_bytes)
        level += sum(sizes[t] for t in op.outputs if t not in live)
        live.update(op.outputs)
        done.add(step)
        times.append(op.time_s)
    if len(done) < len(ops):
        raise NotValidError(f"op {min(set(range(len(ops))) - done)} is never executed")
    if not live.issuperset(instance.kept):
        raise NotValidError(f"tensor {min(set(instance.kept) - live)} is not in memory at the end")
    return peak, math.fsum(times)


if __name__ == "__main__":
    from read import read  # type: ignore[import-not-found]  # read.py in this folder

    if len(sys.argv) != 3:
        sys.exit(__doc__)
    solution = json.loads(Path(sys.argv[2]).read_text())
    try:
        found = check(read(sys.argv[1]), solution["steps"] if isinstance(solution, dict) else solution)
    except NotValidError as error:
        sys.exit(f"not valid: {error}")
    print(f"{found[0]} bytes at the peak, {found[1]!r} s")
