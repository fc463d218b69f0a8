"""Commands that are refused in one line before they begin: they write nothing, and change no file."""

from pathlib import Path

import pytest

from planner.graphs.io.formats import write_graph
from planner.graphs.synthetic.small import make_training_chain
from planner.plans.document import write_plan
from planner.plans.solve import solve
from tests.support.cli import call, chain, refused

_OWN = "import torch\ndef build(width: int = 4):\n    return torch.nn.Linear(width, 1), None, (torch.ones(2, width),)\n"

REFUSED = [
    ("addresses none.csv", 1, "there is no such file"),
    ("--verison", 2, "did you mean --version?"),
    ("addresses {buffers} -o {buffers}", 2, "is an input of this command: name another file"),
    ("addresses {buffers} -o offsets.png", 1, "offsets.png ends with .png, but what is written is a .csv file"),
    ("addresses {buffers} --capacity -5", 2, "--capacity"),
    ("addresses {buffers} --capacity 0", 2, "at least one byte"),
    ("addresses {buffers} --capacity 60%", 2, "is a share"),
    ("addresses {buffers} --time-limit 0", 2, "not a time above 0"),
    ("addresses {buffers} -o none/offsets.csv", 1, "there is no folder"),
    ("advise zoo:mlp --device cuda --roofline h200", 2, "not allowed with"),
    ("advise zoo:mlp --roofline cpu --memory reserved", 2, "a model on the CPU"),
    ("advise zoo:mlp --roofline h100 --options magic", 2, "no option 'magic'"),
    ("advise zoo:mlp --roofline h100 --options placement", 2, "'placement' runs ops on other devices, which advice is not given"),
    ("advise {graph}", 2, "planner info, solve, curve and compare take a graph"),
    ("advise", 2, "MODEL"),
    ("compare none.json -o rows", 1, "none.json"),
    ("compare zoo:mlp --measure --cluster tcp://h:1 -o rows", 2, "--measure measures on this machine"),
    ("compare {graph} --budgets 1% -o /proc/rows", 1, "/proc/rows cannot be written"),
    ("compare {graph} --jobs 2 --cluster tcp://h:1", 2, "not allowed with"),
    ("compare {graph} --methods magic -o rows", 2, "there is no solver 'magic': `planner solvers` lists them all"),
    ("compare {graph} --methods optimal -o rows", 2, "there is no solver 'optimal' (did you mean windows?)"),
    ("compare {graph} --methods chen -o rows", 2, "there is no solver 'chen' (did you mean chen-sqrt?)"),
    ("compare {graph} --repeats 3 -o rows", 2, "--repeats is for steps that are run: add --measure"),
    ("compare {graph} --roofline h200 -o rows", 2, "--roofline says how to trace a model, and"),
    ("compare {graph} --accumulate -o rows", 2, "--accumulate says how to trace a model, and"),
    ("curve model.json --jbos 2", 2, "did you mean --jobs?"),
    ("curve {graph} --budgets 0", 2, "'0' is not a whole number"),
    ("curve {graph} --budgets 1,5GB", 2, "; commas separate budgets"),
    ("curve {graph} --budgets 8GB,9", 2, "has no unit"),
    ("curve {graph} --jobs 0", 2, "--jobs"),
    ("curve {graph} --jobs 2 --cluster tcp://h:1", 2, "not allowed with"),
    ("curve {graph} --link 1GB/s", 2, "link given, but no option that transfers tensors"),
    ("curve {graph} --options offload --solver dtr --jobs 1", 1, "the solver 'dtr' recomputes only"),
    ("curve {graph} --plot c.sing", 2, "does not end in a format of figures"),
    ("curve {graph} --plot none/c.png", 1, "there is no folder"),
    ("curve {graph} -o none/c.csv", 1, "there is no folder"),
    ("curve {graph} -o curve.png", 1, "ends with .png, but what is written is a .csv file: name one that ends with .csv"),
    ("curve {graph} -o {graph}", 2, "is an input of this command: name another file"),
    ("help", 2, "did you mean --help?"),
    ("info /dev/null", 1, "/dev/null: is a device, not a file"),
    ("info /dev/zero", 1, "/dev/zero: is a device, not a file"),
    ("info zoo:mlp", 2, "names a model"),
    ("info", 2, "FILE"),
    ("max-batch zoo:mlp --budget 60% --roofline h200", 2, "a share of a peak, which changes with the batch"),
    ("max-batch zoo:mlp --budget 8 --roofline h200", 2, "has no unit"),
    ("max-batch zoo:mlp --budget 8GB --batch-option size --roofline h200", 2, "that is the batch size with --batch-option"),
    ("max-batch zoo:mlp --budget 8GB --limit 0 --roofline h200", 2, "--limit"),
    ("max-batch zoo:mlp --budget 8GB --link 50GB/s --roofline h200", 2, "link given, but no option that transfers tensors"),
    ("max-batch zoo:mlp --budget 8GB --memory device --roofline cpu", 2, "give memory='allocated'\n"),
    ("max-batch zoo:mlp --budget 8GB --multiple-of 8 --limit 7 --roofline h200", 2, "--limit 7 is below --multiple-of 8"),
    ("max-batch zoo:mlp --budget 8GB --options shrink --roofline h200", 2, "there is no option 'shrink'"),
    ("max-batch zoo:mlp --budget 8GB --vary seq --roofline h200", 2, "name another with --vary"),
    ("max-batch zoo:mlp --roofline h200", 2, "--budget"),
    ("max-batch zoo:mlp,batch=x --budget 8GB --roofline h200", 2, "a size that varies is a whole number above 0"),
    ("max-batch zoo:mlp,width=64 --budget 1kB --limit 4 --roofline h200", 3, "not even a batch of 1"),
    ("max-batch zoo:none --budget 8GB --roofline h200", 2, "gpt2"),
    ("max-batch {own}:build --budget 8GB --roofline h200", 2, "has no option 'batch'"),
    ("run {graph} --model zoo:mlp", 1, "holds a graph, but a plan is expected"),
    ("run {plan}", 2, "does not name a model that can be built: add --model"),
    ("run", 2, "PLAN"),
    ("show {plan} --graph {graph} -o none/report.html", 1, "there is no folder"),
    ("show {plan} --graph {graph} -o {plan}", 2, "is an input of this command: name another file"),
    ("show {plan} --graph {graph} --curve none.csv -o report.html", 1, "none.csv: there is no such file"),
    ("show {plan} --graph {graph} --curve {graph} -o report.html", 1, "holds no points of a curve"),
    ("show {plan} --graph {graph}", 2, "nothing to write: name a page (-o report.html)"),
    ("show {plan} --graph {other} -o report.html", 1, "the plan is for another graph"),
    ("show {plan} --graph {graph} -o page.html --trace page.html", 1, "but what is written is a .json file"),
    ("show {plan} --graph {graph} -o page.txt", 1, "ends with .txt, but what is written is a .html file"),
    ("show {plan} --graph {graph} --trace page.yml", 1, "ends with .yml, but what is written is a .json file"),
    ("sing", 2, "sing"),
    ("slove model.json --budget 8GB", 2, "did you mean solve? (see planner --help)"),
    ("solv model.json --budget 8GB", 2, "did you mean solve? (see planner --help)"),
    ("solve model.json --budget -5%", 2, "argument --budget: expected one argument: '-5%' is not above 0"),
    ("solve model.json --budget 8", 2, "has no unit: write 8GB"),
    ("solve model.json --budget 1,5GB", 2, "write 8GB, 7.5GiB or 60%, with a decimal point in place of the comma"),
    ("solve model.json --budget 0.8", 2, "0.8B (bytes) or 80% (of the predicted peak"),
    ("trace zoo:mlp -o x --budget 8GB", 2, "unrecognized arguments: --budget 8GB (see planner trace --help)"),
    ("compare {graph} -o {graph}", 1, "model.json is a file: name a folder"),
    ("solve model.json --budget 8GB --max-overhead 10%", 2, "not allowed with"),
    ("solve model.json --budget 8GB --solver magic", 2, "there is no solver 'magic': `planner solvers` lists them all"),
    ("solve model.json --budget 8GB --time-limit soon", 2, "'soon' is not a time above 0"),
    ("solve model.json --budget 8GB --tolerance -1", 2, "'-1' is not a fraction"),
    ("solve model.json --budget 8GB --tolerance -x", 2, "expected one argument"),
    ("solve model.json --budget 8GB --work-limit 0", 2, "'0' is not a number above 0"),
    ("solve model.json --budget 8GB --work-limit 9 --time-limit 9", 2, "not allowed with"),
    ("solve model.json --budget auto", 2, "there is no device here, only a graph"),
    ("solve model.json --budget=8GB --tollerance=1%", 2, "arguments: --tollerance=1%: did you mean --tolerance?"),
    ("solve model.json --bugdet 8GB", 2, "did you mean --budget? (see planner solve --help)"),
    ("advise zoo:mlp --budget 1GB", 2, "--budget 1GB (see planner advise --help); --budget is an option of planner solve, "),
    ("run plan.json --vary seq", 2, "--vary seq (see planner run --help); --vary is an option of planner max-batch"),
    ("max-batch zoo:mlp --budgets 1GB", 2, "did you mean --budget? (see"),
    ("solve {graph} --budget 50% --options Offload", 2, "no option 'Offload' of a graph (did you mean offload?): choose from"),
    ("trace zoo:MLP -o out.json", 2, "unknown zoo model 'MLP' (did you mean mlp?): choose from"),
    ("trace zoo:mlp --roofline H200 -o out.json", 2, "(did you mean h200?) (see planner trace --help)"),
    ("solve {graph} --budget 50% --memory Reserved", 2, "(did you mean reserved?) (see planner solve --help)"),
    ("solve model.json --max-overhead 1e99", 2, "'1e99' is not a fraction from 0 to 1000"),
    ("solve model.json --max-overhead 10", 2, "'10' has no unit: write 10%, or 1000% if that many times is meant"),
    ("solve model.json --max-overhead 1,5%", 2, "write 0.1% or 0.001, with a decimal point"),
    ("solve model.json --max-overhead -1", 2, "'-1' is not a fraction"),
    ("solve model.json", 2, "--budget"),
    ("solve {graph} --budget 1B -o none/plan.json", 1, "none/plan.json"),
    ("solve {graph} --budget 1B -o /proc/plan.json", 1, "/proc/plan.json cannot be written"),
    ("solve zoo:mlp --budget 60%", 2, "'zoo:mlp' names a model: write its graph first, planner trace zoo:mlp -o model.json"),
    ("solve {own}:build --budget 60%", 2, "names a model: write its graph first"),
    ("solve {graph} --budget 1B -o {folder}", 1, "is a folder"),
    ("solve {graph} --budget 1B -o plan.html", 1, "ends with .html, but what is written is a .json file"),
    ("solve {graph} --budget 1B -o {graph}", 2, "is an input of this command: name another file"),
    ("solve {graph} --budget 60% --options chunks", 2, "traced without the option 'chunks'"),
    ("solve {graph} --budget 60% --options magic", 2, "there is no option 'magic' of a graph"),
    ("solve {graph} --budget 60% --write-model x.lp", 2, "add --solver checkmate"),
    ("solve {plan} --budget 60%", 1, "holds a plan, but a graph is expected"),
    ("solve", 2, "GRAPH"),
    ("trace mlp -o x", 2, "zoo:NAME or path/to/file.py:function"),
    ("trace none.py:build -o x.json", 1, "none.py is not there"),
    ("trace zoo:mlp -o x --device cuda --roofline h200", 2, "not allowed with"),
    ("trace zoo:mlp -o x --device tpu", 2, "tpu"),
    ("trace zoo:mlp -o x --passes 2 --roofline h200", 2, "--passes says how often ops are timed, and with --roofline none is"),
    ("trace zoo:mlp -o x.txt", 1, "ends with .txt, but what is written is a .json file"),
    ("trace zoo:mlp -o x --passes 0", 2, "'0' is not a whole number"),
    ("trace zoo:mlp", 2, "-o/--output"),
    ("trace {own}:build -o {own}", 2, "own.py is an input of this command"),
    ("trace zoo:mlp,layers=1,width=4 -o x.json --other-devices gpu7", 2, "there is no device 'gpu7'"),
    ("trace zoo:mlp,layers=x -o x.json", 2, "option 'layers' of mlp is 'x': must be a whole number"),
    ("trace zoo:mlp,magic=3 -o x.json", 2, "mlp has no option 'magic'"),
    ("trace zoo:none -o none/model.json", 1, "there is no folder"),  # before the model is built
    ("trace zoo:none -o x.json", 2, "unknown zoo model 'none': choose from"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("given")
    found = {"folder": folder, "graph": folder / "model.json", "other": folder / "other.json", "plan": folder / "plan.json"}
    found |= {"buffers": folder / "buffers.csv", "own": folder / "own.py"}
    write_graph(chain(), found["graph"])
    write_graph(make_training_chain(5), found["other"])
    write_plan(solve(chain(), "100%"), found["plan"])
    found["buffers"].write_text("id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\n")
    found["own"].write_text(_OWN)
    return found


@pytest.mark.parametrize(("command", "code", "said"), REFUSED, ids=[command for command, _, _ in REFUSED])
def test_it_is_refused_in_one_line(
    command: str,
    code: int,
    said: str,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in files["folder"].iterdir() if path.is_file()}
    refused(call(capsys, *command.format(**files).split()), code, said)
    assert {path: path.read_bytes() for path in files["folder"].iterdir() if path.is_file()} == before
    assert not list(tmp_path.iterdir())
