"""What users install: a wheel, its extras, and one line where something is missing."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.marks import slow

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def python(code: str, *, cwd: Path = ROOT, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process with `path` at the beginning of ``sys.path``."""
    code = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, text=True, capture_output=True, timeout=120)


def test_each_extra_that_is_named_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text() for path in (*pages, *(ROOT / "planner").rglob("*.py"))]
    named = {extra for text in texts for extra in re.findall(r"remat-planner\[(\w+)\]", text)}
    assert {"huggingface", "lightning", "plots", "cluster"} <= named
    assert named <= EXTRAS.keys()


def test_the_docs_name_nothing_that_the_package_lacks() -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    named = {name for text in texts for name in re.findall(r"`planner\.([A-Z]\w*)`", text)}
    assert {"BudgetError", "OutOfMemoryError", "TraceError"} <= named
    lacking = python(f"import planner; print([name for name in {sorted(named)} if not hasattr(planner, name)])")
    assert lacking.stdout == "[]\n"


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", changelog, re.MULTILINE)
    assert versions[0] == PROJECT["version"]


@pytest.mark.parametrize(
    ("missing", "code", "way"),
    [
        ("torch", "import planner; planner.compile", "needs PyTorch"),
        ("torch", "import planner.huggingface", "needs PyTorch"),
        (
            "lightning",
            "sys.modules['pytorch_lightning'] = None; import planner.lightning",
            "pip install 'remat-planner[lightning]'",
        ),
        *slow(("transformers", "import planner.huggingface", "pip install 'remat-planner[huggingface]'")),
    ],
)
def test_a_missing_package_is_one_line(missing: str, code: str, way: str) -> None:
    ended = python(f"sys.modules[{missing!r}] = None; {code}")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ImportError: planner")
    assert way in last


@pytest.mark.parametrize(
    ("missing", "arguments", "way"),
    [
        ("torch", ["trace", "zoo:mlp", "-o", "graph.json"], "needs PyTorch"),
        ("torch", ["advise", "zoo:mlp"], "needs PyTorch"),
        ("distributed", ["curve", "graph.json", "-o", "curve.csv", "--cluster", "tcp://localhost:1"], "remat-planner[cluster]"),
        *slow(
            (
                "matplotlib",
                ["curve", "graph.json", "-o", "curve.csv", "--plot", "curve.png"],
                "pip install 'remat-planner[plots]'",
            )
        ),
    ],
)
def test_missing_package_prints_the_install_command(missing: str, arguments: list[str], way: str, tmp_path: Path) -> None:
    graph = "from planner.graphs.io.formats import write_graph; from planner.graphs.synthetic.small import make_training_chain\n"
    made = f"write_graph(make_training_chain(4), 'graph.json'); sys.modules[{missing!r}] = None\n"
    ended = python(f"{graph}{made}from planner.cli.main import main; sys.exit(main({arguments!r}))", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("planner: error: ")
    assert way in ended.stderr


def test_a_folder_of_the_user_without_init_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    ended = python("import planner; print(planner.PlannerError)", cwd=tmp_path, path=(tmp_path, ROOT))
    assert ended.stdout == "<class 'planner.graphs.errors.PlannerError'>\n", ended.stderr


@pytest.mark.parametrize("kind", ["package", "module"])
def test_packages_of_the_user_may_have_the_names_of_our_folders(kind: str, tmp_path: Path) -> None:
    """They are imported as such, and ours within `planner` only: nothing is there twice."""
    theirs = [tmp_path / (f"{name}/__init__.py" if kind == "package" else f"{name}.py") for name in ("graphs", "solvers")]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    code = (
        "import planner, graphs, solvers; used = [getattr(planner, name) for name in planner.__all__]\n"
        "print(graphs.__file__, solvers.__file__, [name for name in sys.modules if name.startswith(('graphs.', 'solvers.'))])"
    )
    ended = python(code, cwd=tmp_path, path=(tmp_path, ROOT))
    assert ended.stdout == f"{theirs[0]} {theirs[1]} []\n", ended.stderr


def test_an_editable_install_is_found_behind_folders_of_the_user() -> None:
    """It is a path and no finder: finders are asked when a folder without ``__init__.py`` has been found already.

    Nothing but `planner` is in that path: it hides no folder of the user's.
    """
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"": "src"}
    assert [path.resolve() for path in (ROOT / "src").iterdir() if path.suffix != ".egg-info"] == [ROOT / "planner"]


def test_another_pytorch_is_installed_with_the_setuptools_that_it_needs() -> None:
    command = ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", "TORCH=2.11.0", ".venv-torch-2.11.0/.installed"]
    printed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    made = next(line.partition(" >")[0] for line in printed.splitlines() if line.startswith("sed "))
    bounds = subprocess.run(made, shell=True, cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(bounds) - set(pinned) == {"torch==2.11.0"}
    assert {pin.partition("==")[0] for pin in set(pinned) - set(bounds)} == {"torch", "setuptools"}


def test_a_wheel_installs_and_its_command_answers(tmp_path: Path) -> None:
    sources = tmp_path / "sources"  # building leaves files behind
    shutil.copytree(ROOT / "planner", sources / "src" / "planner", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, sources)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(sources)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    assert {name.split("/")[0] for name in names} == {"planner"}
    folders = [ROOT / folder for folder in ("planner", "planner/graphs", "planner/solvers")]  # links are not followed
    modules = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    home = tmp_path / "environment"
    venv.create(home)  # without pip: that of the tests installs into it
    into = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    subprocess.run([*into, "install", "--quiet", "--no-deps", str(wheel)], check=True, capture_output=True, timeout=300)
    # What the wheel needs is taken from the environment of the tests, behind what is installed here.
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for arguments in (["--help"], ["--version"], ["solve", "--help"]):
        said = subprocess.run([home / "bin" / "planner", *arguments], cwd=tmp_path, text=True, capture_output=True, timeout=120)
        assert said.returncode == 0, said.stderr
        assert "planner" in said.stdout
    where = [
        home / "bin" / "python",
        "-c",
        "import planner.graphs, planner.solvers; print(planner.__file__, planner.graphs.__file__)",
    ]
    assert str(home) in subprocess.run(where, cwd=tmp_path, text=True, capture_output=True, check=True, timeout=120).stdout
