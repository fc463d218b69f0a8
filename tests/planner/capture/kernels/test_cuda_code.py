"""Code that Inductor generates for CUDA is read; it is executed on a GPU only."""

import ast
import builtins
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.capture.kernels.wrapper import Wrapper
from planner.capture.program.program import Call, Shared
from tests.support.inductor.cuda_lines import body_of, kinds
from tests.support.inductor.wrapper_code import namespace, read

KEPT = sorted((Path(__file__).parent / "cuda_code").glob("torch-*.txt"))
STEPS = (
    *("gpt2", "gpt2-bfloat16", "gpt2-attention-written", "llama", "vit", "resnet18", "unet", "mobilenet_v2", "assorted"),
    *("vit-combo-kernels", "gpt2-multi-kernel", "llama-cooperative-reductions"),
)


def modules(kept: Path) -> list[str]:
    """What is kept of each module, as source that begins with a line which says of what it is."""
    return [f"# {text}" for text in kept.read_text().split("\n# ")]


def kept_kinds() -> set[str]:
    """The kinds of lines that some release has been seen to generate."""
    return {kind for kept in KEPT for source in modules(kept) for kind in kinds(source)}


def unexecuted(*_: object) -> Tensor:
    raise AssertionError("nothing is executed")


NAMES = namespace(
    empty_strided_cuda=unexecuted, copy_if_misaligned=unexecuted, get_raw_stream=unexecuted, assert_size_stride=unexecuted
)


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
def test_each_kind_of_line_that_a_release_generates_is_read(kept: Path) -> None:
    for source in modules(kept):
        compiled = [s.targets[0] for s in ast.parse(source).body if isinstance(s, ast.Assign)]
        names = {name.id: unexecuted for name in compiled if isinstance(name, ast.Name)} | NAMES
        whole = with_inputs(source, names)
        wrapper, _ = read(whole, names, inputs_of(whole))
        assert_read_whole(source, wrapper)


def with_inputs(source: str, names: Mapping[str, Any]) -> str:
    """`source`, of which lines were left out, with what these made as inputs."""
    known, missing = {"args", *names, *dir(builtins)}, dict[str, None]()
    for statement in body_of(ast.parse(source)):
        used = [] if isinstance(statement, ast.With) else [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
        missing |= dict.fromkeys(name.id for name in used if isinstance(name.ctx, ast.Load) and name.id not in known)
        known |= {name.id for name in used}
    return source.replace(" = args", f" {''.join(f'{name}, ' for name in missing)}= args")


def inputs_of(source: str) -> int:
    """How many inputs a module has."""
    for statement in body_of(ast.parse(source)):
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                return len(names)
    return 0


def assert_read_whole(source: str, wrapper: Wrapper) -> None:
    """Each call is one launch, and each buffer that is given to one is made by one."""
    lines = [ast.unparse(statement) for statement in body_of(ast.parse(source))]
    launched = [line for line in lines if "(" in line and not line.startswith(("with", "return", "torch.cuda", "(", "args."))]
    views = ("empty_strided", "reinterpret_tensor", "get_raw_stream", "copy_if_misaligned")
    launched = [line for line in launched if not line.partition(" = ")[2].startswith(views)]
    assert [launch.target.split(".")[-1] for launch in wrapper.launches if launch.target not in "".join(launched)] == []
    assert len(wrapper.launches) == len(launched)
    made = [value for launch in wrapper.launches for value in launch.makes]
    assert len(made) == len(set(made))
    assert all(not launch.writes - set(made) for launch in wrapper.launches)
    assert wrapper.guard == Call(torch.cuda._DeviceGuard, (0,))
    values = [statement.value for launch in wrapper.launches for statement in launch.statements]
    shared = [leaf for value in values if value is not None for leaf in value.kwargs.values() if isinstance(leaf, Shared)]
    assert all(each == Shared(Call(NAMES["get_raw_stream"], (0,))) for each in shared)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_code_that_is_generated_here_is_read(step: str) -> None:
    """In a process of its own, without a GPU, for each way to compile a step."""
    pytest.importorskip("triton", reason="Inductor generates code for CUDA with Triton: pip install --no-deps triton")
    if shutil.which("g++") is None and not torch.cuda._is_compiled():
        pytest.skip("a build of PyTorch for the CPU needs g++ to have fake tensors on CUDA")
    command = [sys.executable, "-m", "tests.support.inductor.cuda_code", step]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["variant"] for each in found] == ["default", "whole", "budget", "keep"]
    for each in found:
        assert (each["error"], each["ops"] > 20) == ("", True)
        assert len(each["over"]) > 0
        assert [pair for pair in each["over"] if pair[1] != pair[2]] == []  # each element is read by one thread
        unknown = {kind for kind in each["kinds"] if not kind.startswith("return")} - kept_kinds()
        assert unknown == set(), "run python -m tests.support.inductor.cuda_code, and look at what is new"
