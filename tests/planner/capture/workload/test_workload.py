"""Models named on the command line: parsed, imported, called with typed options, at any batch size, and all failures."""

import inspect
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from planner.capture.workload.models import ZOO, Workload, describe_options, get_factory
from planner.capture.workload.workload import ModelSpec, load, parse_options, parse_spec
from planner.graphs.errors import ModelError, PlannerError, UnknownOptionError, UsageError
from planner.settings.plan import PlanSettings
from planner.studies.workload_sizes import SizedModel
from planner.studies.workload_tracing import Tracing

OWN_MODEL = Path(__file__).parents[4] / "examples" / "own_model.py"

HEADER = """
import torch
from torch import nn
from typing import Optional

def ready(**given):
    ready.given = given
    return nn.Linear(2, 2), None, (torch.zeros(1, 2),)
"""


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("zoo:gpt2", ModelSpec("zoo", "gpt2")),
        ("zoo:gpt2,layers=4,batch=8", ModelSpec("zoo", "gpt2", (("layers", "4"), ("batch", "8")))),
        ("zoo:densenet121,blocks=2,2,growth=4", ModelSpec("zoo", "densenet121", (("blocks", "2,2"), ("growth", "4")))),
        ("a/b.py:build", ModelSpec("a/b.py", "build")),
        ("a/b.py:build,name=x:y", ModelSpec("a/b.py", "build", (("name", "x:y"),))),
        ("a,b:c.py:build,x=1=2", ModelSpec("a,b:c.py", "build", (("x", "1=2"),))),
        ("a.py:f, batch = 8", ModelSpec("a.py", "f", (("batch", "8"),))),
    ],
)
def test_specs_are_parsed(text: str, spec: ModelSpec) -> None:
    assert parse_spec(text) == spec
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpt2", "names no function: write zoo:NAME or path/to/file.py:function"),
        ("", "names no function"),
        ("model.py", "names no function"),
        ("model.py:", "names no function"),
        ("zoo:gpt2,", "has the option ''"),
        ("zoo:gpt2,layers", "has the option 'layers': write name=value"),
        ("zoo:gpt2,=4", "has the option '=4'"),
        ("zoo:gpt2,layers=4,layers=5", "gives the option 'layers' twice"),
    ],
)
def test_invalid_specs_raise(text: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_spec(text)
    assert said in str(caught.value)


def write(folder: Path, body: str) -> Path:
    path = folder / "model.py"
    path.write_text(HEADER + body)
    return path


def loss_of(workload: Workload) -> torch.Tensor:
    *inputs, target = workload.batch
    return workload.loss_fn(workload.model(*inputs), target)


def test_example_is_built_with_its_options() -> None:
    workload = load(parse_spec(f"{OWN_MODEL}:build,batch=3,width=8,depth=1,dropout=0.5"))
    assert [tuple(t.shape) for t in workload.batch] == [(3, 8), (3,)]
    assert [m.p for m in workload.model.modules() if isinstance(m, nn.Dropout)] == [0.5]
    assert loss_of(workload).isfinite()


def test_same_seed_builds_the_same_model() -> None:
    spec = parse_spec(f"{OWN_MODEL}:build,batch=3,width=8,depth=1")
    one, two, other = load(spec, seed=7), load(spec, seed=7), load(spec, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert torch.equal(one.batch[0], two.batch[0])
    assert not torch.equal(one.batch[0], other.batch[0])


def test_a_zoo_model_is_built() -> None:
    workload = load(parse_spec("zoo:mlp,batch=4,layers=1,width=8,classes=3,dropout=0"))
    assert workload.batch[0].shape == (4, 8)
    assert loss_of(workload).isfinite()


@pytest.mark.parametrize("spec", ["zoo:mlp,width=4096,batch=100000", f"{OWN_MODEL}:build,batch=1000000,width=10000"])
def test_fake_models_allocate_nothing(spec: str) -> None:
    workload = load(parse_spec(spec), fake=True)
    tensors = [*workload.model.parameters(), *workload.batch]
    assert all(isinstance(t.data if isinstance(t, nn.Parameter) else t, FakeTensor) for t in tensors)


def test_options_have_the_types_of_the_parameters(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def build(n: int, p: float, flag: bool, name: str, maybe: int | None = 3, other: Optional[float] = None,\n"
        "          count=2, rate=0.5, on=True, word='w', anything=None, either: int | str = 0):\n"
        "    return ready(**locals())\n",
    )
    options = "n=4,p=1,flag=yes,name=4,maybe=none,other=2,count=7,rate=1,on=false,word=1,anything=2.5,either=x,y"
    load(parse_spec(f"{path}:build,{options}"))
    given = _given(path)
    assert given == {
        "n": 4,
        "p": 1.0,
        "flag": True,
        "name": "4",
        "maybe": None,
        "other": 2.0,
        "count": 7,
        "rate": 1.0,
        "on": False,
        "word": "1",
        "anything": 2.5,
        "either": "x,y",
    }
    assert type(given["p"]) is float and type(given["rate"]) is float


def _given(path: Path) -> dict[str, object]:
    module = sys.modules[f"_planner_model_{path.stem}"]
    given: dict[str, object] = module.ready.given
    return given


def test_untyped_options_get_the_type_of_their_text(tmp_path: Path) -> None:
    path = write(tmp_path, "def build(**more):\n    return ready(**more)\n")
    load(parse_spec(f"{path}:build,a=1,b=1.5,c=true,d=text"))
    assert _given(path) == {"a": 1, "b": 1.5, "c": True, "d": "text"}


def test_modules_in_the_same_folder_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_the_model.py").write_text("WIDTH = 5\n")
    path = write(tmp_path, "def build():\n    from beside_the_model import WIDTH\n    return ready(width=WIDTH)\n")
    load(parse_spec(f"{path}:build"))
    assert _given(path) == {"width": 5}


def test_module_in_the_same_folder_can_be_imported_when_the_model_runs(tmp_path: Path) -> None:
    (tmp_path / "beside_what_runs.py").write_text("WIDTH = 5\n")
    later = "class Later(nn.Module):\n    def forward(self):\n        import beside_what_runs as b\n        return b.WIDTH\n"
    path = write(tmp_path, f"{later}def build():\n    return Later(), None, ()\n")
    assert load(parse_spec(f"{path}:build")).model() == 5


def test_file_may_be_named_like_a_package(tmp_path: Path) -> None:
    path = tmp_path / "torch.py"
    path.write_text(HEADER + "def build():\n    return ready()\n")
    assert isinstance(load(parse_spec(f"{path}:build")).model, nn.Module)
    # Processes started later take over sys.path, and have not imported the package yet.
    found = PathFinder.find_spec("torch")
    assert found.origin == torch.__file__


def test_batch_may_be_a_list(tmp_path: Path) -> None:
    path = write(tmp_path, "def build():\n    return [nn.Linear(2, 2), None, [torch.zeros(1, 2)]]\n")
    workload = load(parse_spec(f"{path}:build"))
    assert isinstance(workload, Workload)
    assert isinstance(workload.batch, tuple)


def test_batch_may_be_a_dict(tmp_path: Path) -> None:
    path = write(tmp_path, "def build():\n    return nn.Linear(2, 2), None, {'input': torch.zeros(1, 2)}\n")
    workload = load(parse_spec(f"{path}:build"))
    assert isinstance(workload.batch, dict)
    assert workload.model(**workload.batch).shape == (1, 2)


@pytest.mark.parametrize(
    ("body", "call", "said"),
    [
        ("", "build", "has no function 'build': its functions are ready"),
        ("build = 3", "build", "has no function 'build'"),
        ("def build(batch=8, name='x'): return ready()", "build,size=4", "has no option 'size': its options are batch=8, name=x"),
        ("def build(): return ready()", "build,size=4", "has no option 'size': it has none"),
        ("def build(batch, seq): return ready()", "build,seq=4", "needs a value for batch: "),
        (
            "def build(batch=8): return ready()",
            "build,batch=big",
            "option 'batch' of build of {path} is 'big': must be a whole number",
        ),
        ("def build(p: float = 8): return ready()", "build,p=", "is '': must be a number"),
        ("def build(p: bool): return ready()", "build,p=maybe", "is 'maybe': must be true or false"),
        ("def build(p: int | None): return ready()", "build,p=x", "is 'x': must be a whole number"),
        ("def build(p: torch.dtype): return ready()", "build,p=x", "is of type dtype: only int, float, bool and str"),
        ("def build(p=(1, 2)): return ready()", "build,p=1", "is of type tuple: only int, float, bool and str"),
        ("def build():\n    return 1 / 0", "build", "failed: ZeroDivisionError: division by zero ({path}, line 11)"),
        ("def build():\n    torch.zeros(2) @ torch.zeros(3)", "build", "failed: RuntimeError: "),
        ("def build():\n    raise ValueError('two\\nlines')", "build", "failed: ValueError: two ({path}, line 11)"),
        ("def build():\n    raise ValueError", "build", "failed: ValueError ({path}, line 11)"),
        ("def build(): pass", "build", "returned a NoneType: must return (model, loss_fn, batch)"),
        ("def build(): return 1, 2", "build", "returned a tuple of 2: must return (model, loss_fn, batch)"),
        ("def build(): return 1, None, ()", "build", "returned a int as the model: must be a torch.nn.Module"),
        ("def build(): return nn.Linear(1, 1), 3, ()", "build", "returned a int as the loss function: must be callable, or None"),
        ("def build(): return nn.Linear(1, 1), None, torch.zeros(1)", "build", "returned a Tensor as the batch: must be a tuple"),
        ("def build(:", "build", "cannot be imported: SyntaxError: invalid syntax ({path}, line 10)"),
        (
            "import no_such_module_anywhere",
            "build",
            "ModuleNotFoundError: No module named 'no_such_module_anywhere' ({path}, line 10)",
        ),
        ("raise SystemExit(3)", "build", "cannot be imported: SystemExit: 3 ({path}, line 10)"),
    ],
)
def test_unbuildable_models_raise(body: str, call: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"\n{body}\n")
    with pytest.raises(PlannerError) as caught:
        load(parse_spec(f"{path}:{call}"))
    assert said.replace("{path}", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.py", "is not there"), ("", "is a folder"), ("none", "is not there"), ("text.txt", "is not a Python file")],
)
def test_files_other_than_python_raise(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    with pytest.raises(ModelError, match=said):
        load(ModelSpec(str(tmp_path / name), "build"))


def zoo_options(text: str) -> dict[str, object]:
    spec = parse_spec(f"zoo:{text}")
    return parse_options(get_factory(spec.function), spec, spec.function)


def test_options_of_the_zoo_are_parsed_from_text() -> None:
    read = zoo_options("gpt2,layers=4,dropout=0,tie=False, attention = written")
    assert read == {"layers": 4, "dropout": 0.0, "tie": False, "attention": "written"}
    assert zoo_options("resnet50,blocks=1,2,3") == {"blocks": (1, 2, 3)}
    assert zoo_options("llama,kv_heads=none,heads=8") == {"kv_heads": None, "heads": 8}


@pytest.mark.parametrize("name", ZOO)
def test_described_options_of_the_zoo_are_the_defaults(name: str) -> None:
    parameters = inspect.signature(get_factory(name)).parameters
    texts = describe_options(parameters).removeprefix("its options are ").replace(", ", ",")
    assert zoo_options(f"{name},{texts}") == {option: parameter.default for option, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("zoo:gpt5", "gpt2, llama"),
        ("zoo:mlp,size=3", "mlp has no option 'size': its options are batch=1024"),
        ("zoo:densenet121,seq=3", "its options are batch=64, size=224, blocks=6,12,24,16, growth=32"),
        ("zoo:mlp,layers=many", "option 'layers' of mlp is 'many': must be a whole number"),
        ("zoo:mlp,dropout=half", "option 'dropout' of mlp is 'half': must be a number"),
        ("zoo:gpt2,tie=maybe", "option 'tie' of gpt2 is 'maybe': must be true or false"),
        ("zoo:resnet50,blocks=3,x", "option 'blocks' of resnet50 is '3,x': must be whole numbers separated by commas"),
        ("zoo:mlp,layers=0", "at least 1"),
    ],
)
def test_unknown_models_and_options_of_the_zoo_raise(spec: str, said: str) -> None:
    with pytest.raises(PlannerError, match=said):
        load(parse_spec(spec))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_raises() -> None:
    with pytest.raises(ModelError, match="no CUDA device on this machine: use --device cpu, or plan for one with --roofline"):
        load(parse_spec("zoo:mlp"), device="cuda")


@pytest.mark.gpu
def test_model_and_batch_are_moved_to_the_device() -> None:
    workload = load(parse_spec(f"{OWN_MODEL}:build,batch=2,width=8,depth=1"), device="cuda")
    assert {t.device.type for t in (*workload.model.parameters(), *workload.batch)} == {"cuda"}


WAY_OUT = "name the one that is the batch size with --batch-option"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(
        "def build(width: int = 4):\n    raise AssertionError\n\n\n"
        "def load(batch: int = 4):\n    raise ValueError(\"the loader has no option 'batch'\")\n"
    )
    return path


@pytest.mark.parametrize(("spec", "option"), [("zoo:mlp", "size"), ("{source}:build", "batch")])
def test_an_option_that_there_is_not_is_told_with_the_way_out(spec: str, option: str, source: Path) -> None:
    sizes = SizedModel(parse_spec(spec.format(source=source)), option, Tracing(PlanSettings(roofline="cpu")), way_out=WAY_OUT)
    with pytest.raises(UsageError, match=rf"has no option '{option}': its options are .*{WAY_OUT}") as refused:
        sizes.trace_graph(8)
    assert isinstance(refused.value.__cause__, UnknownOptionError)
    assert refused.value.__cause__.option == option


@pytest.mark.parametrize(("spec", "option"), [("{source}:load", "batch"), ("{source}:load,size=3", "batch")])
def test_unrelated_option_error_is_raised_without_advice(spec: str, option: str, source: Path) -> None:
    sizes = SizedModel(parse_spec(spec.format(source=source)), option, Tracing(PlanSettings(roofline="cpu")), way_out=WAY_OUT)
    with pytest.raises(PlannerError, match="has no option") as refused:
        sizes.trace_graph(8)
    assert WAY_OUT not in str(refused.value)
