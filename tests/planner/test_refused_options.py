"""Each option of a graph is refused wherever the registry says that it does not go with how a step is trained."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import planner
from graphs.errors import UsageError
from graphs.options.option import Need, Setting
from planner.capture.options import OPTIONS, needs

X, Y = torch.ones(2, 4), torch.zeros(2, 3)


def compiled(name: str, **how: object) -> None:
    others = ["cpu:2"] if Need.DEVICES in needs((name,)) else []
    planner.compile(
        nn.Linear(4, 3), nn.MSELoss(), (X, Y), budget="100%", options=[OPTIONS[name].to_try], other_devices=others, **how
    )


def under_torch_compile(name: str, **how: object) -> None:
    options = {"budget": "100%", "options": [OPTIONS[name].to_try], **how}
    torch.compile(nn.Linear(4, 3), backend="planner", options=options)(X)


WAYS: dict[Setting, list[Callable[[str], None]]] = {
    Setting.TORCH_COMPILE: [under_torch_compile],
    Setting.VARYING_SIZES: [partial(compiled, dynamic=True)],
    Setting.INDUCTOR: [partial(compiled, kernels="inductor"), partial(under_torch_compile, kernels="inductor")],
}
REFUSED = [(name, setting) for name, option in OPTIONS.items() for setting in option.refused]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "setting"), REFUSED)
def test_what_the_registry_refuses_no_step_is_made_with(name: str, setting: Setting) -> None:
    refusal = rf"the option .{name}. does not go with ({setting}|torch\.compile): .*leave .* out"
    for way in WAYS[setting]:
        with pytest.raises(Exception, match=refusal) as e:
            way(name)
        assert isinstance(getattr(e.value, "inner_exception", e.value), UsageError)
