"""The two halves of a joint graph, compiled by Inductor as by ``torch.compile``.

Kernels are taken from the modules that Inductor has loaded. Before, each half executed its source once more, and its autotuners
then chose other kernels than those of ``torch.compile``. Reuse of buffers is switched off, since which buffer is free depends on
the schedule. Known weakness: what min-cut recomputes inside of fused backward kernels cannot be undone by a schedule;
``variants.py`` therefore compiles a step in several ways.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.compiler import config as compiler_config

from planner.capture.kernels.in_place import note_pairs
from planner.capture.kernels.variants import CompileVariant
from planner.capture.signature import join_returned
from planner.capture.step import TrainingStep
from planner.graphs.errors import TraceError, first_line
from planner.torch_private import capture as private
from planner.torch_private.inductor import (
    CompiledFxGraph,
    InductorError,
    V,
    compile_fx_backward,
    compile_fx_forward,
    create_compiler_config_extra,
    get_loaded_names,
    partition_fn,
    run_pre_grad_passes,
    select_decomp_table,
    separate_kernels,
)

# Settings that make the code around kernels a list of launches. A schedule allocates and frees memory, so Inductor need not;
# the arithmetic of kernels does not change.
_PLAIN_CODE = {
    "allow_buffer_reuse": False,
    "graph_partition": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "triton.cudagraphs": False,
}

# Part of the keys of Inductor's cache: cached code was generated with all changes made here.
_GENERATED = "planner: kernels apart, with what one thread may write over"

_Inputs = tuple[tuple[str, private.AOTInput | None], ...]
_Outputs = tuple[tuple[str | None, private.AOTOutput, torch.Tensor | None], ...]
_Ends = tuple[_Inputs, _Outputs]


class NothingCompiledError(TraceError):
    """A pass of the step has no kernel: its results are its inputs, or views of them."""

    def __init__(self) -> None:
        super().__init__("the step computes nothing that Inductor could compile: plan with kernels='eager'")


@dataclass(frozen=True, slots=True)
class Half:
    """The compiled forward or backward pass.

    Attributes:
        source: the module that Inductor generated.
        namespace: the names that this module defines, as Inductor loaded it: kernels are autotuned once for all callers.
        inputs: name and descriptor of each input; saved tensors have no descriptor.
        outputs: name, descriptor and fake value of each output; None and None for missing ones.
        constants: tensors that are part of it, by name.
    """

    source: str
    namespace: Mapping[str, object]
    inputs: _Inputs
    outputs: _Outputs
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Halves:
    """A compiled step.

    Attributes:
        joint: the graph that it was compiled from, both passes in one.
        forward, backward: the two passes.
        call: both, run by PyTorch's own code around them: called with parameters, buffers and the leaves of a batch.
    """

    joint: private.JointWithDescriptors
    forward: Half
    backward: Half
    call: Callable[..., Any]

    def build_call(self, step: TrainingStep) -> Callable[..., Any]:
        """Return `call` with the inputs and outputs of `step`."""
        return partial(self._run, step)

    def _run(self, step: TrainingStep, /, *args: object, **kwargs: object) -> object:
        parameters = [step.get_parameter(name) for name in self.joint.params_spec]
        buffers = [step.get_buffer(name) for name in self.joint.buffers_spec]
        return join_returned(*self.call(*parameters, *buffers, *args, **kwargs))


def compile_halves(
    stack: ExitStack,
    module: fx.GraphModule,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    variant: CompileVariant,
    export: Callable[..., private.JointWithDescriptors] = private.aot_export_joint_with_descriptors,
) -> Halves:
    """Return `module`, captured by Dynamo, as compiled by Inductor; called in its tracing context.

    Args:
        stack: kept open as long as the halves may be compiled again.
        export: the function that makes the joint graph.
    """
    passes = _Passes(create_compiler_config_extra(module))
    context = private.TracingContext.try_get()
    assert context is not None
    with (
        _enter_settings(),
        variant.choose(),
        V.set_fake_mode(context.fake_mode),
        private.disable_compiled_autograd(),
        separate_kernels(note_pairs),
    ):
        module = run_pre_grad_passes(module, args)  # type: ignore[arg-type]  # nests too
        joint = export(
            stack,
            module,
            args,
            kwargs,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
            ignore_shape_env=True,
        )
        try:
            call = private.aot_compile_joint_with_descriptors(
                joint, partition_fn=partition_fn, fw_compiler=passes.compile_forward, bw_compiler=passes.compile_backward
            )
        except InductorError as error:
            raise TraceError(f"Inductor does not compile the step: {first_line(error)}; plan with kernels='eager'") from error
    if passes.forward is None or passes.backward is None:
        raise NothingCompiledError
    return Halves(joint, passes.forward, passes.backward, call)


@dataclass(slots=True)
class _Passes:
    """The compilers of both passes, and what they have compiled."""

    extra: Any
    forward: Half | None = None
    backward: Half | None = None

    def compile_forward(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
        returned = sum(isinstance(desc, private.PlainAOTOutput) for desc in gm.graph.output_node().meta["desc"])
        ends = _find_ends(gm)
        compiled = compile_fx_forward(gm, example_inputs, returned, len(example_inputs), self.extra)
        self.forward = _build_half(ends, compiled)
        return compiled

    def compile_backward(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> object:
        ends = _find_ends(gm)
        compiled = compile_fx_backward(gm, example_inputs, self.extra)
        self.backward = _build_half(ends, compiled)
        return compiled


def _build_half(ends: _Ends, compiled: object) -> Half:
    if not isinstance(compiled, CompiledFxGraph):
        raise NothingCompiledError
    return Half(compiled.source_code, get_loaded_names(compiled), *ends, compiled.constants or {})


@contextmanager
def _enter_settings() -> Iterator[None]:
    with (
        compiler_config.patch(cache_key_tag=compiler_config.cache_key_tag + _GENERATED),  # type: ignore[attr-defined]
        private.inductor_config.patch(_PLAIN_CODE),
        private.functorch_config.patch(force_non_lazy_backward_lowering=True, unlift_effect_tokens=True),
    ):
        yield


def _find_ends(gm: fx.GraphModule) -> _Ends:
    """Return the inputs and outputs of a half, before Inductor's passes over it."""
    inputs = tuple((node.name, node.meta.get("desc")) for node in gm.graph.find_nodes(op="placeholder"))
    output = gm.graph.output_node()
    values = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
    named = tuple((v.name, d, v.meta.get("val")) if isinstance(v, fx.Node) else (None, d, None) for v, d in values)
    return inputs, named
