"""Recurrent networks are captured as eager PyTorch runs them, bitwise equal."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models.parts import FunctionModule
from graphs.errors import TraceError
from graphs.schedule import keep_everything
from planner.capture.trace import capture
from planner.measure.steps import get_loss
from planner.runtime.executor import Executor
from tests.support.marks import slow_among
from tests.support.models.eager_ops import Last, captured_as_eager

# 33 is no multiple of the widths of vectors: the last elements of a row are computed by other instructions.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "GRU": (lambda: nn.GRU(17, 33), ((3, 5, 17),)),
    "GRU, layers": (lambda: nn.GRU(17, 33, 2, dropout=0.4, batch_first=True), ((4, 2, 17),)),
    "GRU, both ways": (lambda: nn.GRU(17, 33, bidirectional=True, bias=False), ((2, 5, 17), (2, 5, 33))),
    "RNN, layers": (lambda: nn.RNN(17, 33, 2, dropout=0.4), ((3, 5, 17),)),
    "LSTM": (lambda: nn.LSTM(17, 33), ((6, 5, 17),)),
    "LSTM, layers": (lambda: nn.LSTM(17, 33, 2, dropout=0.4, batch_first=True, bidirectional=True), ((5, 6, 17),)),
    "LSTM, projected": (lambda: nn.LSTM(17, 33, proj_size=9), ((3, 5, 17),)),
    "LSTM, one sequence": (lambda: nn.LSTM(17, 33, bias=False), ((6, 17),)),
}


@pytest.mark.parametrize("name", slow_among(NETWORKS, "GRU, layers", "GRU, both ways", "RNN, layers"))
def test_recurrent_networks_are_bitwise_equal_to_eager(name: str) -> None:
    torch.manual_seed(0)
    make, shapes = NETWORKS[name]
    captured, eager, ops = captured_as_eager(Last(make()), None, tuple(torch.randn(shape) for shape in shapes))
    # The fused dropout is captured, which draws and rounds as the three ops do that run on the CPU.
    dropouts = ops.pop("native_dropout", 0)
    assert dropouts == eager.pop("bernoulli", 0) == ops.pop("native_dropout_backward", 0)
    assert dropouts == ("layers" in name)
    assert ops == eager - Counter({"div": dropouts, "mul": 2 * dropouts})
    if name in ("LSTM", "LSTM, one sequence"):
        targets = {op.target for op in captured.graph.ops}
        assert {"aten.mkldnn_rnn_layer.default", "aten.mkldnn_rnn_layer_backward.default"} <= targets


def test_lstm_gives_the_same_graph_every_time() -> None:
    """PyTorch remembers what kernels return, but not that two results were one tensor."""
    model, batch = Last(nn.LSTM(17, 33)), (torch.randn(6, 5, 17),)
    first, second = capture(model, None, batch), capture(model, None, batch)
    assert first.graph.fingerprint == second.graph.fingerprint
    for captured in (first, second):
        model.zero_grad()
        get_loss(Executor(captured, keep_everything(captured.graph), model, None)(*batch)).backward()
        assert model.inner.bias_ih_l0.grad.data_ptr() != model.inner.bias_hh_l0.grad.data_ptr()


def test_lstm_accepts_initial_states_and_autocast() -> None:
    torch.manual_seed(0)
    lstm = Last(nn.LSTM(17, 33))
    states = (torch.randn(1, 5, 33), torch.randn(1, 5, 33))
    captured_as_eager(lstm, None, (torch.randn(6, 5, 17), states))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            lstm(torch.randn(6, 5, 17), states)
        except RuntimeError as error:
            pytest.skip(f"eager PyTorch has no such LSTM on this processor: {error}")
        captured_as_eager(lstm, None, (torch.randn(6, 5, 17), states))


def test_weights_are_cast_once_under_autocast() -> None:
    """Gradients of a weight that is used at each position are added in half precision, as eager PyTorch adds them."""
    torch.manual_seed(0)
    model = FunctionModule(lambda m, x: m.b(m.b(m.a(x)[0])).float().sum(), a=nn.GRU(17, 33), b=nn.Linear(33, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, eager, ops = captured_as_eager(model, None, (torch.randn(3, 5, 17),))
    assert ops == eager


def test_recurrent_cells_are_bitwise_equal_to_eager() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        hidden, state = None, None
        for item in x:
            hidden = m.cell(item, hidden)
            state = m.second(hidden, state)
        return state[0].square().sum() + hidden.sum()

    torch.manual_seed(0)
    model = FunctionModule(forward, cell=nn.GRUCell(17, 33), second=nn.LSTMCell(33, 9))
    _, eager, ops = captured_as_eager(model, None, (torch.randn(3, 5, 17),))
    assert ops == eager


def test_lstm_captured_for_cuda_raises() -> None:
    with pytest.raises(TraceError, match="cuDNN"):
        capture(Last(nn.LSTM(17, 33)), None, (torch.randn(6, 5, 17),), as_on_cuda=True)
