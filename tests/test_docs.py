"""README and documentation: links lead somewhere, Python blocks run, messages that are explained exist."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils.data import DataLoader

import planner
from graphs import errors
from tests.support.pages import PAGES, ROOT, Names, name_of, small


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def first_line(block: str) -> str:
    """Return the line that a block is known by: the first that is no import."""
    lines = [line for line in block.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    return lines[0] if lines else block.splitlines()[0]


@dataclass(frozen=True)
class Surroundings:
    """What a page takes for given.

    Attributes:
        names: what its blocks may use.
        then: called with the names after each block.
        apart: whether each block begins with the same names, in place of going on with those of the blocks before.
    """

    names: Callable[[Path], Names]
    then: Callable[[Names], object] = lambda _: None
    apart: bool = False


def with_accelerate(folder: Path) -> Names:
    accelerate = pytest.importorskip("accelerate")
    return small(folder) | {"accelerator": accelerate.Accelerator(cpu=True)}


def with_transformers(folder: Path) -> Names:
    from tests.support.integrations.huggingface import arguments, model, sentences

    data = sentences(8)
    loader = DataLoader(data, batch_size=4)
    names = {
        "args": arguments(folder, max_steps=2),
        "batch": next(iter(loader)),
        "data": data,
        "loader": loader,
        "model": model(),
    }
    return small(folder) | names


def with_peft(folder: Path) -> Names:
    pytest.importorskip("peft")
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # which PEFT asks for, and Transformers has renamed
    return with_transformers(folder)


class Writer:
    """A writer of TensorBoard, as far as loops use it."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


def with_writer(folder: Path) -> Names:
    pytest.importorskip("lightning")
    return with_transformers(folder) | {"writer": Writer()}


def with_lightning(folder: Path) -> Names:
    from tests.support.integrations.lightning import Module, batches

    # Of Lightning, where a loader has no workers, or fewer batches than are logged at a time.
    warnings.filterwarnings("ignore", ".*does not have many workers|.*smaller than the logging interval")
    return small(folder) | {"module": Module(), "loader": batches(2)}


def with_devices(folder: Path) -> Names:
    """The graph of a step, and the same measured on another device."""
    names = small(folder)
    step = names["model"], names["loss_fn"], names["batch"]
    graph = planner.trace(*step, passes=1, options=["in-place", "pack"])
    return names | {"graph": graph, "on_gpu": planner.trace(*step, passes=1)}


def with_plan(folder: Path) -> Names:
    """A plan in a file, as the command leaves it."""
    names = small(folder)
    graph = planner.trace(names["model"], names["loss_fn"], names["batch"], passes=1)
    planner.solve(graph, "100%").save(folder / "plan.json", graph=folder / "model.json")
    return names


def step_of(names: Names) -> None:
    """A step of the loop, by what a block has compiled."""
    x, y = names["batch"]
    loss = names["step"](x, y) if "step" in names else names["loss_fn"](names["model"](x), y)
    loss.backward()


SURROUNDINGS = {
    "docs/guides/accelerate.md": Surroundings(with_accelerate),
    "docs/guides/huggingface.md": Surroundings(with_transformers),
    "docs/guides/lightning.md": Surroundings(with_lightning),
    "docs/guides/logging.md": Surroundings(with_writer),
    "docs/guides/lora.md": Surroundings(with_peft),
    "docs/guides/torch-compile.md": Surroundings(small, step_of, apart=True),
    "docs/placement.md": Surroundings(with_devices),
    "docs/report.md": Surroundings(with_plan),
}


@contextmanager
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, what blocks write to their home or where they are lands in `folder`."""
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.chdir(folder)
        yield


WITH_BLOCKS = [page for page in PAGES if blocks(page)]
_LINK = re.compile(r"\]\(([^)\s]+)\)")

# By page and first line: the blocks that are not executed here, and why.
GPU, PROCESSES = "needs a GPU", "needs several processes: tests/test_examples.py runs examples/train_ddp.py and train_fsdp2.py"
COMPILER = "Inductor compiles for half a minute: tests/planner/train/compile/test_inductor_kernels.py does"
NOT_EXECUTED = {
    ("docs/guides/training-loop.md", 'with torch.autocast("cuda", dtype=torch.bfloat16):'): GPU,
    ("docs/guides/cuda-graphs.md", 'step = planner.compile(model, loss_fn, batch, budget="8GB", cuda_graph=True)'): GPU,
    (
        "docs/guides/distributed.md",
        "model = DistributedDataParallel(model)  # or fully_shard(block) for its blocks, then fully_shard(model)",
    ): PROCESSES,
    (
        "docs/guides/inductor.md",
        'step = planner.compile(model, loss_fn, (x, y), budget="8GB", optimizer="adamw", kernels="inductor")',
    ): COMPILER,
    (
        "docs/guides/torch-compile.md",
        'model = torch.compile(model, backend="planner", options={"budget": "8GB", "kernels": "inductor"})',
    ): COMPILER,
}


def anchors(page: Path) -> set[str]:
    """Return the anchors of `page`: those that GitHub gives its headings, and its own."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    own = re.findall(r'<a id="([^"]+)">', page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(own)


def find_in_pages(rule: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Return what `rule` finds wrong in each page; pages without findings are left out."""
    found = {name_of(page): rule(page) for page in PAGES}
    return {name: wrong for name, wrong in found.items() if wrong}


def dead_links(page: Path) -> list[str]:
    wrong = []
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def test_links_have_existing_targets() -> None:
    assert find_in_pages(dead_links) == {}


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.stem in ("huggingface", "lightning") else page for page in WITH_BLOCKS],
    ids=name_of,
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = SURROUNDINGS.get(name_of(page), Surroundings(small))
    names = given.names(tmp_path)
    with in_folder(tmp_path, monkeypatch):
        for number, block in enumerate(blocks(page), 1):
            if (name_of(page), first_line(block)) not in NOT_EXECUTED:
                exec(compile(block, f"{name_of(page)}, block {number}", "exec"), names)
                given.then(names)
            if given.apart:
                names = given.names(tmp_path)


def uses_before_import(page: Path) -> list[str]:
    nodes = [node for block in blocks(page) for node in ast.walk(ast.parse(block))]
    imports = [n for n, node in enumerate(nodes) if isinstance(node, ast.Import) and node.names[0].name == "planner"]
    uses = [n for n, node in enumerate(nodes) if isinstance(node, ast.Name) and node.id == "planner"]
    return ["planner"] if uses and not (imports and imports[0] < uses[0]) else []


def test_pages_import_the_planner_before_they_use_it() -> None:
    assert find_in_pages(uses_before_import) == {}


def test_blocks_that_are_not_executed_are_there() -> None:
    there = {(name_of(page), first_line(block)) for page in WITH_BLOCKS for block in blocks(page)}
    assert NOT_EXECUTED.keys() - there == set()


def hooks() -> ModuleType:
    """Return the module ``docs/hooks.py``, which MkDocs loads by its path."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_that_people_search_for_lead_to_one_page_each() -> None:
    synonyms: dict[str, tuple[str, ...]] = hooks().SYNONYMS
    assert [page for page in synonyms if not (ROOT / "docs" / page).exists()] == []
    words = [word for page in synonyms.values() for word in page]
    assert len(set(words)) == len(words)
    assert {"gradient checkpointing", "OOM", "bf16", "LoRA", "EMA", "GAN"} <= set(words)


@pytest.mark.slow
def test_the_search_knows_these_words_and_ranks_guides_before_results(tmp_path: Path) -> None:
    pytest.importorskip("material")
    synonyms = hooks().SYNONYMS
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    tags = {entry["location"].split("#")[0]: entry["tags"] for entry in entries if entry.get("tags")}
    assert tags == {page.removesuffix(".md") + "/": list(words) for page, words in synonyms.items()}
    boosts = {entry["location"].split("/")[0]: entry.get("boost", 1.0) for entry in entries}
    assert boosts["guides"] > boosts["limits"] > boosts["results"] == boosts["examples"] == boosts["CHANGELOG"]


@cache
def messages() -> list[str]:
    """Return the texts in the sources; what is put into one stands as a zero byte."""
    found = []
    for source in (path for floor in ("graphs", "solvers", "planner") for path in (ROOT / floor).rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_that_troubleshooting_explains_exist() -> None:
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    explained = [said for cell in cells for said in re.findall(r"`([^`]+)`", cell) if not hasattr(errors, said)]
    known = messages()
    assert len(explained) > 50
    assert [said for said in explained if not any(all(part in text for part in said.split("...")) for text in known)] == []


def missing_files(page: Path) -> list[str]:
    named = re.findall(r"`((?:graphs|solvers|planner|benchmarks|tests)/[\w/.-]+)`", page.read_text())
    return [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    ("page", "first"), [("training-loop", "out of memory in the"), ("what-a-plan-depends-on", "config.alpha was")]
)
def test_messages_that_pages_show_have_the_form_of_the_sources(page: str, first: str) -> None:
    text = (ROOT / "docs" / "guides" / f"{page}.md").read_text()
    (shown,) = re.findall(rf"^```\n({first}.*?)\n```", text, re.MULTILINE | re.DOTALL)
    forms = [re.sub(r"\0|\\\{\w+\\\}", ".+", re.escape(message).replace("\\\0", "\0")) for message in messages()]
    assert any(re.match(form, shown.replace("\n", " ")) for form in forms if len(form) > 60)


def test_files_and_folders_that_pages_name_exist() -> None:
    assert find_in_pages(missing_files) == {}
