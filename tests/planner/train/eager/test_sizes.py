"""What is known of ops by their signatures."""

import logging
import threading

import pytest
import torch

from planner.torch_private.core import silence_fakes
from planner.train.eager.sizes import OutputSizes, count_lstm_workspace_bytes
from planner.train.eager.tensor_arguments import iterate_tensors

aten = torch.ops.aten


@pytest.mark.parametrize("sizes", [(8, 32, 64, 64), (16, 64, 128, 64), (5, 3, 7, 9), (100, 1, 10, 200), (7, 30, 300, 77)])
def test_guessed_workspace_of_an_lstm_is_within_a_factor_of_two(sizes: tuple[int, int, int, int]) -> None:
    """To the byte by the kernels of one machine; others may lay it out otherwise."""
    steps, batch, inputs, hidden = sizes
    weights = [torch.zeros(4 * hidden, inputs), torch.zeros(4 * hidden, hidden), torch.zeros(4 * hidden), torch.zeros(4 * hidden)]
    state = torch.zeros(batch, hidden)
    flags = (False, [], 2, hidden, 1, True, False, False, True)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(torch.zeros(steps, batch, inputs), *weights, state, state, *flags)
    assert 0.5 < workspace.nbytes / count_lstm_workspace_bytes(*sizes) < 2


def ops(device: str) -> list[tuple[object, tuple[object, ...], dict[str, object]]]:
    """Ops with their arguments, whose sizes meta tensors know, and others."""
    aten, x, y = torch.ops.aten, torch.ones(6, 8, 10, device=device), torch.ones(10, 7, device=device)
    image, weight = torch.ones(2, 4, 9, 9, device=device), torch.ones(6, 4, 3, 3, device=device)
    rows = torch.tensor([0, 2, 2], device=device)
    return [
        (aten.relu.default, (x,), {}),
        (aten.add.Tensor, (x, x[0]), {}),
        (aten.mm.default, (x[0], y), {}),
        (aten.cat.default, ([x, x, x[:2]],), {}),
        (aten.index.Tensor, (x, [rows]), {}),
        (aten.new_zeros.default, (x, [3, 5]), {}),
        (aten.empty_like.default, (x,), {"dtype": torch.float64}),
        (aten.sum.dim_IntList, (x, [1]), {}),
        (aten.view.default, (x, [48, 10]), {}),
        (aten.add_.Tensor, (x, 1.0), {}),
        (aten.native_dropout.default, (x, 0.5, True), {}),
        (aten.convolution.default, (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        (aten.native_layer_norm.default, (x, [10], None, None, 1e-5), {}),
        (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
        (aten.max.dim, (x, 1), {}),
    ]


@pytest.mark.parametrize("number", range(len(ops("cpu"))))
def test_sizes_are_those_of_the_op(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By meta tensors where they can, which says what fake tensors say."""
    function, args, kwargs = ops("cpu")[number]
    sizes = OutputSizes(torch.device("cpu"))
    found = sizes.count_out_bytes(function, args, kwargs)
    there = {t.untyped_storage()._cdata for t in iterate_tensors(args)}
    outputs = {t.untyped_storage()._cdata: t for t in iterate_tensors(function(*args, **kwargs))}
    assert found == sum(t.untyped_storage().nbytes() for address, t in outputs.items() if address not in there)
    monkeypatch.setattr("planner.train.eager.sizes.has_meta_kernel", lambda _: False)
    assert found == OutputSizes(torch.device("cpu")).count_out_bytes(function, args, kwargs)


def test_an_argument_that_names_a_device_makes_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    empty = torch.empty_strided

    def noting(*args: object, **kwargs: object) -> torch.Tensor:
        made.append(str(kwargs["device"]))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_strided", noting)
    sizes = OutputSizes(torch.device("cpu"))
    x = torch.ones(4, 4)
    assert sizes.count_out_bytes(aten.full_like.default, (x, 1.0), {"device": torch.device("cpu")}) == 64
    assert sizes.count_out_bytes(aten.full_like.default, (x, 1.0), {}) == 64
    assert made[0] == "cpu" and set(made[1:]) == {"meta"}  # the first on fake tensors


def test_the_log_of_fake_tensors_is_suppressed_in_one_thread_alone() -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    record = log.makeRecord(log.name, logging.ERROR, __file__, 1, "failed", (), None)
    entered, ended = threading.Event(), threading.Event()
    elsewhere: list[bool] = []

    def suppress() -> None:
        with silence_fakes():
            entered.set()
            assert ended.wait(20)
            elsewhere.append(bool(log.filter(record)))

    other = threading.Thread(target=suppress)
    with silence_fakes():
        other.start()
        assert entered.wait(20)
        assert not log.filter(record)
    assert log.filter(record) and not log.disabled
    ended.set()
    other.join()
    assert elsewhere == [False]
    assert log.filter(record)
