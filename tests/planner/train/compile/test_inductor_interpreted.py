"""Plans over Triton's kernels, by its interpreter on the CPU: order of arguments, grids, recomputation, one memory for two."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["convnet", "unet"])
def test_plans_have_the_bits_of_torch_compile(name: str) -> None:
    pytest.importorskip("triton", reason="Triton interprets its kernels: pip install --no-deps triton")
    command = [sys.executable, "-m", "tests.support.inductor.interpreted", name, "0.0", "0.3"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=Path(__file__).parents[4], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    assert found[0]["recomputed"] > 0
    for each in found:
        assert each["differences"] == []
        assert each["kernels"] > 10 and each["overwritten"] > 0
