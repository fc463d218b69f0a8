"""Measure the structure of the sources: lines, long functions, names, nested functions, comments, import cycles.

    python -m benchmarks.structure                     # of this checkout
    python -m benchmarks.structure --against ../before # compared with another one, as a table

Nothing is imported or executed: the files are read as text and as syntax trees.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

FLOORS = ("graphs", "solvers", "planner")
FOLDERS = (*FLOORS, "benchmarks", "tests")
MOST_LINES, MOST_PARAMETERS = 60, 7
# The first words of names that say what a function does. Words that are nouns as often (plan, record, time) are among them.
_VERBS = """
abandon accept adapt add adjust admit adopt advance advise agree align allocate allot allow announce answer append
apply ask assign assume attach await bar begin bind block bound bracket branch break bring build calculate call
capture carry change check checkpoint choose clear close collect combine come commit compare compile complete compose
compress compute confirm connect construct consult continue convert copy count cover create cut decide declare decode
decompose define delete derive describe detach detect determine disable discard disconnect divide download draw drop
emit enable encode end enforce enlarge enter escape estimate evaluate evict exclude execute expand expect explain
export extend extract fail feed fetch fill filter find finish fit fix flatten follow forbid forget form format forward
free freeze gather generate get give go group grow guess halt halve hand handle hash hide hold identify ignore import
improve increase index initialize insert install interrupt invert isolate issue iterate join judge keep label launch
lay learn leave let lift limit link list listen live load lock log look lower make map mark match measure merge mock
model monitor move multiply mutate name narrow need normalize note notice notify number observe occur offer offload
open order pack pad pair parse partition pass patch permute pick pin place plan play plot poll pop predict prepare
preserve prevent print profile propagate prove provide prune publish push put quote raise rank reach read readmit
rebuild recall receive recommend recompute record redraw reduce refine refresh refuse refute register relax release
reload rematerialize remember remove rename render renumber reorder repair repeat replace replan replay report request
require reserve reset reshard resolve restart restore restrict resume return reuse rewrite round run sample save scale
schedule score search see select send separate serve set settle share shift shorten show shrink sift silence simplify
simulate skip slow solve sort spare specify spend split start stay steer step stop store stretch strip submit
substitute sum summarize swap take tell test tie time touch trace track train transfer transform translate traverse
trim try turn unite unlock unmap unpack unpin unwrap update use validate vary verify view visit wait walk warm warn
watch weigh win work wrap write yield
"""
VERBS = frozenset(_VERBS.split())
_QUESTIONS = "is has was can may must should would does needs fits applies accepts carries goes"  # of names that answer one
YES_OR_NO = frozenset(_QUESTIONS.split())


@dataclass(frozen=True, slots=True)
class Module:
    """One file.

    Attributes:
        name: dotted, as it is imported.
    """

    name: str
    source: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """All lines."""
        return self.source.count("\n")

    @property
    def code_lines(self) -> int:
        """Lines with code: no blank lines, comments or docstrings."""
        skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines.difference(*(_find_docstring_lines(node) for node in ast.walk(self.tree))))


def _find_docstring_lines(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


def read(root: Path, folder: str) -> list[Module]:
    """Read the modules of a folder of the checkout `root`."""
    found, package = [], "planner." if (root / "planner" / folder).is_symlink() else ""
    for path in sorted((root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        source = path.read_text()
        found.append(Module(package + ".".join(parts).removesuffix(".__init__"), source, ast.parse(source)))
    return found


def iterate_functions(module: Module) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the lines and the parameters (without self) of each function of a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield (
                f"{module.name}.{node.name}",
                (node.end_lineno or 0) - node.lineno + 1,
                len([n for n in names if n not in ("self", "cls")]),
            )


def find_functions_without_verb(module: Module) -> tuple[list[str], int]:
    """Return the names of functions that begin with no verb and ask no question, and the number of all that are looked at.

    Properties and dunder methods are left out, as they read as attributes and operators; so are constructors (``of``, and class
    methods that return their class), and ``main``, which starts a program. A function that returns a truth value may begin with
    the third person, as in ``pattern.occurs_in(course)``.
    """
    names, count = [], 0
    for node in ast.walk(module.tree):
        if (
            not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or node.name in ("of", "main")
            or node.name.startswith("__")
        ):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        returns = "" if node.returns is None else ast.unparse(node.returns).strip("'")
        constructs = "classmethod" in decorators and (returns == "Self" or returns in _list_class_names(module))
        if constructs or not decorators.isdisjoint({"property", "cached_property", "setter", "overload"}):
            continue
        count += 1
        first = re.split("_|(?<=[a-z])(?=[A-Z])", node.name.strip("_"))[0]
        asks = first in YES_OR_NO or (
            returns == "bool" and not VERBS.isdisjoint({first.removesuffix("s"), first.removesuffix("es")})
        )
        if first not in VERBS and not asks:
            names.append(node.name)
    return names, count


def _list_class_names(module: Module) -> set[str]:
    return {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)}


def count_nested_functions(module: Module) -> int:
    """Return the number of functions that are defined inside of others."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    outer = [node for node in ast.walk(module.tree) if isinstance(node, kinds)]
    return len({id(child) for node in outer for child in ast.walk(node) if isinstance(child, kinds) and child is not node})


def count_comment_lines(module: Module) -> int:
    """Return the number of comments."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(module.source).readline))


def import_cycles(modules: list[Module]) -> list[set[str]]:
    """Return the groups of modules that import each other in a circle, imports inside of functions included."""
    place = {module.name: i for i, module in enumerate(modules)}
    edges: list[tuple[int, int]] = []
    for module in modules:
        typing_only = {
            id(child)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for child in ast.walk(node)
        }
        for node in ast.walk(module.tree):
            if id(node) in typing_only:
                continue
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [name if name in place else node.module for name in inner]
            else:
                continue
            edges += [(place[module.name], place[name]) for name in wanted if name in place and name != module.name]
    imports = coo_array((np.ones(len(edges)), np.array(edges).T), shape=(len(modules), len(modules)))
    _, group = connected_components(imports, connection="strong")
    groups = [{module.name for module, g in zip(modules, group, strict=True) if g == number} for number in range(group.max() + 1)]
    return [names for names in groups if len(names) > 1]


def find_private_uses(sources: list[Module], tests: list[Module]) -> list[str]:
    """Return the attributes of our own objects that tests use although their names begin with an underscore.

    Left out are names that another library or protocol defines too (``_replace`` of tuples, ``_repr_html_``), and helpers that
    tests share, which are one place for each of them.
    """
    ours: set[str] = set()
    for node in (node for module in sources for node in ast.walk(module.tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    private = {name for name in ours if re.fullmatch("_[a-zA-Z].*[^_]", name)} - {"_replace", "_ops", "_compiled_call_impl"}
    return [
        f"{module.name}: {ast.unparse(node)}"
        for module in tests
        if not module.name.startswith("tests.support")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in private and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def measure(root: Path) -> dict[str, str]:
    """Return the figures of the checkout at `root`, by name."""
    figures: dict[str, str] = {}
    folders = {folder: read(root, folder) for folder in FOLDERS}
    for folder, modules in folders.items():
        lines, code = sum(module.lines for module in modules), sum(module.code_lines for module in modules)
        figures[f"`{folder}`: files, lines, lines of code"] = f"{len(modules)}, {lines:,}, {code:,}"
    sources = [module for floor in FLOORS for module in folders[floor]]
    every = [found for module in sources for found in iterate_functions(module)]
    figures[f"functions over {MOST_LINES} lines, the longest"] = _count_and_most(
        [(lines, name) for name, lines, _ in every], MOST_LINES
    )
    figures[f"functions with over {MOST_PARAMETERS} parameters, the most"] = _count_and_most(
        [(count, name) for name, _, count in every], MOST_PARAMETERS
    )
    unnamed = [find_functions_without_verb(module) for module in sources]
    without, all_names = sum(len(names) for names, _ in unnamed), sum(count for _, count in unnamed)
    figures["functions whose names have no verb"] = f"{without:,} of {all_names:,} ({100 * without / max(1, all_names):.0f}%)"
    figures["functions inside of others"] = str(sum(map(count_nested_functions, sources)))
    comments, lines = sum(map(count_comment_lines, sources)), sum(module.lines for module in sources)
    figures["comments"] = f"{comments:,} ({100 * comments / max(1, lines):.1f} for 100 lines)"
    figures["files at the top of `planner`"] = str(len(list((root / "planner").glob("*.py"))))
    figures["uses of private names in tests"] = str(len(find_private_uses(sources, folders["tests"])))
    cycles = import_cycles(sources)
    figures["modules in import cycles (cycles)"] = f"{sum(map(len, cycles))} ({len(cycles)})"
    return figures


def _count_and_most(found: list[tuple[int, str]], limit: int) -> str:
    most, name = max(found)
    return f"{sum(value > limit for value, _ in found)}, {name} ({most})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(), help="checkout to measure (default: the current folder)")
    parser.add_argument("--against", type=Path, help="checkout to compare with: its figures stand first")
    args = parser.parse_args()
    columns = {"now": measure(args.root)}
    if args.against is not None:
        columns = {"before": measure(args.against), **columns}
    print(f"| | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 1)}")
    for what in columns["now"]:
        print(f"| {what} | {' | '.join(figures[what] for figures in columns.values())} |")


if __name__ == "__main__":
    main()
