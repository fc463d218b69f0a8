"""The report page in a headless browser: it loads nothing, complains of nothing, and answers to pointer, buttons and search."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.capture.options import apply_options
from planner.graphs.ir import Graph
from planner.graphs.options.surroundings import Link, Surroundings
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.solve import solve
from planner.show.facts.lifetimes import compute_lifetimes
from planner.show.facts.step import StepFacts
from planner.show.facts.timeline import Timeline
from planner.show.report.page import render_page
from planner.studies.curve import CurveRow
from tests.support.marks import slow
from tests.support.report import solved

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Chromium (on Debian: apt-get install chromium chromium-driver)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The driver of a browser, which takes seconds to start."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--force-device-scale-factor=1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


def show(driver: Any, page: Path, *, width: int = 1400, height: int = 1000, dark: bool = False, touch: bool = False) -> None:
    """Show `page` on a screen of that size, and wait until it is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
    driver.get("about:blank")
    errors_of(driver)  # of the page before
    driver.get(page.resolve().as_uri())
    WebDriverWait(driver, 30).until(lambda d: d.execute_script("return document.documentElement.dataset.ready === 'yes'"))


def errors_of(driver: Any) -> list[str]:
    """What the console of the browser complains of."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


pytestmark = needs_browser

HOSTILE = "</title></script><script>document.documentElement.dataset.hit = 'yes'</script>&\x1b[31m"
# What stands on the page from top to bottom, each below the one before.
_IN_ORDER = "return [...document.querySelectorAll('h1, body > p, dl, h2, .controls, .plot, .key, .table, footer')]"
_OVERLAPS = (
    f"{_IN_ORDER}.filter(e => e.getBoundingClientRect().height).map(e => e.getBoundingClientRect())"
    ".map((box, i, boxes) => i ? boxes[i - 1].bottom - box.top : 0).filter(over => over > 1)"
)
_WIDE = "return document.documentElement.scrollWidth"
# Tiles, legend entries and controls that stand beside each other.
_SIDES = """
const boxes = [...document.querySelectorAll('dl > div, .key li, .controls > *')].map(e => e.getBoundingClientRect());
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
return boxes.filter((a, i) => boxes.some((b, j) => j > i && meet(a, b))).length;
"""


def blocks(count: int = 8, model: str = "chain", module: str = "model.h.{}.mlp") -> Graph:
    plain = make_training_chain(count)
    ops = tuple(replace(op, module=module.format(op.id % 4), target="aten.relu.default") for op in plain.ops)
    return Graph(ops, plain.tensors, plain.kept, {"model": model})


def timeline_of(graph: Graph) -> Timeline:
    return Timeline(graph, solve(graph, "60%"))


def written(text: str, folder: Path) -> Path:
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


CURVE = (
    CurveRow(budget_bytes=10, memory="allocated", status="feasible", overhead=0.5, bound_overhead=0.4),
    CurveRow(budget_bytes=16, memory="allocated", status="optimal", overhead=0.0, bound_overhead=0.0),
)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return timeline_of(blocks())


@pytest.fixture(scope="module")
def page(timeline: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(render_page(StepFacts.of(timeline), CURVE), tmp_path_factory.mktemp("page"))


@pytest.fixture
def driver(browser: Any, page: Path) -> Any:
    """The browser, which shows a page."""
    show(browser, page)
    return browser


def shown(driver: Any) -> str:
    text: str = driver.execute_script("return document.getElementById('shown').textContent")
    return text


def wait_until_drawn(driver: Any) -> None:
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def scroll_to(driver: Any, element: Any) -> None:
    """Scroll until `element` is in the middle, and wait for the scroll event, which comes a frame later and hides the tip."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    wait_until_drawn(driver)


def point_at(driver: Any, plot: str, x: float, y: float) -> str:
    """Move the pointer to a place in a plot, as parts of its width and height; what the page says of it."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.ID, plot)
    scroll_to(driver, element)
    box = element.rect
    actions = ActionChains(driver, duration=0)
    actions.move_to_element_with_offset(element, int((x - 0.5) * box["width"]), int((y - 0.5) * box["height"])).perform()
    wait_until_drawn(driver)
    text: str = driver.execute_script("const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText")
    return text


def tap_at(driver: Any, plot: str, x: float, y: float) -> str:
    """Tap on a place in a plot with a finger, as parts of its width and height; what the page says of it then."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder
    from selenium.webdriver.common.actions.pointer_input import PointerInput
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.ID, plot)
    scroll_to(driver, element)
    box = driver.execute_script("return arguments[0].getBoundingClientRect().toJSON()", element)
    actions = ActionBuilder(driver, mouse=PointerInput("touch", "finger"), duration=0)
    place = int(box["left"] + x * box["width"]), int(box["top"] + y * box["height"])
    actions.pointer_action.move_to_location(*place).pointer_down().pointer_up()
    actions.perform()
    wait_until_drawn(driver)
    text: str = driver.execute_script("const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText")
    return text


def click(driver: Any, name: str) -> None:
    driver.execute_script("document.getElementById(arguments[0]).click()", name)
    wait_until_drawn(driver)


def test_page_loads_no_resources_and_logs_no_errors(driver: Any) -> None:
    assert driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert errors_of(driver) == []
    assert shown(driver) == "the whole step"


def test_the_pointer_shows_a_tensor(driver: Any, timeline: Timeline) -> None:
    said = point_at(driver, "memory", 0.5, 0.8)
    life = next(life for life in compute_lifetimes(timeline).lives if said.startswith(f"{life.tensor.name}\n"))
    assert f"from {life.producer.name}" in said and "module h." in said
    point_at(driver, "memory", 0.5, 0.02)
    assert point_at(driver, "memory", 0.5, 0.02) == ""


def test_recomputation_tooltip_names_its_readers(driver: Any, timeline: Timeline) -> None:
    first = timeline.bursts[0]
    width = driver.execute_script("return document.getElementById('lanes').getBoundingClientRect().width")
    left, right = 84, width - 16  # as chart.py leaves them
    x = (left + (right - left) * (first.start_s + first.time_s / first.ops / 2) / timeline.time_s) / width
    assert "for " in point_at(driver, "lanes", x, 0.5)


def test_zoom_buttons_change_the_shown_range(driver: Any) -> None:
    click(driver, "zoom-in")
    near = shown(driver)
    assert near.endswith(" s") and " to " in near
    click(driver, "later")
    assert shown(driver) != near
    click(driver, "zoom-all")
    assert shown(driver) == "the whole step"


def test_dragging_zooms(driver: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.ID, "memory")
    scroll_to(driver, element)
    drag = ActionChains(driver).move_to_element_with_offset(element, -200, 0).click_and_hold()
    drag.move_by_offset(200, 20).release().perform()
    wait_until_drawn(driver)
    assert " to " in shown(driver)
    click(driver, "zoom-all")


def test_searching_lists_and_zooms(driver: Any) -> None:
    from selenium.webdriver.common.by import By

    field = driver.find_element(By.ID, "find")
    field.send_keys("h.2")
    found = driver.find_elements(By.CSS_SELECTOR, "#found button")
    assert found and driver.find_element(By.ID, "hits").text.split()[0] == str(len(found))
    driver.execute_script("arguments[0].click()", found[0])
    wait_until_drawn(driver)
    assert " to " in shown(driver)
    field.clear()
    field.send_keys("no such thing")
    assert driver.find_element(By.ID, "hits").text == "nothing has this name"
    click(driver, "zoom-all")


def test_a_tap_shows_a_tip_that_stays_until_the_next_tap(browser: Any, tmp_path: Path) -> None:
    small = blocks()
    large = replace(small, tensors=tuple(replace(tensor, size_bytes=2**20) for tensor in small.tensors))
    facts = StepFacts.of(timeline_of(large))
    curve = tuple(replace(row, budget_bytes=2**20 * row.budget_bytes, overhead=0.1) for row in CURVE)
    show(browser, written(render_page(facts, curve), tmp_path), width=390, height=844, touch=True)
    heights = browser.execute_script("return [...document.querySelectorAll('button')].map(button => button.offsetHeight)")
    assert min(heights) >= 24  # pixels that a finger needs (WCAG 2.5.8)
    assert "module h." in tap_at(browser, "memory", 0.6, 0.8)
    at_addresses = [tap_at(browser, "addresses0", 0.6, 0.1 * y) for y in range(1, 8)]
    assert {said.split("\n")[0] for said in at_addresses if said} <= {stay.tensor for stay in facts.planned.stays}
    assert any(at_addresses)
    # The axis is 5% longer than the data on each side; beside it chart.py leaves 84 and 16 pixels.
    first, last = facts.timeline.plan.budget_bytes, curve[-1].budget_bytes
    point = (84 + 258 * (0.05 + (curve[0].budget_bytes - first) / (last - first)) / 1.1) / 358
    on_curve = {tap_at(browser, "curve", point, 0.03 * y) for y in range(10, 24)}
    assert any("\noverhead 10.00%" in said for said in on_curve), on_curve
    assert tap_at(browser, "memory", 0.6, 0.8)
    browser.execute_script("document.querySelector('h2').dispatchEvent(new PointerEvent('pointerdown', {bubbles: true}))")
    assert browser.execute_script("return document.getElementById('tip').hidden")
    assert errors_of(browser) == []


def test_tiles_stand_in_one_row_on_a_desktop(driver: Any) -> None:
    tops = driver.execute_script("return [...document.querySelectorAll('dl > div')].map(e => e.getBoundingClientRect().top)")
    assert len(tops) >= 5 and len(set(tops)) == 1


_OTHER_LOOKS = ((390, True), (820, False), (1400, True))  # which differ from the others in colours alone


@pytest.fixture(scope="module")
def page_with_copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph, plan = solved()
    offered = apply_options(graph, ["offload"], Surroundings(Link.even(10e9), 10**12))
    return written(render_page(StepFacts.of(Timeline(offered, plan)), CURVE), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize(("width", "dark"), [(390, False), (820, True), (1400, False), *slow(*_OTHER_LOOKS)])
def test_page_elements_do_not_overlap_at_any_width(browser: Any, page_with_copies: Path, width: int, dark: bool) -> None:
    show(browser, page_with_copies, width=width, dark=dark, touch=width < 500)
    assert browser.execute_script(_WIDE) <= width
    assert browser.execute_script(_OVERLAPS) == []
    assert browser.execute_script(_SIDES) == 0
    assert errors_of(browser) == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 25, 31)" if dark else "rgb(255, 255, 255)")


def test_names_from_files_are_text(browser: Any, tmp_path: Path) -> None:
    page = written(render_page(StepFacts.of(timeline_of(blocks(model=HOSTILE, module=HOSTILE)))), tmp_path)
    show(browser, page, width=820)
    assert browser.execute_script("return document.documentElement.dataset.hit ?? null") is None
    assert "</title>" in browser.execute_script("return document.querySelector('h1').textContent")
    assert browser.execute_script(_WIDE) <= 820
