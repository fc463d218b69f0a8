"""README and documentation: tables are those of committed results, commands are accepted, loops are as shown."""

import csv
import re
import shlex
from pathlib import Path

import pytest

import planner
from examples import demo
from graphs.errors import PlannerError
from graphs.units import format_bytes
from planner.cli.main import build_parser, main
from planner.show.views.text import format_table as text_table
from tests.support.pages import PAGES, ROOT, name_of, small

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
