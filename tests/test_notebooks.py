"""The notebooks of the documentation: they run, and what they show was shown by them."""

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def kinds(notebook: Any) -> list[list[str]]:
    """Return the kinds of output of each cell, without those of warnings."""
    return [
        sorted({kind for output in cell.outputs for kind in output.get("data", {output.get("name", output.output_type): None})})
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.filterwarnings("ignore")  # of the libraries that start kernels
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem == "first-plan" else path for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs_with_the_same_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    shown = kinds(notebook)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert kinds(notebook) == shown
