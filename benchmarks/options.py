"""What options gain, each alone and together, and what inexact ones cost in accuracy: ``make bench-options``.

Into results/options: least budgets and overheads at shares of the peak, of steps that are traced with fake tensors and timed by
the roofline of an H200 (table.md); and errors of small steps that are run on the CPU (errors.md). Rows that are in the CSVs are
not made again, so that it can be stopped and taken up: all of it is some hours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import offload
from benchmarks.common import columns_of, command_line, one_thread, write
from benchmarks.options_case import BUDGETS, TOLERANCE, Case, sets_of
from benchmarks.options_errors import MEASURED, error_rows
from benchmarks.options_rows import ErrorRow, Offer, Row, set_name
from benchmarks.options_table import error_table, table
from graphs.io.files import write_text
from graphs.options.option import Need
from planner import options
from planner.capture.options import OPTIONS, check_options, needs, traced_options
from planner.settings import TraceSettings
from planner.solving import clock_of
from planner.studies.rows import read_csv, read_rows, write_csv
from planner.workload.tracing import Tracing
from planner.workload.workload import parse_spec
from solvers.clock import Clock

DEVICE = "h200"
MODELS: Mapping[str, str] = {
    "gpt2-medium": offload.MODELS["gpt2-medium"],
    "head-100k": "zoo:mlp,batch=8192,width=1024,layers=4,classes=100000",
    "mobilenet_v2": "zoo:mobilenet_v2,batch=256",
    "gpt2-small": "zoo:gpt2,batch=8,seq=1024,dtype=bfloat16",
    "gpt2-small-4k": "zoo:gpt2,batch=2,seq=4096,dtype=bfloat16",
    "gpt2-medium-4k": "zoo:gpt2,layers=24,width=1024,heads=16,batch=2,seq=4096,dtype=bfloat16",
    **{name: offload.MODELS[name] for name in ("llama-16", "vit-l", "resnet50", "unet")},
}
# Placement needs other devices.
NAMES = tuple(option.to_try for name, option in OPTIONS.items() if Need.DEVICES not in needs((name,)))
LIMIT_S = 60.0
COLUMNS = columns_of(Row)
OFFER_COLUMNS = columns_of(Offer)
ERROR_COLUMNS = columns_of(ErrorRow)


def solve_model(model: str, names: Sequence[str], clock: Callable[[], Clock], folder: Path) -> None:
    """Solve what is missing of a model, and write the CSV after each row."""
    offers, rows = read_rows(folder / "offers.csv", Offer), read_rows(folder / "rows.csv", Row)
    there = [offer for offer in offers if offer.model == model and offer.option in names]
    known = {row.key for row in rows}
    if len(there) == len(names) and known >= {(model, set_name(some), budget) for some in sets_of(there) for budget in BUDGETS}:
        return
    traced = Tracing(TraceSettings(roofline=DEVICE, options=traced_options(names))).graph(parse_spec(MODELS[model]))
    case = Case(model, traced, names, clock, TOLERANCE)
    offers = sorted([*(offer for offer in offers if offer not in there), *case.offers], key=_place)
    write_csv(folder / "offers.csv", OFFER_COLUMNS, map(asdict, offers))
    for row in case.rows(known):
        rows = sorted([*rows, row], key=_place_of_row)
        write_csv(folder / "rows.csv", COLUMNS, map(asdict, rows))


def _place(offer: Offer) -> tuple[int, int]:
    """Of an offer among others: as models and options are listed."""
    return tuple(MODELS).index(offer.model), _listed(offer.option)


def _place_of_row(row: Row) -> tuple[int, list[int], int]:
    """Of a row among others, small sets first."""
    options = sorted(map(_listed, row.names))
    return tuple(MODELS).index(row.model), [len(options), *options], BUDGETS.index(row.budget)


def _listed(option: str) -> int:
    """Of an option in the registry, where what stands behind a colon is said to it."""
    return tuple(OPTIONS).index(option.partition(":")[0])


def measure_model(model: str, names: Sequence[str], clock: Callable[[], Clock], folder: Path) -> None:
    """Measure what is missing of a small model, and write the CSV after each option."""
    file = folder / "errors.csv"
    for name in filter(lambda name: traced_options((name,)), names):
        rows = read_rows(file, ErrorRow)
        if (model, name) not in {row.key for row in rows}:
            rows += error_rows(model, name, clock)
            write_csv(file, ERROR_COLUMNS, map(asdict, sorted(rows, key=lambda row: tuple(MEASURED).index(row.model))))


def main(words: Sequence[str] | None = None) -> None:
    """Make what is missing; write rows and tables."""
    parser = command_line(__doc__, models=(*MODELS, *MEASURED), out="results/options")
    parser.add_argument("--options", type=options.names, default=",".join(NAMES), help="with commas (default: %(default)s)")
    parser.add_argument("--seconds", type=options.duration, default=LIMIT_S, help="for each solve (default: %(default)g)")
    parser.add_argument("--work", type=options.work, help="instead of seconds, units of work: a busy machine changes no row")
    parser.add_argument("--fresh", action="store_true", help="make the rows of these models anew")
    arguments = parser.parse_args(words)
    check_options(arguments.options)
    one_thread()
    folder = arguments.out
    if arguments.fresh:
        for name, columns in (("offers.csv", OFFER_COLUMNS), ("rows.csv", COLUMNS), ("errors.csv", ERROR_COLUMNS)):
            kept = [row for row in read_csv(folder / name, columns) if row["model"] not in arguments.models]
            write_csv(folder / name, columns, kept)
    for model in arguments.models:
        make = solve_model if model in MODELS else measure_model
        make(model, arguments.options, partial(clock_of, arguments.seconds, arguments.work), folder)
    errors = read_rows(folder / "errors.csv", ErrorRow)
    write_csv(folder / "errors.csv", ERROR_COLUMNS, map(asdict, errors))
    write_text(folder / "errors.md", error_table(errors, MEASURED))
    rows, offers = read_rows(folder / "rows.csv", Row), read_rows(folder / "offers.csv", Offer)
    write(folder, COLUMNS, map(asdict, rows), table(rows, offers, MODELS))


if __name__ == "__main__":
    main()
