"""A page as a browser lays it out."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)")


def measured(page: str, width: int, measures: dict[str, str], folder: Path) -> dict[str, Any]:
    """What JavaScript says of `page` in a frame so many pixels wide.

    Args:
        measures: expressions by name, of ``page``, the document.
        folder: to write in.
    """
    # The page stands in a frame of this width; the script around it measures, the page itself has none.
    wanted = ",".join(f"{json.dumps(name)}: {expression}" for name, expression in measures.items())
    probe = (
        f'<iframe id="f" width="{width}" height="800" style="border:0" srcdoc="{escape(page)}"></iframe><pre id="said"></pre>'
        "<script>const frame = document.getElementById('f'); frame.onload = () => { const page = frame.contentDocument;"
        f"document.getElementById('said').textContent = JSON.stringify({{{wanted}}}); }};</script>"
    )
    (folder / "probe.html").write_text(probe)
    browser = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    run = [*browser, "--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom", f"file://{folder / 'probe.html'}"]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
    said = re.search(r'<pre id="said">(.*?)</pre>', ended.stdout)
    assert said is not None
    found: dict[str, Any] = json.loads(said[1])
    return found


def box(selector: str, side: str) -> str:
    """The expression for a side (``left``, ``width``) of the first element that `selector` finds."""
    return f"page.querySelector('{selector}').getBoundingClientRect().{side}"
