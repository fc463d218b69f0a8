"""What Inductor writes around its kernels for CUDA: ``python -m tests.support.inductor.cuda_code`` writes down each kind of line.

It is generated here, without a GPU, by the PyTorch at hand. What comes of reading it, for each step and each way to compile it,
is printed as a line of JSON; called with names of steps, nothing more is done.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from planner.capture.kernels import halves
from planner.capture.kernels.variants import CompileVariant
from planner.capture.trace import capture_kernels
from planner.capture.workload.models import Workload, build
from planner.graphs.errors import TraceError
from tests.support.inductor.cuda_lines import excerpts, kinds, over
from tests.support.inductor.no_gpu import compiled_for_cuda

FOLDER = Path(__file__).parents[2] / "planner/capture/kernels/cuda_code"
_GPT2 = partial(build, "gpt2", layers=1, seq=1024, batch=8)


class Assorted(nn.Module):
    """Ops of which Inductor makes no kernel, or one with a workspace that must be zeros before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.mixed = nn.Parameter(torch.ones(8, 64, 64))
        self.norm = nn.GroupNorm(8, 64)

    def forward(self, i: Tensor, x: Tensor) -> Tensor:
        drawn = F.dropout(self.table(i), 0.1)
        mixed = torch.baddbmm(drawn, drawn, self.mixed)
        summed = torch.cumsum(self.norm(mixed.mT).flatten() * x, 0)
        values, order = torch.sort(summed.view(64, -1), stable=True)
        added = torch.zeros_like(values).scatter_add(1, order, values.sin())
        put = torch.zeros_like(added).index_put((order[:, 0] % 64,), added, accumulate=True)
        return (put.std(1) + torch.topk(values, 3).values.sum(1)).mean()


def assorted() -> Workload:
    """Build a step of many ops that the models have not."""
    return Workload(Assorted(), None, (torch.randint(1000, (8, 4096)), torch.randn(8 * 4096 * 64)))


# Sizes are those of real models, which have kernels that small ones have not; nothing is executed.
STEPS = {
    "gpt2": _GPT2,
    "gpt2-bfloat16": partial(_GPT2, dtype="bfloat16", dropout=0.0),
    "gpt2-attention-written": partial(_GPT2, vocab=1000, attention="written"),
    "llama": partial(build, "llama", layers=1, width=1024, heads=16, kv_heads=4, hidden=2816, seq=2048),
    "vit": partial(build, "vit", layers=1),
    "resnet18": partial(build, "resnet18", blocks=(1, 1, 1, 1)),
    "unet": partial(build, "unet", channels=32, size=256, depth=2),
    "mobilenet_v2": partial(build, "mobilenet_v2"),
    "assorted": assorted,
    "vit-combo-kernels": partial(build, "vit", layers=1),
    "gpt2-multi-kernel": _GPT2,
    "llama-cooperative-reductions": partial(build, "llama", layers=1, width=1024, heads=16, kv_heads=4, hidden=2816, seq=2048),
}

# Settings of Inductor that users turn on, of steps that show what they generate.
SETTINGS: dict[str, dict[str, object]] = {
    "vit-combo-kernels": {"combo_kernels": True},
    "gpt2-multi-kernel": {"triton.multi_kernel": 1},
    "llama-cooperative-reductions": {"triton.force_cooperative_reductions": True},
}


@dataclass(frozen=True, slots=True)
class Read:
    """What comes of reading the code of one step.

    Attributes:
        step: name of the step.
        variant: how it was compiled.
        sources: of the modules that Inductor generated, forward and backward.
        ops: how many ops the step has; 0 where it is refused.
        error: why it is refused, "" where it is not.
    """

    step: str
    variant: CompileVariant
    sources: tuple[str, ...]
    ops: int
    error: str

    def facts(self) -> dict[str, object]:
        """All but the sources, with the kinds of their lines and the elements of what may be written over."""
        found = asdict(self)
        del found["sources"]
        return {
            **found,
            "kinds": sorted({kind for source in self.sources for kind in kinds(source)}),
            "over": [pair for source in self.sources for pair in over(source)],
        }


def read(name: str, variant: CompileVariant) -> Read:
    """Generate the code of a step, and read it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    workload: Workload = STEPS[name]()
    sources: list[str] = []
    half = halves.Half

    def noted(source: str, *others: object) -> halves.Half:
        sources.append(source)
        return half(source, *others)

    with compiled_for_cuda(), inductor_config.patch(SETTINGS.get(name, {})), patch.object(halves, "Half", noted):
        try:
            captured = capture_kernels(*workload, variant=variant)
        except TraceError as error:
            return Read(name, variant, tuple(sources), 0, str(error))
    return Read(name, variant, tuple(sources), len(captured.graph.ops), "")


def main(names: Sequence[str]) -> None:
    """Print what comes of some steps, or of all, of which each kind of line is then written down."""
    modules = []
    for name in names or STEPS:
        for variant in CompileVariant:
            found = read(name, variant)
            modules += [(f"{name}, {variant}", source) for source in found.sources]
            sys.stdout.write(f"{json.dumps(found.facts())}\n")
            sys.stdout.flush()
    if not names:
        FOLDER.mkdir(exist_ok=True)
        text = "".join(f"# {about}\n{source}\n" for about, source in excerpts(modules))
        (FOLDER / f"torch-{'.'.join(torch.__version__.split('.')[:2])}.txt").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
