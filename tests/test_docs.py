"""README and documentation: links, Python blocks, messages, commands; tables and numbers are those of committed results."""

import ast
import csv
import importlib
import json
import os
import re
import shlex
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
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch.utils.data import DataLoader

import planner
from examples import demo
from planner.cli.main import build_parser, main
from planner.graphs import errors
from planner.graphs.errors import PlannerError
from planner.graphs.units import format_bytes
from planner.show.views.text import format_table as text_table
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


Rows = list[dict[str, str]]
Table = list[list[str]]


def table(page: str, first: str) -> Table:
    """Return the cells of the table of `page` whose header begins with the cells `first`, header included."""
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    found = [[cells(line) for line in text.splitlines()] for text in tables if text.startswith(first)]
    assert len(found) == 1, f"{page} has {len(found)} tables that begin with {first}"
    header, _, *lines = found[0]
    return [header, *lines]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def results(*path: str) -> Rows:
    with ROOT.joinpath("results", *path, "rows.csv").open() as file:
        return list(csv.DictReader(file))


_MODELS = {"ResNet-50": "resnet50", "ViT": "vit", "U-Net": "unet", "MobileNetV2": "mobilenet_v2", "GPT-2": "gpt2"}
_METHODS = {
    "the plan": "windows",
    "checkpointing blocks": "checkpoint-blocks",
    "selective checkpointing": "sac",
    "Memory Budget API": "memory-budget",
    "rotor": "rotor",
    "DTR, best of seven": "dtr (best)",
    "MegEngine, better of two": "megengine (best)",
}


def test_the_overheads_of_the_front_page_are_those_of_the_comparison() -> None:
    known = table("results/compare/summary.md", "| model | budget | windows")
    header, *shown = table("README.md", "| | the plan")
    assert set(header[1:]) == _METHODS.keys() and {line[0] for line in shown} == _MODELS.keys()
    for model, *overheads in shown:
        share = "70%" if model == "GPT-2" else "50%"
        (line,) = [dict(zip(known[0], line, strict=True)) for line in known[1:] if line[:2] == [_MODELS[model], share]]
        found = [line[_METHODS[method]].split(" ")[0].strip("*") for method in header[1:]]
        said = ["does not fit" if text == "OOM" else f"+{text}" for text in found]
        assert [cell.strip("*") for cell in overheads] == said, model


def test_the_comparison_in_the_benchmarks_is_the_committed_one() -> None:
    assert table("docs/benchmarks.md", "| model | budget | windows") == table(
        "results/compare/summary.md", "| model | budget | windows"
    )


def test_the_runs_on_a_gpu_of_the_front_page_are_measured_ones() -> None:
    _, *shown = table("README.md", "| on an H100")
    measured = [row for name in ("plans", "ways", "arena") for row in results("gpu", name)]
    names = {"GPT-2": "gpt2", "ResNet-50": "resnet50", "U-Net": "unet"}
    ways = {"": "reserved", "in an arena": "arena"}
    for said, budget, reserved, time, bits in shown:
        model, _, way = said.partition(", ")
        rows = [row for row in measured if (row["model"], row["way"]) == (names[model], ways[way])]
        assert [budget, reserved, time, bits] in [measured_cells(row) for row in rows if row["slowdown"]], said


def measured_cells(row: dict[str, str]) -> list[str]:
    """Return what the front page says of a row: budget, reserved bytes, time and bits."""
    assert row["machine"].startswith("NVIDIA H100")
    bits = "identical"
    if row["bits"] != "True":
        assert float(row["gradient_error"]) <= 1.5 * float(row["eager_error"])
        bits = "as far from eager PyTorch as its own second run"
    budget, reserved = (format_bytes(int(row[f"{name}_bytes"])) for name in ("budget", "reserved"))
    return [f"{budget} ({row['share']})", reserved, f"+{row['slowdown'].split('%')[0]}%", bits]


def test_predicted_peaks_are_the_measured_ones() -> None:
    assert all(row["planner_bytes"] == row["measured_bytes"] for row in results("predicted_peaks"))


def test_time_on_gpus_is_said_once() -> None:
    saying = [
        page for page in PAGES if re.search(r"(\d+ minutes|hour)\b[^.]{0,30} on (a GPU|an? H\d00|H\d00s)", page.read_text())
    ]
    assert [name_of(page) for page in saying] == ["docs/gpu.md"]


def commands() -> list[tuple[str, str]]:
    """Return the commands in the blocks of all pages that are run as they stand, each with its page."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```(?:bash|text)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]
            found += [(name_of(page), line) for line in lines if line.startswith("planner ") and "..." not in line]
    return found


def test_commands_that_pages_show_are_accepted() -> None:
    parser, refused = build_parser(), []
    for page, command in commands():
        _, *words = shlex.split(command, comments=True)
        try:
            assert parser.parse_args(words).command == words[0]
        except (PlannerError, SystemExit) as error:
            refused.append(f"{page}: {command}: {error}")
    assert refused == []


def sides(diff: str) -> tuple[str, str]:
    """Return the text before and after a diff."""
    before, after = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in kept) for kept in ((" ", "-"), (" ", "+"))
    )
    return before, after


@pytest.mark.usefixtures("fresh_compiler")
def test_both_sides_of_the_diff_on_the_front_page_train_alike(tmp_path: Path) -> None:
    import torch

    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    trained = []
    for side in sides(diff):
        names = small(tmp_path)
        exec(compile(side, "README.md", "exec"), names)
        trained.append(names["model"].state_dict())
    assert [name for name, value in trained[0].items() if not torch.equal(value, trained[1][name])] == []


@pytest.mark.slow
def test_the_commands_of_kernels_print_what_the_table_beside_them_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/options/kernels.md"
    monkeypatch.chdir(tmp_path)
    for command in [command for said, command in commands() if said == page and "resnet50" in command]:
        assert main(shlex.split(command)[1:]) == 0
    (line,) = [line for line in table(page, "| budget | published") if line[0] == "10.01 GB"]
    assert f"overhead             {line[-1]}," in capsys.readouterr().out


def shape(line: str) -> str:
    """Return a line of output without its numbers, units and spaces between columns."""
    return " ".join(re.sub(r"[+-]?\d[\d.,]*(%|x| [kMG]?B\b| [mu]?s\b|)", "0", line).split())


def block(page: str, first: str) -> list[str]:
    """Return the lines of the block of `page` that begins with `first`."""
    (found,) = re.findall(rf"^```\n({re.escape(first)}.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(found).splitlines()


def test_the_table_of_the_demo_has_the_form_that_the_demo_prints(tmp_path: Path) -> None:
    workload = [small(tmp_path)[name] for name in ("model", "loss_fn", "batch")]
    plan = planner.solve(planner.trace(*workload, passes=1), "100%")
    printed = text_table(demo.COLUMNS, [demo.row(plan, planner.run(plan, *workload, repeats=1))], numbers=len(demo.COLUMNS))
    assert {shape(line) for line in block("docs/benchmarks.md", "  budget")} == {shape(line) for line in printed.splitlines()}


@pytest.mark.slow
def test_the_advice_of_the_page_has_the_form_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command, *shown = block("docs/budget.md", "$ planner advise")
    assert main(shlex.split(command.removeprefix("$ planner "))) == 0
    assert {shape(line) for line in shown} - {shape(line) for line in capsys.readouterr().out.splitlines()} == set()


FREE = {"docs/formulation.md": "mathematics: values of variables, and numbers of rows, which test_formulation.py compares"}
_COMPARED = "tests/test_docs.py compares it"
TABLES = {
    "| | the plan |": _COMPARED,
    "| on an H100, measured |": _COMPARED,
    "| model | budget | windows |": _COMPARED,
    "| budget | published |": "its first row is compared by tests/test_docs.py; MONeT's figures are from its paper",
}
_COMMENT = re.compile(r"<!-- numbers of (\S+)\n(.*?)-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w.-]*[a-zA-Z_/])(?:(?=[%\s),;:.|]|$))")
_NAME = re.compile(r"(?:[Tt]orch|Python|HiGHS|torch-kitsune|commit) \S+|\b(?:ICLR|H|A|RTX|RFC) ?\d+|(?<=\d)x\b|\b20\d\d(?=[),])")
_CODE = r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a comment: words of the text above it, and where their numbers are from."""

    page: str
    above: str
    place: str
    said: str
    source: str


@cache
def lines() -> list[Line]:
    found = []
    for page in PAGES:
        text, begin, above = page.read_text(), 0, ""
        for comment in _COMMENT.finditer(text):
            above = text[begin : comment.start()].strip() or above  # one comment behind another is of the same text
            for line in comment[2].splitlines():
                said, _, source = line.partition(": ")
                found.append(Line(name_of(page), above, comment[1], said, source))
            begin = comment.end()
    return found


def numbers(text: str) -> list[str]:
    return [number.rstrip(",").replace(",", "") for number in _NUMBER.findall(_NAME.sub("", text))]


def written(value: float, like: str) -> str:
    """Return `value` with as many decimals as `like`."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("line", lines(), ids=lambda line: f"{line.page}: {line.said}")
def test_numbers_are_those_of_the_results(line: Line) -> None:
    assert line.said in line.above or line.said == "table", "the text above does not say so"
    said = (
        [number for cell in _cells(_tables(line.above)[-1]) for number in numbers(cell)]
        if line.said == "table"
        else numbers(line.said)
    )
    assert said
    place = ROOT / line.place
    if line.source.startswith('"'):
        known = " ".join(path.read_text() for path in (place.glob("*.md") if place.is_dir() else (place,)))
        quotes = line.source.strip('"').split('", "')
        assert [quote for quote in quotes if quote not in known] == []
        values = [float(number) for quote in quotes for number in numbers(quote)]
        assert [number for number in said if all(written(value, number) != number for value in values)] == []
    else:
        if place.is_dir():
            names: dict[str, Any] = {"rows": pd.read_csv(place / "rows.csv"), "pd": pd, "folder": place}
        else:
            module = line.place.removesuffix(".py")
            names = vars(importlib.import_module(module.replace("/", "."))) if module != line.place else {}
            names = {"text": place.read_text(), "re": re, "root": ROOT} | names
        values = list(np.atleast_1d(eval(line.source, names)))
        assert [written(value, number) for value, number in zip(values, said, strict=True)] == said


@pytest.mark.parametrize("page", [name for name in map(name_of, PAGES) if name not in FREE])
def test_each_number_of_the_prose_is_held(page: str) -> None:
    for piece in _COMMENT.sub("\0", (ROOT / page).read_text()).split("\0"):
        text = above = piece.strip()
        for line in lines():
            if (line.page, line.above) == (page, above):
                text = text.replace(line.said, "")
        assert numbers(_prose(text)) == [], text


@pytest.mark.parametrize("page", [name for name in map(name_of, PAGES) if name not in FREE])
def test_each_table_is_held(page: str) -> None:
    for piece in _COMMENT.sub("\0", (ROOT / page).read_text()).split("\0"):
        held = any((line.page, line.above, line.said) == (page, piece.strip(), "table") for line in lines())
        loose = _tables(piece)[: -1 if held else None]
        assert [table for table in loose if _is_of_numbers(table) and not table.startswith(tuple(TABLES))] == []


def _tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*(?:\n|\Z))+", text, re.MULTILINE)


def _cells(table: str) -> list[str]:
    """Return the cells of a table that are not empty, without its header and the first cell of each row."""
    return [cell.strip() for row in table.splitlines()[2:] for cell in row.split("|")[2:] if cell.strip()]


def _is_of_numbers(table: str) -> bool:
    """Return True if most cells of a table are numbers, not text in which numbers occur."""
    cells = _cells(table)
    return sum(bool(re.match(r"[*+-]*\d", cell)) for cell in cells) > len(cells) / 2


def _prose(text: str) -> str:
    """Return `text` without code, formulas, links' targets, headings, numbers of items, images and tables."""
    text = re.sub(r"^ *```(?s:.*?)^ *```|^:::.*(?:\n    .*)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:#|\||!\[).*$|^ *\d+\. ", "", text, flags=re.MULTILINE)
    return re.sub(_CODE, "", text)
