"""The command in hostile hands: names that drive terminals, files that are none, figures that were edited."""

import io
import json
import os
import subprocess
import sys
import threading
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.cli.arguments import print_error
from planner.graphs.errors import OutputError
from planner.graphs.escape import escape_lines, escape_text
from planner.graphs.io.files import check_folder, is_stdout, open_descriptor, write_text
from planner.graphs.io.formats import write_graph
from planner.graphs.io.graph_document import convert_to_dict
from planner.graphs.ir import Graph
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.document import plan_to_dict, write_plan
from planner.plans.plan import Plan, read_plan
from planner.plans.solve import solve
from planner.progress import LineView
from planner.show.facts.timeline import Timeline
from planner.show.views import figures
from planner.studies.comparison_rows import ComparisonRow
from planner.studies.rows import list_columns
from tests.support.cli import ROOT, Said, call, command, refused
from tests.support.marks import slow

NAME = "n\x1b[31m[red]\u202e\r\u2028\x07\x9b"
SHOWN = r"n\x1b[31m[red]\u202e\r\u2028\x07\x9b"


def graph(name: str = "") -> Graph:
    plain = make_training_chain(6)
    ops = tuple(replace(op, name=f"{name}{op.name}", module=name) for op in plain.ops)
    tensors = tuple(replace(t, name=f"{name}{t.name}") for t in plain.tensors)
    return Graph(ops, tensors, plain.kept, {"model": name, name: name})


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    write_graph(graph(), tmp_path / "model.json")
    return tmp_path / "model.json"


def is_clean(said: Said) -> bool:
    return all(c.isprintable() or c == "\n" for c in said.out + said.err)


# --- names ----------------------------------------------------------------------------------------


def test_terminal_control_sequences_are_escaped_in_all_output(tmp_path: Path, capsys: Any) -> None:
    write_graph(graph(NAME), tmp_path / "model.json")
    file = tmp_path / "model.json"
    too_small = call(capsys, "solve", file, "--budget", "1B")
    refused(too_small, 3, SHOWN)
    twice = convert_to_dict(graph(NAME))
    twice["ops"] = [{**op, "name": NAME} for op in twice["ops"]]
    (tmp_path / "twice.json").write_text(json.dumps(twice))
    refused(call(capsys, "info", tmp_path / "twice.json"), 1, f"op {NAME!r} appears twice")
    plan_file = tmp_path / f"{NAME}.json"
    solved = call(capsys, "solve", file, "--budget", "60%", "-o", plan_file)
    assert solved.code == 0
    assert SHOWN in solved.out
    for said in (
        too_small,
        solved,
        call(capsys, "info", file),
        call(capsys, "info", plan_file),
        call(capsys, "show", plan_file, "-o", tmp_path / "page.html"),
        call(capsys, "curve", file, "--budgets", "2", "--jobs", "1", "-o", tmp_path / f"{NAME}.csv"),
        call(capsys, "compare", file, "--methods", "keep-everything", "--jobs", "1", "-o", tmp_path / NAME),
        call(capsys, "solve", file, "--budget", NAME),
        call(capsys, "trace", NAME, "-o", tmp_path / "x.json"),
        call(capsys, NAME),
        call(capsys, "info", tmp_path / f"no{NAME}"),
    ):
        assert is_clean(said)


def test_progress_is_escaped() -> None:
    stream = io.StringIO()
    line = LineView(stream=stream)
    line.show_activity(f"running {NAME}")
    line.note(f"at {NAME}")
    assert stream.getvalue() == f"planner: at {SHOWN}\n"
    assert line._text == f"running {SHOWN}"
    stream = io.StringIO()
    with redirect_stderr(stream):
        print_error(f"one\ntwo {NAME}")
    assert stream.getvalue() == f"planner: error: one two {SHOWN}\n"


def test_printable_text_is_not_escaped() -> None:
    for text in ("", "aten.mm.default", "größe 日本 [0.5]", "zoo:gpt2,layers=4"):
        assert escape_text(text) == text
    assert escape_text("a\nb") == r"a\nb"
    assert escape_lines("a\nb\x1b") == "a\nb\\x1b"


@pytest.mark.parametrize(
    "name", ["$_$", "a_b^c\\d%e{", "größe 日本 😀", "", *slow("$", "$x^", "one\ntwo", "word " * 200, "x" * 5000)]
)
def test_figure_title_shows_special_characters_literally(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = figures.create_figure()
    axes = figure.add_subplot()
    figures.set_title(axes, name)
    title = axes.get_title()
    assert not axes.title.get_parse_math()
    assert "".join(title.split()).removesuffix("...") in "".join(escape_text(name).split())
    assert len(title) < 300
    for ending in ("png", "svg"):
        figures.save_figure(figure, tmp_path / f"figure.{ending}")
        assert (tmp_path / f"figure.{ending}").stat().st_size > 1000


def test_a_comparison_and_a_curve_draw_any_name(tmp_path: Path, capsys: Any) -> None:
    write_graph(graph("$_$ \\frac{"), tmp_path / "model.json")
    compared = call(
        capsys, "compare", tmp_path / "model.json", "--budgets", "100%", "--methods", "keep-everything", "-o", tmp_path / "out"
    )
    drawn = call(capsys, "curve", tmp_path / "model.json", "--budgets", "2", "--jobs", "1", "--plot", tmp_path / "curve.png")
    assert (compared.code, compared.err, drawn.code, drawn.err) == (0, "", 0, "")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rows.csv", "table.md", "overhead.png", "memory.png"}
    assert (tmp_path / "curve.png").stat().st_size > 1000


# --- plans that were edited -----------------------------------------------------------------------

EDITS: list[tuple[dict[str, Any], str]] = [
    ({"peak_bytes": 3}, "says a peak of 3 B, but its schedule takes 4 B"),
    ({"peak_bytes": 3, "budget_bytes": 3}, "; a budget of 3 B, but its schedule takes 4 B"),
    ({"peak_bytes": 5, "budget_bytes": 5}, "says a peak of 5 B, but its schedule takes 4 B"),
    ({"time_s": 14.0}, "says a step time of 14.0 s, but its schedule takes 15.0 s"),
    ({"bound_s": 15.5}, "no schedule takes less than 15.5 s, but its own takes 15 s"),
    ({"bound_s": 12.0, "status": "optimal"}, "that it is optimal, but its gap of 25.0000% is over the tolerance of 0.1000%"),
    ({"bound_s": None, "status": "optimal"}, "that it is optimal, but has no lower bound"),
    ({"steps": []}, "the plan's schedule does not run on its graph: "),
    ({"budget_bytes": 3}, "peak_bytes is 4: must be within budget_bytes, 3"),
]


@pytest.mark.parametrize(("edits", "said"), EDITS)
def test_a_plan_whose_figures_are_not_its_schedules_is_refused(
    edits: dict[str, Any], said: str, graph_file: Path, tmp_path: Path, capsys: Any
) -> None:
    plan_file, html = tmp_path / "plan.json", tmp_path / "page.html"
    assert call(capsys, "solve", graph_file, "--budget", "60%", "-o", plan_file).code == 0
    assert call(capsys, "info", plan_file).code == 0
    plan_file.write_text(json.dumps(plan_to_dict(read_plan(plan_file)) | edits))
    shown = call(capsys, "show", plan_file, "-o", html)
    refused(shown, 1, said, *([] if "must be" in said else ["edited; solve again"]))
    refused(call(capsys, "show", plan_file, "--graph", graph_file, "--trace", tmp_path / "trace.json"), 1, said)
    refused(call(capsys, "info", plan_file), 1, said)
    refused(call(capsys, "run", plan_file, "--model", "zoo:mlp"), 1, said)
    assert not html.exists()
    assert not (tmp_path / "trace.json").exists()


def test_a_graph_that_was_traced_again_is_told_from_an_edit(graph_file: Path, tmp_path: Path, capsys: Any) -> None:
    plan_file, html = tmp_path / "plan.json", tmp_path / "page.html"
    assert call(capsys, "solve", graph_file, "--budget", "60%", "-o", plan_file).code == 0
    slower = tuple(replace(op, time_s=2 * op.time_s) for op in graph().ops)
    write_graph(Graph(slower, graph().tensors, graph().kept), graph_file)
    refused(call(capsys, "show", plan_file, "-o", html), 1, "step time 12.0 s there, 24.0 s here", "traced again since")
    assert call(capsys, "info", plan_file).code == 0  # what the plan says was true of the graph that it was solved for
    graph_file.unlink()
    assert call(capsys, "info", plan_file).code == 0


def test_timeline_accepts_plans_of_all_solvers(graph_file: Path) -> None:
    from planner.solvers.registry import SOLVERS

    def plan_by(solver: str) -> Plan | None:
        try:
            return solve(graph(), "100%", solver=solver)
        except Exception:  # noqa: BLE001 (not all are for such a chain)
            return None

    plans = [plan for solver in SOLVERS if (plan := plan_by(solver)) is not None]
    assert len(plans) > 10
    for plan in plans:
        Timeline(graph(), plan)


# --- files that are none --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_standard_output_gets_the_plan_and_nothing_else(graph_file: Path, tmp_path: Path) -> None:
    for output in ("/dev/stdout", "-"):
        ended = command("solve", graph_file, "--budget", "60%", "-o", output)
        assert ended.returncode == 0
        assert "predicted peak" in ended.stderr
        (tmp_path / "plan.json").write_text(ended.stdout)
        assert read_plan(tmp_path / "plan.json").peak_bytes == 4
    ended = command("solve", graph_file, "--budget", "60%", "-o", "/dev/stdout", "--json")
    assert json.loads(ended.stdout)["format"] == "remat-planner plan"
    assert json.loads(ended.stderr)["holds"] == "plan"
    assert Path("/dev/stdout").is_symlink()


def test_output_to_stdout_appends_to_a_redirected_file(graph_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    run = [sys.executable, "-m", "planner", "solve", str(graph_file), "--budget", "60%", "-o", "/dev/stdout", "--quiet"]
    with log.open("a") as file:
        subprocess.run(run, cwd=ROOT, stdout=file, stderr=subprocess.DEVNULL, timeout=120, check=True)
    before, plan = log.read_text().split("\n", 1)
    assert before == "before"
    assert json.loads(plan)["peak_bytes"] == 4


def test_a_device_or_a_pipe_is_written_to_and_not_replaced(graph_file: Path, tmp_path: Path, capsys: Any) -> None:
    said = call(capsys, "solve", graph_file, "--budget", "60%", "-o", "/dev/null")
    assert (said.code, said.err) == (0, "")
    assert "written to /dev/null" in said.out
    assert Path("/dev/null").is_char_device()
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    assert call(capsys, "solve", graph_file, "--budget", "60%", "-o", pipe).code == 0
    reader.join(30)
    assert json.loads(got[0])["graph_file"] == str(graph_file.resolve())
    assert pipe.is_fifo()
    read, write = os.pipe()
    write_text(f"/dev/fd/{write}", "through")
    os.close(write)
    assert os.read(read, 100) == b"through"
    os.close(read)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "pipe"]


def test_descriptors_are_told_from_files(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/stdout")
    assert open_descriptor("/dev/stdout") == open_descriptor("/dev/fd/1") == open_descriptor(link) == 1
    assert open_descriptor("/dev/stderr") == open_descriptor(f"/proc/{os.getpid()}/fd/2") == 2
    assert open_descriptor(tmp_path / "file") is open_descriptor("/dev/null") is open_descriptor("") is None
    assert is_stdout("/dev/stdout") and not is_stdout("/dev/null") and not is_stdout(tmp_path / "file")
    with pytest.raises(OutputError, match="/dev/fd/987 cannot be written: Bad file descriptor"):
        write_text("/dev/fd/987", "")


@pytest.mark.parametrize(
    ("output", "said"),
    [("", "is empty"), ("a\0b", "a\\x00b cannot be written"), ("x" * 300, "name too long"), ("loop", "form a loop")],
)
def test_invalid_output_name_prints_one_error(output: str, said: str, graph_file: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(graph_file.parent)
    Path("loop").symlink_to("loop")
    refused(call(capsys, "solve", graph_file, "--budget", "60%", "-o", output), 1)
    with pytest.raises(OutputError) as error:
        write_text(output, "text")
    assert said.lower() in escape_text(error.value).lower()
    assert sorted(str(path) for path in Path().iterdir()) == ["loop", "model.json"]


def test_compare_refuses_an_invalid_output_folder_before_solving(graph_file: Path, capsys: Any) -> None:
    refused(call(capsys, "compare", graph_file, "-o", graph_file), 1, "is a file: name a folder")
    refused(call(capsys, "compare", graph_file, "-o", graph_file / "below"), 1, "model.json is a file: name a folder")
    check_folder(graph_file.parent / "not" / "there")
    assert [path.name for path in graph_file.parent.iterdir()] == ["model.json"]


def test_rows_that_are_no_csv_are_one_error(graph_file: Path, tmp_path: Path, capsys: Any) -> None:
    for content in (
        b"\xff\xfe",
        b"a\0b\n" * 3,
        b"x" * 200_000 + b"\n",
        ",".join(list_columns(ComparisonRow)).encode() + b"\na,b\n",
    ):
        (tmp_path / "rows.csv").write_bytes(content)
        refused(call(capsys, "compare", graph_file, "-o", tmp_path, "--methods", "keep-everything"), 1, "rows.csv", "delete it")


@pytest.mark.slow
def test_a_plan_that_was_solved_for_a_pipe_finds_its_graph(graph_file: Path, tmp_path: Path, capsys: Any) -> None:
    ended = command("solve", graph_file, "--budget", "60%", "-o", "-", "--quiet")
    (tmp_path / "elsewhere").mkdir()
    plan_file = tmp_path / "elsewhere" / "plan.json"
    plan_file.write_text(ended.stdout)
    assert call(capsys, "show", plan_file, "-o", tmp_path / "page.html").code == 0
    write_plan(replace(read_plan(plan_file), graph_file=None), plan_file)
    refused(call(capsys, "show", plan_file, "-o", tmp_path / "page.html"), 2, "does not say where its graph is")
