"""README and documentation: links lead somewhere, Python blocks run, messages that are explained exist."""

import ast
import re
from pathlib import Path

import pytest

from graphs import errors
from tests.support.documented import ROOT, SURROUNDINGS, Surroundings, blocks, first_line, in_folder, name_of, pages, small

PAGES = pages()
WITH_BLOCKS = [page for page in PAGES if blocks(page)]
_LINK = re.compile(r"\]\(([^)\s]+)\)")

# By page and first line: the blocks that are not executed here, and why.
GPU, PROCESSES = "needs a GPU", "needs several processes: tests/test_examples.py runs examples/train_ddp.py and train_fsdp2.py"
COMPILER = "Inductor compiles for half a minute: tests/planner/training/test_inductor_kernels.py does"
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
        'model = torch.compile(model, backend="planner", dynamic=False, options={"budget": "8GB", "kernels": "inductor"})',
    ): COMPILER,
}


def anchors(page: Path) -> set[str]:
    """Return the anchors of `page`: those that GitHub gives its headings, and its own."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    own = re.findall(r'<a id="([^"]+)">', page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(own)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
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


def test_blocks_that_are_not_executed_are_there() -> None:
    there = {(name_of(page), first_line(block)) for page in WITH_BLOCKS for block in blocks(page)}
    assert NOT_EXECUTED.keys() - there == set()


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:graphs|solvers|planner|benchmarks|tests)/[\w/.-]+)`", page.read_text())
    assert [name for name in named if "CHANGELOG" not in page.name and not (ROOT / name).exists()] == []


def test_modules_of_the_figures_exist() -> None:
    drawn = re.findall(r'^    \("(planner|solvers|graphs)([\w.]*)",', (ROOT / "docs/figures/draw.py").read_text(), re.MULTILINE)
    paths = [ROOT / (floor + rest).replace(".", "/") for floor, rest in drawn]
    assert paths and all(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
