"""Messages for guards of Dynamo that fail: what changed since a step was captured, from what to what."""

import re
from typing import Any

import torch

from planner.capture.guards.names import Scope, build_accessor, make_readable
from planner.capture.signature import is_plain

_PATTERNS = (
    (r"(?P<source>.+) == (?P<planned>.+)", "{name} was {planned} when the step was planned, and is {now} now"),
    (r"(?P<source>.+) is (?P<planned>None|True|False)", "{name} was {planned} when the step was planned, and is {now} now"),
    (
        r"___check_type_id\((?P<source>.+), \d+\), type=<class '(?P<planned>.+)'>",
        "{name} was a {planned} when the step was planned, and is a {type} now",
    ),
    (r"not hasattr\((?P<source>.+), '(?P<planned>\w+)'\)", "{name}.{planned} was set since the step was planned"),
    (
        r"not ___dict_contains\('(?P<planned>\w+)', (?P<source>.+)\.__dict__\)",
        "{name}.{planned} was set since the step was planned",
    ),
    (
        r"___check_obj_id\((?P<source>.+), \d+\), type=<class '(?P<planned>.+)'>",
        "{name} was another {planned} when the step was planned, and is {now} now",
    ),
    (r"KeyError on (?P<source>.+)", "{name} was removed, or replaced by another kind of value, since the step was planned"),
    (r"not (?P<source>.+)\.(?P<planned>_\w*hooks\w*)", "hooks of {name} were added since the step was planned"),
    (
        r"len\((?P<source>.+)\.(?P<planned>_\w*hooks\w*)\) != .*",
        "hooks of {name} were added or removed since the step was planned",
    ),
    (r"len\((?P<source>.+)\) != (?P<planned>\d+)", "{name} had {planned} items when the step was planned, and has {length} now"),
    (
        r"tensor '(?P<source>.+)' requires_grad mismatch\. expected requires_grad=(?P<planned>\d).*",
        "{name}.requires_grad was {planned_flag} when the step was planned, and is {other_flag} now",
    ),
    (
        r"tensor '(?P<source>.+)' (?P<planned>.+? mismatch.*?)(?:\. Guard failed.*)?",
        "{name} is not as it was when the step was planned: {planned}",
    ),
    (
        r"expected type of '(?P<source>.+)' to be (?:a tensor type|<class '.+'>).*",  # torch 2.14 names the class
        "{name} was a tensor when the step was planned, and is {now} now",
    ),
    (
        r"(?P<source>[LG]\[.+) is (?P<planned>[LG]\[.+)",
        "{name} and {planned} were one object when the step was planned (tied weights, say), and are two now",
    ),
)

_OF_VALUES = (
    r"(?P<source>.+) (?:==|is) .+",
    r"___check_type_id\((?P<source>.+), \d+\), type=<class '(?:int|float|bool|numpy.float64|str|tuple|NoneType)'>",
    r"___check_obj_id\((?P<source>.+), \d+\), type=<.+>",  # of a member of an enumeration
    r"not ___dict_contains\('(?P<name>\w+)', (?P<source>.+)\.__dict__\)",
)
# An attribute or a key that was not there, as what the first step creates.
_ABSENT = re.compile(r"not (?:hasattr\((?P<owner>.+), '(?P<name>\w+)'\)|___dict_contains\((?P<key>.+?), (?P<held>.+)\))")


def explain(part: str, local: Scope, scope: Scope) -> str:
    """Return the reason why a guard does not hold."""
    code = get_code(part)
    for pattern, words in _PATTERNS:
        if (found := re.fullmatch(pattern, code, re.DOTALL)) is None:
            continue
        now = _get_value(found["source"], local, scope)
        groups = found.groupdict()
        planned = make_readable(str(groups.get("planned", "")), local, scope)
        text = words.format(
            name=make_readable(found["source"], local, scope),
            planned=planned,
            planned_flag=planned == "1",
            other_flag=planned != "1",
            now=_format_value(now),
            type=f"{type(now).__module__}.{type(now).__qualname__}",
            length=_get_length(now),
        )
        return text + (" (train() or eval() was called)" if is_mode(part) else "")
    return f"{make_readable(code, local, scope)} was true when the step was planned, and is not now"


def _format_value(value: object) -> str:
    text = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _get_length(value: Any) -> object:
    try:
        return len(value)
    except TypeError:  # no container; a tensor without dimensions says that it is one
        return "none"


def _get_value(name: str, local: Scope, scope: Scope) -> Any:
    try:
        return build_accessor(name)(local, scope)
    except Exception:  # noqa: BLE001  # it was removed
        return None


def get_code(part: str) -> str:
    """Return a guard without the comment about its origin."""
    return re.split(r"\s{2,}# ", part, maxsplit=1)[0].strip()


def is_mode(part: str) -> bool:
    """Return True if the guard `part` is about the train or eval mode of a module."""
    return get_code(part).split(" == ")[0].endswith(".training")


def is_followed_value(part: str, local: Scope, scope: Scope) -> bool:
    """Return True if the guard `part` is about a value that a step follows (``is_plain``), except a mode.

    What was missing, and is there now, is followed unless it is called: another ``forward`` of a model is another step.
    """
    code = get_code(part)
    if absent := _ABSENT.fullmatch(code):
        owner, name, key, held = absent.groups()
        return not callable(_get_value(f"{held}[{key}]" if owner is None else f"{owner}.{name}", local, scope))
    found = next(filter(None, (re.fullmatch(pattern, code, re.DOTALL) for pattern in _OF_VALUES)), None)
    if found is None or is_mode(part) or found["source"].startswith(("len(", "str(")):
        return False
    return is_plain(_get_value(".".join(filter(None, (found["source"], found.groupdict().get("name")))), local, scope))


def is_failing(part: str, local: Scope, scope: Scope) -> bool:
    """Return True if the guard `part` fails, or cannot be evaluated: guards that are checked together are listed together."""
    try:
        return not build_accessor(get_code(part))(local, scope)
    except Exception:  # noqa: BLE001  # not every guard is an expression
        return True
