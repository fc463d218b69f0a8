"""The optimal schedule against everything else, model by model: ``make results`` and ``make results-gpu``.

Each model is one call of ``planner compare``, in a process of its own, into a folder of its own. Rows that are
in the folder's CSV are not computed again; tables and figures are made from the CSV alone.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.compare_summary import summary_text
from graphs.io.files import write_text
from graphs.io.formats import write_graph
from graphs.ir import Graph
from graphs.synthetic.random_graphs import random_training_step
from graphs.synthetic.small import training_chain
from graphs.synthetic.transformer import TransformerSize, transformer
from solvers.registry import SOLVERS

# Their programs grow with the square of the ops: of hundreds of ops they are not even written in the time given.
FOR_SMALL_GRAPHS = frozenset({"checkmate", "monet", "rounding", "xengine", "xengine-overlapped"})
LARGE = ",".join(name for name in SOLVERS if name not in FOR_SMALL_GRAPHS)

# What is replayed, and of these names what PyTorch has itself.
REPLAYED = ",".join(name for name in SOLVERS if name not in FOR_SMALL_GRAPHS | {"griewank"})

# Small enough that every exact method ends.
EXACT: dict[str, Callable[[], Graph]] = {
    "chain-8": partial(training_chain, 8),
    "transformer-1": partial(transformer, TransformerSize(layers=1)),
    "random-15": partial(random_training_step, 2, 15),
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """One call of ``planner compare``: what is compared, and the words after it."""

    name: str
    subject: str | Callable[[], Graph]
    words: tuple[str, ...]


def exact() -> Iterator[Comparison]:
    """Graphs on which the optimum can be set against other exact methods."""
    for name, make in EXACT.items():
        yield Comparison(name, make, ("--budgets", "90%,80%,70%,60%", "--time-limit", "60s"))


def h200() -> Iterator[Comparison]:
    """Models at their real sizes, by simulation."""
    for name, spec in MODELLED.items():
        yield Comparison(name, spec, ("--roofline", "h200", "--methods", LARGE, "--time-limit", "2m"))


def cpu() -> Iterator[Comparison]:
    """Small models, measured here."""
    for name, spec in ON_CPU.items():
        yield Comparison(name, spec, ("--measure", "--methods", REPLAYED, "--repeats", "9", "--time-limit", "30s"))


def cuda() -> Iterator[Comparison]:
    """Large models, measured on a GPU; few rows, for its time is dear."""
    methods = "windows,checkpoint-blocks,chen-sqrt,sac,sac-every-second,sac-attention,memory-budget,dtr,dtr-local,msps"
    how = ("--measure", "--device", "cuda", "--repeats", "5", "--time-limit", "10s", "--jobs", "4")
    for name, spec in ON_CUDA.items():
        yield Comparison(name, spec, (*how, "--methods", methods, "--budgets", "70%,50%"))


MEASURED = ("cpu", "cuda")  # suites whose rows are times on this machine
SUITES: dict[str, Callable[[], Iterator[Comparison]]] = {"exact": exact, "h200": h200, "cpu": cpu, "cuda": cuda}


def compare(comparison: Comparison, folder: Path, cluster: str | None = None) -> bool:
    """Make the rows, tables and figures of one model in `folder`, on a Dask `cluster` if one is named; whether that went well."""
    with tempfile.TemporaryDirectory() as place:
        subject = comparison.subject
        if callable(subject):
            file = Path(place, f"{comparison.name}.json")
            write_graph(subject(), file)
            subject = str(file)
        where = () if cluster is None else ("--cluster", cluster)
        words = ("compare", subject, *comparison.words, *where, "-o", str(folder))
        print(f"OMP_NUM_THREADS=1 planner {shlex.join(words)}", flush=True)
        # One thread: two that wait for each other double what other processes disturb.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run([sys.executable, "-m", "planner", *words], env=environment, stdout=subprocess.DEVNULL, check=False)
    return ended.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing; 1 if a comparison failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="exact,h200,cpu", help=f"of {', '.join(SUITES)} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/compare"), help="where folders are made")
    parser.add_argument("--fresh", action="store_true", help="make all rows of these suites anew")
    parser.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, whose workers solve")
    options = parser.parse_args(arguments)
    suites = options.suites.split(",")
    if unknown := set(suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}: choose from {', '.join(SUITES)}")
    if options.cluster is not None and (measured := set(suites).intersection(MEASURED)):
        parser.error(f"{', '.join(sorted(measured))} measure on this machine, not on a cluster: name other --suites")
    failed = []
    for suite in suites:
        if options.fresh:
            shutil.rmtree(options.out / suite, ignore_errors=True)
        for comparison in SUITES[suite]():
            began = time.perf_counter()
            if not compare(comparison, options.out / suite / comparison.name, options.cluster):
                failed.append(f"{suite}/{comparison.name}")
            print(f"{suite}/{comparison.name}: {time.perf_counter() - began:.0f} s", flush=True)
    write_text(options.out / "summary.md", summary_text(options.out))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
