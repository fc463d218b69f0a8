"""What a step only records of its tensors, in lists, numbers, texts, metrics and logs: it is done after the forward pass."""

import copy
import json
import logging
import math
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from benchmarks.models.parts import FunctionModule
from planner.graphs.errors import TraceError
from tests.support.marks import slow

torchmetrics = pytest.importorskip("torchmetrics")
SEEN: list[torch.Tensor] = []
LOCK = threading.Lock()
Forward = Callable[["Noting", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


class Noting(nn.Module):
    """A model with lists and metrics."""

    def __init__(self, note: Forward) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.note = note
        self.losses: list[Any] = []
        self.tables: dict[str, Any] = {"rows": []}
        self.total, self.steps, self.mean_loss, self.average, self.perplexity = 0.0, 0, 0.0, 0.0, 0.0
        self.best, self.hits, self.text, self.meter = math.inf, 0, "", Meter()
        self.by_name: dict[str, list[float]] = defaultdict(list)
        self.recent: deque[float] = deque(maxlen=2)
        self.held, self.last = torch.zeros(()), torch.zeros(())
        self.steps_done: torch.Tensor
        self.register_buffer("steps_done", torch.zeros((), dtype=torch.int64))
        self.mean, self.error = torchmetrics.MeanMetric(), torchmetrics.MeanSquaredError()
        self.several = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x)
        loss = F.mse_loss(hidden, y)
        changed = self.note(self, hidden, y, loss)
        return loss if changed is None else changed


def append(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.losses.append(loss.detach())


def append_to_global(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    SEEN.append(2 * loss.detach())


def append_nested(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.tables["rows"].append({"loss": loss.detach(), "rows": len(y), "pair": (hidden.detach(), y)})
    model.losses.extend([hidden.detach().mean(), "end"])


def append_number(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.losses.append((loss.item(), float(hidden.detach().abs().max()), round(100 * loss.item(), 2), math.sqrt(loss.item())))


class Meter:
    """An average, as training scripts have it."""

    def __init__(self) -> None:
        self.total, self.count, self.average = 0.0, 0, 0.0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count
        self.average = self.total / self.count


COUNTS = {"steps": 0, "loss": 0.0}


def add_numbers(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.total += loss.item()
    model.steps += 1
    model.mean_loss = model.total / model.steps
    model.average = 0.9 * model.average + 0.1 * float(loss.detach())
    model.perplexity = math.exp(loss.item())
    model.best = min(model.best, round(loss.item(), 4))
    model.hits += (hidden.argmax(1) == y.argmax(1)).sum().item()
    model.meter.update(loss.item(), len(y))


def add_tensors(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.total += loss.detach()
    model.held += loss.detach()  # a tensor that is no buffer
    model.last = hidden.detach()
    model.losses.append(model.steps_done.item())
    model.steps_done += 1


def fill_containers(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.tables["last"] = loss.item()
    model.tables.setdefault("all", []).append(loss.item())
    model.tables.update(rows=[len(y)], largest=hidden.detach().max())
    model.by_name["loss"].append(loss.item())
    model.recent.append(loss.item())
    model.losses += [(len(model.losses), loss.item())]
    model.losses.extend(hidden[0].tolist())
    COUNTS["loss"] += loss.item()
    COUNTS["steps"] += 1


def write_texts(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.text = f"loss {loss.item():.3f} of {len(y)} rows, {model.steps}"
    model.losses.extend(["%.3f" % loss.item(), "{:.2e}".format(loss.item()), str(loss.item())])  # noqa: UP031, UP032
    model.losses.append(json.dumps({"loss": loss.item()}))
    model.losses.append(hidden.detach().numpy().mean().item())
    print("loss", loss.item(), f"{loss:.4f}")  # noqa: T201
    logging.getLogger("training").info("loss %.3f", loss.item())
    logging.getLogger("training").warning("tensor %s", loss.detach())


def count_and_print(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.steps += 1
    if model.steps % 2 == 0:
        print(model.steps, loss.item())  # noqa: T201


def append_with_history(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.losses.append(loss)
    model.tables["rows"].append("a step")


def weight_by_last(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    weighted = loss * (1 + model.total)
    model.total = loss.item()
    return weighted


def update_metrics(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.mean.update(loss)
    model.losses.append(model.error(hidden, y).detach())
    model.several(hidden, target=y)


def in_turn(*notes: Forward) -> Forward:
    """All of them, in one step."""

    def note(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
        for each in notes:
            each(model, hidden, y, loss)

    return note


def state(model: Noting) -> list[Any]:
    metrics = [model.mean, model.error, *model.several.values()]
    values = [metric.compute() for metric in metrics] if model.note is update_metrics else []
    return [*model.losses, *model.tables["rows"], *SEEN, *values]


def leaves(values: list[Any]) -> list[Any]:
    return torch.utils._pytree.tree_leaves(values)


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    for value, other in zip(found, wanted, strict=True):
        assert torch.equal(value, other) if isinstance(other, torch.Tensor) else value == other
        assert type(value) is type(other)


@pytest.mark.parametrize(
    "note",
    [in_turn(append_to_global, append_nested), append_number, update_metrics, *slow(append, append_to_global, append_nested)],
)
def test_lists_and_metrics_are_filled_as_in_eager_mode(note: Forward) -> None:
    torch.manual_seed(0)
    SEEN.clear()  # other tests fill it too, and may have run before
    model, x, y = Noting(note), torch.randn(8, 16), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    step = planner.compile(model, None, (x, y), budget="100%", wait=0.1)
    assert leaves([*model.losses, *model.tables["rows"], *SEEN]) == []
    found = []
    for one, run in ((plain, plain), (model, step)):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for rows in (8, 8, 8, 5):
            run(x[:rows], y[:rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rows == 8 and len(one.losses) == 2:
                one.losses = []  # another list, as at the end of an epoch
        found.append(leaves([*state(one), *one.parameters()]))
        SEEN.clear()
    assert len(found[0]) > len([*model.parameters()])
    assert_alike(*found)
    assert not any(getattr(value, "requires_grad", False) for value in found[1] if not isinstance(value, nn.Parameter))


def test_an_evaluation_fills_them_too() -> None:
    model, batch = Noting(append), (torch.randn(8, 16), torch.randn(8, 16))
    step = planner.compile(model, None, batch, budget="100%", wait=0.1)
    with torch.no_grad():
        step(*batch)
    assert len(model.losses) == 1


def read_length(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.losses.append(loss.detach())
    return loss / len(model.losses)


def read_last(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.losses.append(loss.detach())
    return loss / model.losses[-1]


def read_number(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    number = loss.item()
    model.losses.append(number)
    return loss * number


def compute(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.mean.update(loss)
    return loss * model.mean.compute()


def use(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return loss + model.error(hidden, y)


@pytest.mark.filterwarnings("ignore:captured again")
@pytest.mark.parametrize(
    "note",
    [
        in_turn(add_numbers, fill_containers, write_texts),
        in_turn(add_tensors, append_with_history),
        count_and_print,
        weight_by_last,
        *slow(add_numbers, fill_containers, write_texts, add_tensors, append_with_history),
    ],
)
def test_what_a_step_records_is_as_in_eager_mode(
    note: Forward, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, batch = Noting(note), (torch.randn(8, 16), torch.randn(8, 16))
    found, logged = [], list[str]()
    monkeypatch.setattr(logging.getLogger("training"), "level", logging.INFO)
    monkeypatch.setattr(logging.getLogger("training"), "handle", lambda record: logged.append(record.getMessage()))
    for one in (copy.deepcopy(model), model):
        COUNTS.update(steps=0, loss=0.0)
        step = one if not found else planner.compile(one, None, batch, budget="100%", wait=0.1, on_progress=False)
        logged.clear()
        for _ in range(3):
            step(*batch).backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
            one.zero_grad()
        noted = [value for name, value in vars(one).items() if not name.startswith("_") and name not in ("note", "meter")]
        found.append(leaves([*noted, vars(one.meter), COUNTS.copy(), one.state_dict(), logged.copy(), capsys.readouterr().out]))
    assert_alike(*found)


def note_in(rows: list[Any], *values: float) -> None:
    for value in values:
        rows.extend([value, round(value, 4)])


class Recorder:
    """An object of the module, whose methods record in turn."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.lowest = math.inf

    def add(self, model: Noting, value: float, **more: float) -> None:
        """Record a value with others."""
        entry: dict[str, float] = {"value": value}
        entry["steps"] = model.steps
        entry.update(more)
        self.rows.append(entry)
        self._compare(value)
        rows = model.by_name["rows"]
        note_in(rows, value, model.meter.average)

    @torch.no_grad()
    def _compare(self, value: float) -> None:
        if value < self.lowest:
            self.lowest = value


RECORDER = Recorder()


def choose(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    factor = 2

    def note_product(value: float) -> None:
        model.by_name["products"].append(factor * value)

    if loss.item() > 1.1:
        note_product(loss.item())
    if loss.item() < model.best:
        model.best, model.text = loss.item(), f"best {loss.item():.3f}"
    elif loss.item() > 2 * model.best:
        model.losses.append("high")
        if hidden.detach().max().item() > 0.6:
            with LOCK, torch.no_grad():
                model.losses.append(hidden.detach().max())
    else:
        model.steps += 1
    model.by_name["high"] = [loss.item()] if loss.item() > 1.2 else []
    if not torch.isfinite(loss):
        model.hits += 1
    if math.isnan(loss.item()):
        raise ValueError(f"after {model.steps} steps the loss is {loss.item()}")
    for row in range(3):
        if hidden[row].mean().item() > 0 and len(y) > 2:
            model.recent.append(hidden[row].std().item())
        else:
            model.by_name["low"].append(row)
    for row in range(3):
        if loss.item() > 100 or hidden[row].mean().item() > 0:
            model.tables["rows"].append(row)
    if loss > 1.5:
        SEEN.append(loss.detach())
        RECORDER.add(model, loss.item(), double=2 * loss.item())
    else:
        model.meter.update(loss.item(), len(y))
    model.losses.append(model.best)


def test_branches_that_only_choose_what_is_recorded_are_taken_as_in_eager_mode() -> None:
    torch.manual_seed(0)
    model = Noting(choose)
    batches = [(torch.randn(8, 16), scale * torch.randn(8, 16)) for scale in (1.5, 1.0, 3.0, 1.2, 0.5, 1.1)]
    found = []
    for one in (copy.deepcopy(model), model):
        SEEN.clear()
        RECORDER.__init__()
        step = one if not found else planner.compile(one, None, batches[0], budget="100%", wait=0.1, on_progress=False)
        for batch in batches:
            step(*batch).backward()
            one.zero_grad()
        with pytest.raises(ValueError, match="steps the loss is nan"):
            step(torch.full((8, 16), math.nan), batches[0][1])
        noted = (one.best, one.text, one.losses, one.steps, one.hits, list(one.recent), one.by_name, one.tables)
        found.append(leaves([*noted, SEEN.copy(), vars(one.meter), RECORDER.rows, RECORDER.lowest]))
    assert (
        RECORDER.rows
        and model.by_name["rows"]
        and model.meter.count
        and model.text
        and model.steps
        and model.hits
        and model.by_name["low"]
        and model.recent
        and "high" in model.losses
        and model.by_name["products"]
    )
    assert_alike(*found)


class Tracker:
    """The object whose method is a loss function, as a trainer is, and numbers that it reads."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.step, self.epoch = 0, 0.0

    def compute(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(outputs, y)
        self.losses.append(f"{self.step} {self.epoch} {loss.item():.4f}")
        return loss


@pytest.mark.filterwarnings("ignore:captured again")
def test_a_capture_that_fails_records_nothing() -> None:
    model, batch, tracker = nn.Linear(16, 16), (torch.randn(8, 16), torch.randn(8, 16)), Tracker()
    step = planner.compile(model, tracker.compute, batch, budget="100%", wait=0.1, on_progress=False)
    for i in range(3):
        step(*batch).backward()
        model.zero_grad()
        assert len(tracker.losses) == i + 1
        tracker.step, tracker.epoch = i + 1, (i + 1) / 6


HIGHEST = 0.0


def make_with_closures() -> tuple[nn.Module, list[Any]]:
    """Return a model whose class has been made in a function, and the objects of that function that it changes."""
    log, table, meters = list[Any](), {"sum": 0.0, "count": 0}, {"loss": Meter()}
    lowest, calls, falls = math.inf, 0, 0

    def compare(value: float) -> None:
        nonlocal calls, lowest
        calls += 1
        if value < lowest:
            lowest = value

    def closed(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal falls
        global HIGHEST
        loss = F.mse_loss(m.layer(x), y)

        def note(value: float) -> None:
            nonlocal lowest
            lowest -= value

        if loss.item() < lowest:
            falls += 1
            note(0.125)
        if loss.item() > 0:
            compare(loss.item())
            HIGHEST = max(HIGHEST, loss.item())
        log.append((lowest, falls, calls, HIGHEST))
        log.append(loss.detach())
        table["sum"] += loss.item()
        table["count"] += 1
        for meter in meters.values():
            meter.update(loss.item(), len(y))
        if loss.item() < m.best:
            m.best = loss.item()
            log.append(m.best)
        return loss

    return FunctionModule(closed, layer=nn.Linear(16, 16), best=math.inf), [log, table, vars(meters["loss"])]


def test_what_is_recorded_in_closures_is_as_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, found = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(3)], []
    for compiled in (False, True):
        torch.manual_seed(0)
        monkeypatch.setitem(globals(), "HIGHEST", 0.0)
        model, noted = make_with_closures()
        step = planner.compile(model, None, batches[0], budget="100%", wait=0.1, on_progress=False) if compiled else model
        for batch in batches:
            step(*batch).backward()
            model.zero_grad()
        found.append(leaves(noted))
    assert len(found[0]) > 8 and found[0] == found[1]


class Average:
    """A meter."""

    def __init__(self) -> None:
        self.total, self.count, self.last = 0.0, 0, deque[float](maxlen=2)

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.last.append(value)


def meter(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.meters["loss"].update(loss.item())


def smooth(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.total = loss.item() if not model.total else model.total + loss.item()
    model.text = loss.item() if not model.text else 0.9 * model.text + 0.1 * loss.item()


def create(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    try:
        model.created.append(loss.item())
    except AttributeError:
        model.created = [loss.item()]
    if not hasattr(model, "rows"):
        model.rows = []
    model.rows.append(loss.item())


def create_deque(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    if not hasattr(model, "rows"):
        model.rows = deque(maxlen=3)
    model.rows.append(loss.item())
    if "losses" not in model.tables:
        model.tables["losses"] = []
    model.tables["losses"].append(loss.detach())


def look_up(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    for name, value in (("loss", loss.item()), ("mean", hidden.detach().mean()), ("loss", 1)):
        try:
            model.tables[name].append(value)
        except KeyError:
            model.tables[name] = [value]
        else:
            model.hits += 1
    try:
        model.tables["lowest"] = min(model.tables["lowest"], loss.item())
    except (KeyError, TypeError):
        model.tables["lowest"] = loss.item()


@pytest.mark.filterwarnings("ignore:(captured|planned) again", "ignore:.*set by the first step")
@pytest.mark.parametrize("note", [meter, smooth, create, create_deque, look_up])
def test_what_the_first_step_makes_to_record_in_begins_empty(note: Forward) -> None:
    torch.manual_seed(0)
    eager, batches = Noting(note), [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)]
    eager.meters, eager.text = defaultdict(Average), None
    model = copy.deepcopy(eager)
    step = planner.compile(model, None, batches[0], budget="100%", wait=0.1, on_progress=False)
    for batch in batches:
        for one, run in ((model, step), (eager, eager)):
            run(*batch).backward()
            one.zero_grad()
    for name in ("text", "total", "tables", "hits", "created", "rows"):
        assert getattr(model, name, None) == getattr(eager, name, None)
    assert [vars(each) for each in model.meters.values()] == [vars(each) for each in eager.meters.values()]


def test_a_hook_that_fills_a_list_in_a_lambda_is_followed() -> None:
    torch.manual_seed(0)
    eager, batch = Noting(append), (torch.randn(8, 16), torch.randn(8, 16))
    model = copy.deepcopy(eager)
    for one in (eager, model):
        one.layers[0].register_forward_hook(lambda _module, _inputs, output, one=one: one.losses.append(output.std().item()))
    step = planner.compile(model, None, batch, budget="100%", wait=0.1, on_progress=False)
    for _ in range(3):
        for one, run in ((model, step), (eager, eager)):
            run(*batch).backward()
            one.zero_grad()
    assert model.losses == eager.losses and len(model.losses) == 6


def write_by_method(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> None:
    model.held.add_(loss.detach())


def weight_by_average(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    model.average = 0.9 * model.average + 0.1 * loss.item()
    return loss * model.average


def halve(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    if loss.item() < model.best:
        model.best = 0.5 * model.best
    return loss * model.best


def lower(model: Noting, share: float) -> None:
    best = share * model.best
    model.best = best


def call_own(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    if loss.item() < model.best:
        lower(model, 0.5)
    return loss * model.best


def shuffle(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    if loss.item() < model.best:
        random.shuffle(model.tables["rows"])
    return loss * len(model.tables["rows"])


def set_by_name(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    if loss.item() < model.best:
        setattr(model, "be" + "st", 2.0)
    return loss * model.best


def choose_name(model: Noting, hidden: torch.Tensor, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    scale = 1.0
    if loss.item() < model.best:
        scale = 0.5
    return scale * loss


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (write_by_method, r"model.held, which is no buffer"),
        (weight_by_average, r"\(return loss \* model.average\) does depends on the data"),
        (halve, r"\(if loss.item\(\) < model.best:\) does depends on the data"),
        (call_own, r"\(if loss.item\(\) < model.best:\) does depends on the data"),
        (shuffle, r"\(if loss.item\(\) < model.best:\) does depends on the data"),
        (set_by_name, r"\(if loss.item\(\) < model.best:\) does depends on the data"),
        (choose_name, r"\(if loss.item\(\) < model.best:\) does depends on the data"),
        (read_length, r"model.losses changes at every step .*, and the step reads it"),
        (read_last, r"model.losses changes at every step .*, and the step reads it"),
        (read_number, r"\(return loss \* number\) does depends on the data"),
        (compute, r"\(return loss \* model.mean.compute\(\)\) calls compute of a metric, which is updated after a planned step"),
        (use, r"\(return loss \+ model.error\(hidden, y\)\) computes with what a metric returns"),
    ],
)
def test_a_step_that_reads_them_raises(note: Forward, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        planner.compile(Noting(note), None, (torch.randn(8, 16), torch.randn(8, 16)), budget="1MB")


class Remembering(nn.Module):
    """Keeps its last output, scaled by a sum of numbers from a buffer, and asks whether it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.last: torch.Tensor | None = None
        self.register_buffer("kinds", torch.tensor([1, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, factor = self.layer(x), sum(self.kinds.tolist())
        if self.last is None or len(x) > 1:
            self.last = (hidden * factor).detach().sum(0)
        return hidden.square().sum()


def test_a_sum_of_numbers_is_known_after_the_step() -> None:
    torch.manual_seed(0)
    model, x = Remembering(), torch.randn(8, 16)
    loss = planner.compile(model, None, (x,), budget="100%")(x)
    loss.backward()
    assert model.last is not None
    assert torch.equal(model.last, (model.layer(x) * 3).detach().sum(0))
