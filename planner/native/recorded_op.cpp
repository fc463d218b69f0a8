// Records of ops: recorded_op.h describes them.

#include "recorded_op.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <mutex>

namespace {

namespace py = pybind11;
using namespace python_objects;

at::Tensor view_of(const at::Tensor& source, const InputPattern& input, const Read& read) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), c10::scalarTypeToTypeMeta(input.dtype));
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(input.sizes, input.strides, read.offset);
  impl->_set_conj(read.conjugated);
  impl->_set_neg(read.negated);
  return view;
}

} // namespace

RecordedOp::~RecordedOp() {
  if (pending) {
    (*pending)[static_cast<size_t>(place)] = nullptr;
  }
}

torch::jit::Stack execute_again(const RecordedOp& op, c10::ArrayRef<at::Tensor> sources) {
  const auto& pattern = *op.pattern;
  torch::jit::Stack stack(pattern.arguments);
  for (size_t i = 0; i < op.reads.size(); ++i) {
    const auto& input = pattern.inputs[i];
    auto tensor = view_of(sources[i], input, op.reads[i]);
    auto& argument = stack[input.place];
    if (!input.item.has_value()) {
      argument = std::move(tensor);
      continue;
    }
    if (argument.is(pattern.arguments[input.place])) {
      argument = argument.toList().copy();
    }
    argument.toList().set(*input.item, std::move(tensor));
  }
  const py::gil_scoped_release unlocked;
  const at::AutoGradMode mode(pattern.grad_enabled);
  pattern.handle.callBoxed(stack);
  return stack;
}

KernelSettings present_settings() {
  const auto& context = at::globalContext();
  return static_cast<int64_t>(c10::get_default_dtype_as_scalartype()) << 4 | context.userEnabledMkldnn() << 3 |
      context.userEnabledCuDNN() << 2 | context.benchmarkCuDNN() << 1 | context.deterministicCuDNN();
}

at::Tensor get_state(const at::Generator& generator) {
  const std::lock_guard<std::mutex> lock(generator.unsafeGetGeneratorImpl()->mutex_);
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

void set_settings(KernelSettings settings) {
  if (settings == present_settings()) {
    return;
  }
  auto& context = at::globalContext();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(settings >> 4)));
  context.setUserEnabledMkldnn((settings & 8) != 0);
  context.setUserEnabledCuDNN((settings & 4) != 0);
  context.setBenchmarkCuDNN((settings & 2) != 0);
  context.setDeterministicCuDNN((settings & 1) != 0);
}

bool RecordedOp::keep(const TrackedStorage& input) {
  auto held = input.watch == nullptr ? nullptr : input.watch->memory.lock();
  if (!held) {
    return false;
  }
  const auto is_same = [&](const c10::Storage& one) { return one.unsafeGetStorageImpl() == held.get(); };
  if (std::none_of(kept.begin(), kept.end(), is_same)) {
    kept.emplace_back(std::move(held));
  }
  return true;
}
