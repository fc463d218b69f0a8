"""Builds on fake tensors that name CUDA devices and convert dtypes: no memory is allocated, and no CUDA is needed."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.capture.workload.workload import load, parse_spec
from planner.graphs.ir import Graph
from planner.settings.plan import PlanSettings
from planner.studies.workload_tracing import Tracing

# Four terabytes of float32: real tensors of these shapes cannot be allocated.
FILE = """
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 1_000_000
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def tied():
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].weight = model[0].weight
    return model

def converted(model):
    return {conversion}

def build():
    torch.cuda.set_device(0)
    model = converted(tied())
    tokens = torch.randint(0, WIDTH, (2, 3), device="cuda")
    targets = torch.zeros(2, 3, dtype=torch.long).cuda(non_blocking=True)
    return model, lambda logits, t: F.cross_entropy(logits.float().flatten(0, 1), t.flatten()), (tokens, targets)
"""


def write(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(text)
    return f"{folder / 'own.py'}:build"


def traced(model: str, roofline: str = "h200") -> Graph:
    return Tracing(PlanSettings(roofline=roofline)).trace_graph(parse_spec(model))


@pytest.mark.parametrize(
    ("conversion", "dtype"),
    [
        ("model.to(torch.bfloat16)", "bfloat16"),
        ("model.bfloat16().cuda()", "bfloat16"),
        ("model.half()", "float16"),
        ("model.half().float()", "float32"),
        ("model.cuda()", "float32"),
        ("model.cuda(0).to(torch.float16)", "float16"),
        ("model.to('cuda')", "float32"),
        ("model.to(DEVICE, torch.bfloat16)", "bfloat16"),
        ("model.to(device='cuda:0', dtype=torch.bfloat16)", "bfloat16"),
        ("model.to(torch.accelerator.current_accelerator())", "float32"),
    ],
)
def test_conversions_of_a_model_keep_its_parameters_shared_and_fake(tmp_path: Path, conversion: str, dtype: str) -> None:
    model = write(tmp_path, FILE.format(conversion=conversion))
    graph = traced(model)
    weights = [tensor for tensor in graph.tensors if tensor.kind == "parameter"]
    assert [weight.dtype for weight in weights] == [dtype]
    assert weights[0].size_bytes == 10**12 * (4 if dtype == "float32" else 2)
    assert graph.provenance["device"] == "h200"


@pytest.mark.parametrize(
    "body",
    [
        "torch.randn(SIZE, device='cuda')",
        "torch.zeros(SIZE, device=torch.device('cuda', 0))",
        "torch.empty(SIZE, pin_memory=True).to('cuda', non_blocking=True)",
        "torch.ones(SIZE).pin_memory().cuda(memory_format=torch.contiguous_format)",
        "torch.zeros(SIZE).to(0)",
        "torch.zeros(1).new_zeros(SIZE, device='cuda')",
        "torch.zeros(SIZE, device=f'cuda:{torch.cuda.current_device()}')",
        "torch.zeros(SIZE, device=torch.cuda.current_device())",
        "torch.tensor([1.0], device='cuda').expand(SIZE).clone()",
    ],
)
def test_tensors_made_on_cuda_are_fake_and_on_the_cpu(tmp_path: Path, body: str) -> None:
    text = f"import torch\nSIZE = (10**6, 10**7)\ndef build():\n    return torch.nn.Linear(2, 2).cuda(), None, ({body},)\n"
    (made,) = load(parse_spec(write(tmp_path, text)), fake=True, as_on_cuda=True).batch
    assert isinstance(made, FakeTensor) and made.device.type == "cpu" and made.shape == (10**6, 10**7)


@pytest.mark.parametrize(
    "model",
    [
        "with torch.device('cuda'):\n        model = nn.Linear(10**6, 10**7)",
        "with torch.device('meta'):\n        model = nn.Linear(10**6, 10**7)\n    model.to_empty(device='cuda')",
        "torch.set_default_device('cuda')\n    model = nn.Linear(10**6, 10**7)",
    ],
)
def test_default_devices_are_the_cpu(tmp_path: Path, model: str) -> None:
    text = f"import torch\nfrom torch import nn\ndef build():\n    {model}\n    return model, None, (torch.zeros(1, 10**6),)\n"
    try:
        built = load(parse_spec(write(tmp_path, text)), fake=True, as_on_cuda=True)
    finally:
        torch.set_default_device(None)
    assert {(type(p), p.device.type) for p in built.model.parameters()} == {(FakeTensor, "cpu")}


def test_weights_loaded_to_cuda_are_fake(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")
    text = (
        "import torch\ndef build():\n    model = torch.nn.Linear(3, 3).cuda()\n"
        f"    model.load_state_dict(torch.load({str(tmp_path / 'weights.pt')!r}, map_location='cuda'))\n"
        "    return model, None, (torch.zeros(1, 3, device='cuda'),)\n"
    )
    built = load(parse_spec(write(tmp_path, text)), fake=True, as_on_cuda=True)
    assert {(type(p), p.device.type) for p in built.model.parameters()} == {(FakeTensor, "cpu")}


ASKING = """
import torch
def build():
    assert torch.cuda.is_available() is {available}
    if torch.cuda.is_available():
        assert torch.cuda.device_count() == 1 and torch.cuda.is_bf16_supported()
        assert torch.cuda.get_device_capability() >= (8, 0) and torch.cuda.get_device_properties(0).total_memory > 0
        torch.cuda.manual_seed_all(1), torch.cuda.synchronize(), torch.cuda.empty_cache()
    return torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, (torch.zeros(1, 2), torch.zeros(1, 2))
"""


def test_cuda_is_available_inside_a_build_for_cuda_only(tmp_path: Path) -> None:
    before = torch.cuda.is_available()
    traced(write(tmp_path, ASKING.format(available=True)))
    assert torch.cuda.is_available() is before
    traced(write(tmp_path, ASKING.format(available=before)), roofline="cpu")


def test_functions_of_torch_are_restored_when_a_build_fails(tmp_path: Path) -> None:
    before = torch.cuda.is_available, torch.load, torch.set_default_device, torch.utils.weakref
    with pytest.raises(Exception, match="no"):
        load(parse_spec(write(tmp_path, "def build():\n    raise ValueError('no')\n")), fake=True, as_on_cuda=True)
    assert (torch.cuda.is_available, torch.load, torch.set_default_device, torch.utils.weakref) == before
