"""Plans over Inductor's kernels beside ``torch.compile`` and its Memory Budget API: ``make bench-compiled``.

At each budget all methods take turns with ``torch.compile``, so the rows of a model are made together; models that are in the
CSV are not made again. Kernels that are in Inductor's cache on disk are not compiled again. Models of Hugging Face are left
out where transformers is not installed.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.common import columns_of, command_line, one_thread, write
from benchmarks.compiled_case import Settings, compare_compiled
from benchmarks.compiled_rows import Row
from benchmarks.compiled_table import table
from benchmarks.models import huggingface_models as hf
from planner import options
from planner.models import Workload, build
from planner.studies.rows import read_rows, write_csv
from planner.torch_private.core import pytree

COLUMNS = columns_of(Row)
_GPT2 = partial(build, "gpt2", layers=4, width=64, heads=4, vocab=500, batch=8, seq=128)

# At sizes of which a step takes 10 to 100 ms on one thread.
ZOO: dict[str, Callable[[], Workload]] = {
    "gpt2": partial(_GPT2, dropout=0),
    "gpt2-dropout": _GPT2,
    "llama": partial(build, "llama", layers=4, width=64, heads=4, kv_heads=2, hidden=192, vocab=500, batch=8, seq=128),
    "vit": partial(build, "vit", layers=4, width=64, heads=4, size=64, patch=8, classes=10, batch=8),
    "resnet18": partial(build, "resnet18", width=16, size=64, classes=10, batch=8),
    "resnet50": partial(build, "resnet50", width=8, size=64, classes=10, batch=8),
    "mobilenet_v2": partial(build, "mobilenet_v2", multiplier=0.25, size=64, classes=10, batch=8, dropout=0),
    "unet": partial(build, "unet", channels=8, size=64, batch=4, depth=3),
}
_WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
HUGGING_FACE: dict[str, Callable[[], Workload]] = {
    "hf-bert": partial(hf.masked_model, "Bert", **_WIDE, intermediate_size=512, max_position_embeddings=64),
    "hf-qwen3": partial(hf.language_model, "Qwen3", **_WIDE, intermediate_size=384, num_key_value_heads=2, head_dim=32),
    "hf-convnext": partial(hf.image_classifier, "ConvNext", 64, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]),
}
MODELS = ZOO | HUGGING_FACE


def measure(name: str, settings: Settings, device: torch.device) -> list[Row]:
    """The rows of one model; what was compiled for it is forgotten."""
    torch.manual_seed(settings.seed)
    rows = compare_compiled(_moved(MODELS[name](), device), name, settings, on_row=_say)
    torch.compiler.reset()
    gc.collect()
    return rows


def _moved(workload: Workload, device: torch.device) -> Workload:
    batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), workload.batch)
    return workload._replace(model=workload.model.to(device), batch=batch)


def _say(row: Row) -> None:
    found = row.error or f"{row.measured_peak_bytes} bytes, {row.bits} {row.variant}"
    print(f"{row.model}: {row.method} {row.budget}: {found}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure the models that are not there; write rows and table."""
    parser = command_line(__doc__, models=MODELS, out="results/compiled")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=best, help="where to train (default here: %(default)s)")
    parser.add_argument("--repeats", type=options.count, default=31, help="turns that are timed (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="make the rows of these models anew")
    arguments = parser.parse_args(words)
    one_thread()
    settings = Settings(repeats=arguments.repeats)
    rows = read_rows(arguments.out / "rows.csv", Row)
    for name in arguments.models:
        if not arguments.fresh and any(row.model == name for row in rows):
            continue
        if name in HUGGING_FACE and find_spec("transformers") is None:
            print(f"{name} is left out: transformers is not installed (pip install transformers)", file=sys.stderr)
            continue
        made = measure(name, settings, torch.device(arguments.device))
        rows = sorted([*(row for row in rows if row.model != name), *made], key=lambda row: tuple(MODELS).index(row.model))
        write_csv(arguments.out / "rows.csv", COLUMNS, map(asdict, rows))
    write(arguments.out, COLUMNS, map(asdict, rows), table(rows))


if __name__ == "__main__":
    main()
