"""The optimal schedule compared with all baselines, model by model: ``make results`` and ``make results-gpu``.

Each model is one call of ``planner compare``, in its own process and folder. Rows that are in the folder's CSV are not computed
again; tables and figures depend on the CSV alone.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.command import add_names, build_parser
from benchmarks.compare_summary import format_summary
from planner.graphs.io.files import write_text
from planner.graphs.io.formats import write_graph
from planner.graphs.ir import Graph
from planner.graphs.synthetic.random_graphs import draw_training_step
from planner.graphs.synthetic.small import make_training_chain
from planner.graphs.synthetic.transformer import TransformerSize, transformer
from planner.solvers.registry import SOLVERS
from planner.studies.comparison_rows import ComparisonRow
from planner.studies.comparisons import write_report
from planner.studies.rows import read_rows

# Their programs grow with the square of the ops: of hundreds of ops they are not even written in the time given.
FOR_SMALL_GRAPHS = frozenset({"checkmate", "monet", "rounding", "xengine", "xengine-overlapped"})
LARGE = ",".join(name for name in SOLVERS if name not in FOR_SMALL_GRAPHS)

# Methods that are replayed, and those that PyTorch has itself.
REPLAYED = ",".join(name for name in SOLVERS if name not in FOR_SMALL_GRAPHS | {"griewank"})

# Small enough that every exact method ends.
EXACT: dict[str, Callable[[], Graph]] = {
    "chain-8": partial(make_training_chain, 8),
    "transformer-1": partial(transformer, TransformerSize(layers=1)),
    "random-15": partial(draw_training_step, 2, 15),
}

# As they are trained, planned for an H200.
MODELLED = {
    "gpt2": "zoo:gpt2,layers=12,batch=8,dtype=bfloat16",
    "resnet50": "zoo:resnet50,batch=64",
    "unet": "zoo:unet,batch=4",
    "vit": "zoo:vit,batch=64,dtype=bfloat16",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=64",
}

# The same, at sizes of which a step takes about 0.1 s on one core. With dropout PyTorch's memory budget goes wrong.
ON_CPU = {
    "gpt2": "zoo:gpt2,layers=12,width=64,heads=4,vocab=500,batch=8,seq=128,dropout=0",
    "resnet50": "zoo:resnet50,batch=16,size=64,width=8,classes=10",
    "unet": "zoo:unet,batch=4,size=96,channels=8",
    "vit": "zoo:vit,batch=8,layers=12,width=64,heads=4,size=64,patch=8,classes=10",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=16,size=64,multiplier=0.25,classes=10,dropout=0",
    "gpt2-dropout": "zoo:gpt2,layers=4,width=64,heads=4,vocab=500,batch=8,seq=128",
}

# At sizes that matter there.
ON_CUDA = {
    "gpt2-medium": "zoo:gpt2,layers=24,width=1024,heads=16,batch=8,dropout=0,dtype=bfloat16",
    "llama-1b": "zoo:llama,layers=16,width=2048,heads=32,kv_heads=8,hidden=8192,vocab=32000,batch=4,seq=2048",
    "resnet50": "zoo:resnet50,batch=128",
    "unet": "zoo:unet,batch=8",
}

_TORCH = "windows,checkpoint-blocks,chen-sqrt,sac,sac-every-second,sac-attention,memory-budget,dtr,dtr-local,msps"
_OFFLOADING = "windows,checkpoint-blocks,sac,save-on-cpu,offload-activations,sac-and-offload,auto-perf-maxing"


@dataclass(frozen=True, slots=True)
class Suite:
    """Models or graphs, their arguments for ``planner compare``, and a flag for suites that measure on this machine."""

    subjects: Mapping[str, str | Callable[[], Graph]]
    words: str
    measures: bool = False


SUITES: Mapping[str, Suite] = {
    # Graphs on which the optimum can be set against other exact methods.
    "exact": Suite(EXACT, "--budgets 90%,80%,70%,60% --time-limit 60s"),
    # Models at their real sizes, by simulation.
    "h200": Suite(MODELLED, f"--roofline h200 --memory allocated --methods {LARGE} --time-limit 2m"),
    # Small models, measured here.
    "cpu": Suite(ON_CPU, f"--measure --methods {REPLAYED} --repeats 9 --time-limit 30s", measures=True),
    # Checkpointing and what it saves on the host, as Transformers' ``offload=True``. Hooks reach SAC's saved tensors from PyTorch
    # 2.14 on, so that these rows are made in its environment.
    "cpu-offload": Suite(
        {name: ON_CPU[name] for name in ("gpt2", "vit", "resnet50")},
        f"--measure --options offload --methods {_OFFLOADING} --budgets 70%,50% --repeats 9 --time-limit 20s",
        measures=True,
    ),
    # Large models, measured on a GPU; few rows, for its time is dear.
    "cuda": Suite(
        ON_CUDA,
        f"--measure --device cuda --repeats 5 --time-limit 10s --jobs 4 --methods {_TORCH} --budgets 70%,50%",
        measures=True,
    ),
}


def compare(subject: str | Callable[[], Graph], words: str, folder: Path) -> bool:
    """Make the rows, tables and figures of one model in `folder`; return True on success."""
    with tempfile.TemporaryDirectory() as place:
        if callable(subject):
            file = Path(place, f"{folder.name}.json")
            write_graph(subject(), file)
            subject = str(file)
        command = ("compare", subject, *words.split(), "-o", str(folder))
        print(f"OMP_NUM_THREADS=1 planner {shlex.join(command)}", flush=True)
        # One thread: two that wait for each other double the noise of other processes.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run([sys.executable, "-m", "planner", *command], env=environment, stdout=subprocess.DEVNULL)
    return ended.returncode == 0


def make(suite: str, out: Path, *, fresh: bool, cluster: str | None) -> list[str]:
    """Make the missing comparisons of a suite; return those that failed."""
    if fresh:
        shutil.rmtree(out / suite, ignore_errors=True)
    failed, words = [], SUITES[suite].words + ("" if cluster is None else f" --cluster {cluster}")
    for name, subject in SUITES[suite].subjects.items():
        began = time.perf_counter()
        if not compare(subject, words, out / suite / name):
            failed.append(f"{suite}/{name}")
        print(f"{suite}/{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return failed


def main(words: Sequence[str] | None = None) -> int:
    """Make the missing comparisons; return 1 if one failed."""
    parser = build_parser(__doc__, ComparisonRow, out="results/compare")
    add_names(parser, "--suites", SUITES, default="exact,h200,cpu")
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, whose workers solve")
    options = parser.parse_args(words)
    measured = [suite for suite in options.suites if SUITES[suite].measures]
    if options.cluster is not None and measured:
        parser.error(f"{', '.join(measured)} measure on this machine, not on a cluster: name other --suites")
    failed = []
    for suite in options.suites:
        if options.tables_only:
            for file in sorted((options.out / suite).glob("*/rows.csv")):
                write_report(read_rows(file, ComparisonRow), file.parent)
        else:
            failed += make(suite, options.out, fresh=options.fresh, cluster=options.cluster)
    write_text(options.out / "summary.md", format_summary(options.out))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
