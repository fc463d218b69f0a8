"""Mutations of the runtime on CUDA: each takes away a wait, an event, a hold or a rounding, and a test must fail.

``python -m tests.support.cuda_device.mutations`` makes each of them in a copy of the sources, runs its test there, and prints the
table of ``docs/gpu.md``. It takes some minutes; arguments choose mutations by a part of what they take away.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
_COPIED = ("graphs", "solvers", "planner", "tests", "pyproject.toml")
_LIMIT_S = 300
_PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu")  # slow tests too
_FOLDERS = ("tests/planner/runtime", "tests/graphs/allocators")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of a source that leaves it valid Python.

    Attributes:
        file: of the source.
        takes_away: what is missing then.
        before, after: text of the source, which is there once, and what stands in its place.
        test: in one of the folders of tests, which fails then.
    """

    file: str
    takes_away: str
    before: str
    after: str
    test: str

    def made_in(self, root: Path) -> None:
        """Make it in the sources at `root`."""
        path = root / self.file
        text = path.read_text()
        assert text.count(self.before) == 1, f"{self.file} has {text.count(self.before)} times {self.before!r}"
        path.write_text(text.replace(self.before, self.after))


_CHANNELS, _TRANSFERS, _GRAPH = (
    f"planner/runtime/{name}.py" for name in ("transfers/cuda_channels", "transfers/transfers", "cuda/cuda_graph")
)
_ARENA = "planner/runtime/cuda/device_arena.py"
_BITS = "test_cuda_channels.py -k in_any_order"
_UNITS = "test_cuda_channels.py -k copies_wait"

MUTATIONS = (
    Mutation(
        _CHANNELS,
        "the wait of a copy for what computes at both ends",
        "            stream.wait_event(event)\n",
        "            pass\n",
        _BITS,
    ),
    Mutation(
        _CHANNELS,
        "the event of who sends",
        "        if stream is not None:\n            self._given",
        "        if stream is not None and at_target:\n            self._given",
        _BITS,
    ),
    Mutation(
        _CHANNELS,
        "the event of who takes memory",
        "        if stream is not None:\n            self._given",
        "        if stream is not None and not at_target:\n            self._given",
        "test_cuda_placed.py",
    ),
    Mutation(
        _TRANSFERS,
        "the wait of a copy for the one that makes its tensor",
        "                after = [self._made_by.copy()]",
        "                self._made_by.copy()",
        _UNITS,
    ),
    Mutation(
        _CHANNELS,
        "the wait of a copy to the host for those that still use its buffer",
        "for copy in (*after, *behind):",
        "for copy in after:",
        _UNITS,
    ),
    Mutation(
        _TRANSFERS,
        "the wait of a copy back for the copy to the host",
        "after = source.copies[:1] if source is not None else []",
        "after: list[Copy] = []",
        _UNITS,
    ),
    Mutation(
        _CHANNELS,
        "the wait of what computes for a copy",
        "            launched.make_wait(torch.cuda.current_stream(end.device))",
        "            pass",
        _BITS,
    ),
    Mutation(
        _CHANNELS,
        "the event behind a copy, which is recorded in front of it",
        "        with torch.cuda.stream(stream):\n            room.copy_(values, non_blocking=True)\n"
        "        event = stream.record_event(torch.cuda.Event(enable_timing=self._channel.timed))\n",
        "        event = stream.record_event(torch.cuda.Event(enable_timing=self._channel.timed))\n"
        "        with torch.cuda.stream(stream):\n            room.copy_(values, non_blocking=True)\n",
        _BITS,
    ),
    Mutation(
        _CHANNELS,
        "the hold of a tensor until its copy was waited for",
        "        self._held[at_target] = end, stream",
        "        self._held[at_target] = torch.empty(0, device=end.device), stream",
        "test_cuda_channels.py -k held_until",
    ),
    Mutation(
        _CHANNELS,
        "the end of that hold",
        "self._held.pop(at_target, (None, None))",
        "self._held.get(at_target, (None, None))",
        "test_cuda_channels.py -k held_until",
    ),
    Mutation(
        _CHANNELS,
        "the wait for copies of a step that was dropped",
        "                    self.launched.make_wait(stream)",
        "                    pass",
        "test_cuda_channels.py -k dropped",
    ),
    Mutation(
        _CHANNELS,
        "the wait of the host for another thread that launches the copy",
        "        self._wait_until_known()\n        assert",
        "        assert",
        "test_cuda_placed.py",
    ),
    Mutation(
        _CHANNELS,
        "the wait of the host's memory for a copy",
        "        if not self.part.over:\n            self.event.synchronize()",
        "        pass",
        "test_cuda_channels.py -k host_waits",
    ),
    Mutation(
        _CHANNELS,
        "the wait for the device before memory of the host is unlocked",
        "    torch.cuda.synchronize(device)  # a copy may be under way if a step was dropped\n",
        "",
        "test_cuda_channels.py -k unlocked",
    ),
    Mutation(
        _CHANNELS,
        "the wait for both events before the time between them is asked for",
        "        before.synchronize()\n        now.synchronize()\n",
        "",
        "test_link.py -k streams_of_cuda",
    ),
    Mutation(
        _CHANNELS,
        "the join of the copying streams where a capture ends",
        "                computing.wait_stream(channel.stream)",
        "                pass",
        "test_cuda_graph_offload.py -k under_way",
    ),
    Mutation(
        _CHANNELS,
        "the end of a captured part, whose events are waited for outside",
        "        part.over = True\n",
        "",
        "test_cuda_graph_offload.py -k under_way",
    ),
    Mutation(
        "planner/runtime/cuda/graphed_step.py",
        "the hold of the host's buffers that a recording uses",
        "            host.let_stay()\n",
        "",
        "test_cuda_graph_offload.py -k without_room",
    ),
    Mutation(
        "planner/runtime/cuda/graphed_step.py",
        "the hold of the inputs that a recording reads",
        "        self._static = [t.detach() if i in self._in_place else t.detach().clone() for i, t in enumerate(static)]",
        "        self._static = [t.detach() for t in static]",
        "test_cuda_graph.py -k as_eager_does",
    ),
    Mutation(
        _GRAPH,
        "the wait of a warm-up for what was launched before",
        "        self._stream.wait_stream(present)\n",
        "",
        "test_cuda_graph_recorder.py -k warmed_up",
    ),
    Mutation(
        _GRAPH,
        "the wait for a warm-up",
        "            present.wait_stream(self._stream)\n\n",
        "            pass\n\n",
        "test_cuda_graph_recorder.py -k warmed_up",
    ),
    Mutation(
        _GRAPH,
        "the workspace of a graph in its pool",
        "        clear_cublas_workspaces()\n        try:",
        "        try:",
        "test_cuda_graph_recorder.py -k workspace",
    ),
    Mutation(
        _GRAPH,
        "the end of that workspace with the capture",
        "        finally:\n            clear_cublas_workspaces()\n",
        "",
        "test_cuda_graph_recorder.py -k workspace",
    ),
    Mutation(
        _ARENA,
        "the pool that the passes of a step in an arena take memory from",
        "with nullcontext() if begun is None else begun.enter():",
        "with nullcontext():",
        "test_device_arena.py -k slab_alone",
    ),
    Mutation(
        _ARENA,
        "the holds beside an op's holes",
        "self._running.apply_actions(self.steering.before[step])",
        "pass",
        "test_device_arena.py -k leaves_its_addresses",
    ),
    Mutation(
        _ARENA,
        "the check for tensors of another step",
        "if self.left or (last is not None and not last.is_over):",
        "if self.left and last is None:",
        "test_device_arena.py -k another_one",
    ),
    Mutation(
        _ARENA,
        "the hold of what a larger slab has beyond that of the plan",
        "if shared.slab_bytes > slab_bytes:",
        "if shared.slab_bytes < slab_bytes:",
        "test_device_arena.py -k beyond",
    ),
    Mutation(
        "planner/measure/observation.py",
        "the stream of the model's device, which events are recorded on",
        "mark.record(torch.cuda.current_stream(self._device))",
        "mark.record()",
        "test_cuda_times.py",
    ),
    Mutation(
        "planner/measure/observation.py",
        "the wait for an event before its time is asked for",
        "    after.synchronize()\n",
        "",
        "test_cuda_times.py",
    ),
    Mutation(
        "planner/measure/timing.py",
        "the stream of the op's device, which events are recorded on",
        "stream = torch.cuda.current_stream(device)",
        "stream = torch.cuda.current_stream()",
        "test_cuda_times.py",
    ),
    Mutation(
        "planner/measure/device_profile.py",
        "the rounding of what another device allocates",
        "return -(-size_bytes // self._block_bytes) * self._block_bytes",
        "return size_bytes",
        "test_cuda_times.py",
    ),
    Mutation(
        "planner/capture/lowering/statics.py",
        "the rounding of tensors to 512 bytes",
        'return -(-size_bytes // 512) * 512 if device.type == "cuda" else size_bytes',
        "return size_bytes",
        "test_cuda_graph_memory.py -k counted_twice",
    ),
    Mutation(
        "planner/measure/steps.py",
        "the warm-up of libraries before a peak is measured",
        "library_bytes = warm_up_libraries(device)",
        "library_bytes = 0",
        "test_cuda_peaks.py",
    ),
    Mutation(
        "planner/measure/observation.py",
        "the warm-up of libraries before the first step is measured",
        "        warm_up_libraries(self._device)\n",
        "",
        "test_cuda_peaks.py",
    ),
    Mutation(
        "planner/measure/pool_memory.py",
        "the warm-up of libraries in another device's thread",
        "    run()  # libraries allocate their workspaces for the device's thread\n",
        "",
        "test_cuda_placed.py -k predicted",
    ),
    Mutation(
        "graphs/allocators/caching.py",
        "the rounding of blocks to 512 bytes",
        "return max(1, -(-size_bytes // BLOCK_BYTES)) * BLOCK_BYTES",
        "return size_bytes",
        "test_caching.py",
    ),
    Mutation(
        "graphs/allocators/caching.py",
        "segments of 20 MiB",
        "            return self.large_segment_bytes\n",
        "            return size_bytes\n",
        "test_caching.py",
    ),
    Mutation(
        "graphs/allocators/caching.py",
        "the rest of 1 MiB that a large block is not split for",
        "remaining > SMALL_BYTES and ",
        "remaining >= BLOCK_BYTES and ",
        "test_caching.py",
    ),
)


def path_of_test(root: Path, file: str) -> str:
    """The path of a file of tests in the sources at `root`."""
    return next(f"{folder}/{file}" for folder in _FOLDERS if (root / folder / file).exists())


def survives(mutation: Mutation) -> bool:
    """Return True if the test of `mutation` still passes with it."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=skipped) if source.is_dir() else shutil.copy(source, root / name)
        mutation.made_in(root)
        file, *chosen = mutation.test.split()
        command = [*_PYTEST, path_of_test(root, file), *chosen]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return False  # who is not told waits for ever
        assert run.returncode in (0, 1), run.stdout.decode()[-2000:]
        return run.returncode == 0


def table() -> str:
    """The table of mutations and tests, in Markdown."""
    rows = [f"| `{Path(m.file).name}` | {m.takes_away} | `{m.test}` |" for m in MUTATIONS]
    return "\n".join(("| source | what is taken away | the test that fails |", "| --- | --- | --- |", *rows))


def main(words: list[str]) -> int:
    """Try the mutations that are asked for, and print the table of all; 1 if one survives."""
    survivors = 0
    for mutation in MUTATIONS:
        if not words or any(word in mutation.takes_away or word in mutation.file for word in words):
            survived = survives(mutation)
            survivors += survived
            state = "SURVIVED" if survived else "failed as it must"
            sys.stderr.write(f"{mutation.file}: {mutation.takes_away}: {state}\n")
    sys.stdout.write(f"{table()}\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
