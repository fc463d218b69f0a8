"""Names by which Dynamo says where it read a value: Python expressions over the local scope ``L`` and the global scope ``G``.

Dynamo writes them and compiles its own guards from them. So they are evaluated as Python here too: they come from no file and no
user.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Scope = Mapping[str, object]

_PATHS = (
    (r"L\['self'\]\._modules\['(model|loss_fn)'\]", r"\1"),
    (r"L\['self'\]\.(model|loss_fn)", r"\1"),
    (r"L\['self'\]", "the step"),
    (r"L\['args'\]\[(\d+)\]", r"input \1"),
    (r"L\['kwargs'\]\['([^']+)'\]", r"input '\1'"),
    (r"\.__dict__\['(\w+)'\]", r".\1"),
    (r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1"),
    (r"(?<![\w.])G\['__import_([^']+)'\]", lambda found: found[1].replace("_dot_", ".").replace("__main__.", "")),
    (r"(?<![\w.])G\['([^']+)'\]", r"\1"),
    (r"__main__\.", ""),
)


def build_accessor(name: str) -> Callable[[Scope, Scope], Any]:
    """Return a function of the local and the global scope that returns the present value of a name or guard.

    It raises any exception if the value is no longer there.

    Raises:
        SyntaxError: a guard is no expression.
    """
    found: Callable[[Scope, Scope], Any] = eval(f"lambda L, G: {name}", {})
    return found


def is_of_torch(name: str) -> bool:
    """Return True if a name, as Dynamo writes it, is of a value in a module of PyTorch."""
    return name.startswith("G['__import_torch_dot_")


def make_readable(text: str, local: Scope, scope: Scope) -> str:
    """Replace Dynamo's names in `text` by those that a person would write: ``model.bn.momentum``, ``config.alpha``."""
    closure = re.compile(r"((?:L|G)\[[^ ]*?)\.__closure__\[(\d+)\]\.cell_contents")
    while found := closure.search(text):
        try:
            variable = build_accessor(found[1])(local, scope).__code__.co_freevars[int(found[2])]
        except Exception:  # noqa: BLE001  # a name that cannot be resolved is shown as it is
            break
        text = text[: found.start()] + variable + text[found.end() :]
    for pattern, path in _PATHS:
        text = re.sub(pattern, path, text)
    return text
