"""Capture each op as eager PyTorch runs it, where capture would decompose it.

PyTorch has Python functions that compute some operators from others, and calls them wherever a graph is captured for a
compiler, which fuses the parts again. Executed op by op, the parts cost time and memory and round differently; those of
recurrent networks leave out the dropout between layers.

A model that asks whether it is compiled gets the answer no, since libraries otherwise leave out ops and round differently.
``ASKING_FOR_COMPILERS`` lists the modules that must get the true answer. Known weakness: those of other libraries are found by
attempts that fail, each of them a capture.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from planner.capture.frontend.constant_tensors import is_constant, is_of_batch
from planner.capture.rewrites.batch_norms import capture_batch_norms_as_eager
from planner.capture.rewrites.layouts import lay_out_as_kernel, record_written_strides
from planner.capture.rewrites.prod_gradients import capture_products_as_eager
from planner.graphs.errors import TraceError
from planner.torch_private import capture as private
from planner.torch_private.core import (
    BypassDispatchCache,
    DispatchKey,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    below_autograd,
    keep_autocast_cache,
    keep_random_ops_in_graphs,
    register_python_kernels,
)
from planner.torch_private.patches import bind_original, wrap

aten = torch.ops.aten

# torch._utils.is_compiling and torch._dynamo.is_compiling call the first.
_QUESTIONS = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting)
_INFORMED = {"torch", "planner"}  # packages that always get the true answer

# Modules that ask in order to leave out operations that no graph can hold (a context variable, a read of a mask's values),
# and their questions. Other libraries are found by an attempt that fails.
ASKING_FOR_COMPILERS = frozenset(
    {
        "transformers.utils.output_capturing: is_compiling",
        "transformers.masking_utils: is_compiling",
    }
)

# Functions that tell whether a tensor may have no values to look at.
_QUESTIONS_OF_TENSORS = {"transformers.utils.import_utils.is_tracing"}

_AUTOGRAD_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

# Ops that are captured by their Python functions nevertheless.
_DECOMPOSED = {
    # The fused kernel, which draws and rounds as eager PyTorch's three ops do and keeps a quarter of the bytes.
    aten.dropout.default,
    # Its schema does not say that it writes the running statistics.
    aten.native_batch_norm.default,
    # Eager PyTorch looks at the values first, to check them, which no static graph can. The results are the same.
    aten.one_hot.default,
    aten.istft.default,
}


@contextmanager
def keep_ops_as_eager() -> Iterator[None]:
    """Make captures inside use the kernels of PyTorch's operators, and not the Python functions that decompose them."""
    with ExitStack() as stack:
        for op in _iterate_overloads():
            decompositions = {key: op.py_kernels[key] for key in _AUTOGRAD_KEYS if key in op.py_kernels}
            if decompositions and op not in _DECOMPOSED:
                stack.callback(_restore, op, decompositions)
                _remove(op, decompositions)
        stack.enter_context(capture_batch_norms_as_eager())
        stack.enter_context(capture_products_as_eager())
        stack.enter_context(_keep_layout_of_istft())
        stack.enter_context(_keep_dynamo_as_eager())
        stack.enter_context(record_written_strides())
        stack.enter_context(keep_random_ops_in_graphs())
        stack.enter_context(keep_autocast_cache())
        stack.enter_context(_exclude_recurrent_layers())
        # Around the cache, which other captures have filled.
        stack.enter_context(wrap(FakeTensorMode, "dispatch", _give_values_of_kernels))
        yield


def _iterate_overloads() -> Iterator[OpOverload]:
    """Yield the operators that Python has loaded; one that nobody has named has no Python function."""
    for packet in vars(aten).values():
        if isinstance(packet, OpOverloadPacket):
            yield from (op for op in vars(packet).values() if isinstance(op, OpOverload))


def _remove(op: OpOverload, kernels: dict[DispatchKey, Callable[..., Any]]) -> None:
    for key in kernels:
        del op.py_kernels[key]
    op._dispatch_cache.clear()


def _restore(op: OpOverload, kernels: dict[DispatchKey, Callable[..., Any]]) -> None:
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


def _keep_layout_of_istft() -> AbstractContextManager[object]:
    """Give the gradient of the input of ``istft`` eager PyTorch's layout, on which the rounding of sums over it depends."""
    kernels = aten.istft.default.py_kernels
    called = {key: partial(_call_with_copied_gradient, kernels[key]) for key in _AUTOGRAD_KEYS if key in kernels}
    return register_python_kernels(aten.istft.default, called)


def _call_with_copied_gradient(decompose: Callable[..., torch.Tensor], spectrum: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return decompose(torch.view_as_complex(torch.view_as_real(spectrum.resolve_conj())), *args, **kwargs)


@contextmanager
def _keep_dynamo_as_eager() -> Iterator[None]:
    """Make Dynamo decompose ``addcdiv`` and ``addcmul_`` only if it must: where their factor is a tensor."""
    with ExitStack() as stack:
        stack.enter_context(private.dynamo_config.patch(enable_dynamo_decompositions=False))
        keep_dynamo_as_eager_where(lambda _: True, stack)
        yield


def keep_dynamo_as_eager_where(wanted: Callable[[private.InstructionTranslatorBase], bool], stack: ExitStack) -> None:
    """Make Dynamo decompose no op in the frames that are `wanted` unless it must, until `stack` is closed.

    It must where a factor (``value`` of ``addcdiv`` and ``addcmul_``) is a tensor, which the op itself would read.
    """
    handlers, keep_whole = private.TorchInGraphFunctionVariable._get_handlers(), partial(_keep_whole, wanted)
    stack.callback(handlers.__setitem__, torch.addcdiv, handlers[torch.addcdiv])
    handlers[torch.addcdiv] = bind_original(handlers[torch.addcdiv], keep_whole)
    for holder, name in map(private.find_tensor_method, ("addcmul_", "addcdiv_")):
        stack.enter_context(wrap(holder, name, keep_whole))


def _keep_whole(wanted: Callable[[Any], bool], decompose: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    must = "value" in kwargs and not kwargs["value"].is_python_constant()
    return decompose(variable, tx, *args, **kwargs) if must or not wanted(tx) else None


class AskedForValuesError(Exception):
    """Ends a capture in which the model asks whether it may look at a mask of the batch; one with its values can answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a module whether it is compiled.

    Attributes:
        text: the module and the function that it calls, as in ``ASKING_FOR_COMPILERS``.
        frame: the function that asks, as Dynamo executes it.
    """

    text: str
    frame: Any

    @property
    def is_open(self) -> bool:
        """True if the capture has ended in code that the answer may choose: in a function of the module that has asked."""
        frame = self.frame
        while frame is not None:
            if _get_module(frame) == _get_module(self.frame) and frame.instruction_pointer is not None:
                return True
            frame = getattr(frame, "parent", None)
        return False


@contextmanager
def hide_compiling(informed: Collection[str] = (), may_look: Callable[[fx.Node], bool] = is_constant) -> Iterator[list[Question]]:
    """Answer no to models that ask whether they are compiled, so that they run the same code as in eager PyTorch.

    Libraries ask in order to leave out operations that no compiler can follow (a check whether a mask masks anything), and then
    compute numbers that round differently, or masks that eager PyTorch does not need. PyTorch itself gets the true answer.

    Args:
        informed: modules that get the true answer too, with their question, as in ``ASKING_FOR_COMPILERS``.
        may_look: tells whether the model may look at the values of a tensor.

    Yields:
        The questions so far that got no.
    """
    asked: list[Question] = []
    handlers, answer = private.TorchInGraphFunctionVariable._get_handlers(), partial(_answer, informed, asked)
    with (
        patch.dict(handlers, {question: bind_original(handlers[question], answer) for question in _QUESTIONS}),
        wrap(private.InstructionTranslatorBase, "call_function", partial(_answer_of_tensor, may_look)),
    ):
        yield asked


def ask_for_values(node: fx.Node) -> bool:
    """Return True if a tensor is a constant of the step; raise AskedForValuesError if it is a mask or the like of the batch."""
    if is_of_batch(node):
        raise AskedForValuesError
    return is_constant(node)


def _answer_of_tensor(may_look: Callable[[fx.Node], bool], call: Any, tx: Any, function: Any, args: Any, kwargs: Any) -> None:
    asked = getattr(function, "fn", None)
    is_question = f"{getattr(asked, '__module__', '')}.{getattr(asked, '__name__', '')}" in _QUESTIONS_OF_TENSORS
    tensor = args[0] if is_question and args else None
    if isinstance(tensor, private.TensorVariable) and may_look(tensor.as_proxy().node):
        tx.push(private.VariableTracker.build(tx, False))
    else:
        call(tx, function, args, kwargs)


def _answer(
    informed: Collection[str], asked: list[Question], true: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any
) -> Any:
    frame = _find_asking_frame(tx)
    question = Question(f"{_get_module(frame)}: {variable.value.__name__}", frame)
    if question.text in informed or _get_package(_get_module(frame)) in _INFORMED:
        return true(variable, tx, *args, **kwargs)
    asked.append(question)
    return private.VariableTracker.build(tx, False)


def _find_asking_frame(tx: private.InstructionTranslatorBase) -> Any:
    """Return the function that asks; if it asks through a function of its library, the caller of that function."""
    caller: Any = tx
    while caller is not None and _get_module(caller) == _get_module(tx):
        caller = getattr(caller, "parent", None)
    return tx if caller is None or _get_package(_get_module(caller)) in _INFORMED else caller


def _get_module(tx: private.InstructionTranslatorBase) -> str:
    return str(tx.f_globals.get("__name__"))


def _get_package(module: str) -> str:
    return module.partition(".")[0]


@contextmanager
def _exclude_recurrent_layers() -> Iterator[None]:
    """Keep fake values of recurrent layers out of the cache, which forgets that both bias gradients are one tensor.

    With the cache, a second capture of the same network would give another graph.
    """
    backward = aten.mkldnn_rnn_layer_backward.default
    kernel = partial(_compute_in_float, backward.py_kernels[DispatchKey.Meta])
    with (
        wrap(FakeTensorMode, "_validate_cache_key", _refuse_recurrent_layers),
        register_python_kernels(backward, {DispatchKey.Meta: kernel}),
    ):
        yield


def _refuse_recurrent_layers(validate: Any, mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> None:
    if func in _CALLED:
        raise BypassDispatchCache(f"{func} returns one tensor twice")
    validate(mode, func, args, kwargs)


# For results of norms, the argument that has their type in kernels for the CPU. Fake kernels say otherwise where inputs are in
# half precision and parameters are not, as under autocast: casts too many and other gradients of gradients would be captured.
_TYPES_ON_CPU: dict[OpOverload, dict[int, int]] = {
    aten.native_layer_norm.default: {1: 2, 2: 2},
    aten.native_group_norm.default: {1: 1, 2: 1},
    aten.native_group_norm_backward.default: {0: 1},
    aten._native_batch_norm_legit_functional.default: {1: 1, 2: 1, 3: 3, 4: 4},
}


def _give_values_of_kernels(
    dispatch: Any, mode: FakeTensorMode, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    results = lay_out_as_kernel(func, args, dispatch(mode, func, types, args, kwargs))
    if func not in _TYPES_ON_CPU or results is NotImplemented:
        return results
    results = list(results)
    for result, argument in _TYPES_ON_CPU[func].items():
        value, like = results[result], args[argument]
        if value is not None and like is not None and like.device.type == "cpu":
            results[result] = value.to(like.dtype)
    return tuple(results)


def _compute_in_float(kernel: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, ...]:
    """Return gradients in float, as the kernel does; before torch 2.13 the meta kernel gives them the type of the weights."""
    return tuple(gradient.float() for gradient in kernel(*args))


def call_mkldnn_rnn_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """Call ``aten.mkldnn_rnn_layer`` such that it returns what its backward pass needs, where no gradients are recorded too."""
    with below_autograd(), torch.enable_grad():
        results: tuple[torch.Tensor, ...] = aten.mkldnn_rnn_layer.default(*args)
        return results


def call_mkldnn_rnn_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Call ``aten.mkldnn_rnn_layer_backward``, and return separate gradients of the biases, for which it returns one tensor."""
    results = list(aten.mkldnn_rnn_layer_backward.default(*args))
    results[_SECOND_BIAS] = results[_SECOND_BIAS].clone()
    return tuple(results)


_SECOND_BIAS = 4
_CALLED = {
    aten.mkldnn_rnn_layer.default: call_mkldnn_rnn_layer,
    aten.mkldnn_rnn_layer_backward.default: call_mkldnn_rnn_layer_backward,
}


# Some kernels return another layout than their fake kernels (mse_loss_backward of a transposed input). Eager PyTorch's
# backward pass then copies tensors that cannot be viewed; so does this op, and otherwise it makes the same view.
_AS_LAID_OUT: dict[OpOverload, OpOverload] = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)


def separate_biases(graph: fx.Graph) -> None:
    """Give each bias a gradient of its own in the fake values of ``call_mkldnn_rnn_layer_backward``."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer_backward.default):
        values = list(node.meta["val"])
        with values[_SECOND_BIAS].fake_mode:
            values[_SECOND_BIAS] = torch.empty_like(values[_SECOND_BIAS])
        node.meta["val"] = tuple(values)
        for user in node.users:
            if user.args[1] == _SECOND_BIAS:
                user.meta["val"] = values[_SECOND_BIAS]


def get_callable(op: Any) -> Callable[..., Any]:
    """Return the function that computes what eager PyTorch computes for `op`, called where nothing is recorded."""
    return _CALLED.get(op) or _AS_LAID_OUT.get(op, op)


def refuse_cpu_only_kernels(graph: fx.Graph) -> None:
    """Raise TraceError if a graph that is captured on the CPU for CUDA has kernels that only the CPU has."""
    for op in _CALLED:
        if any(node.target is op for node in graph.nodes):
            raise TraceError(
                "nn.LSTM runs in cuDNN on CUDA, and its memory is not known without a GPU: plan it on a CPU, or use nn.LSTMCell "
                "in a loop"
            )
