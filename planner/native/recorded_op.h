// A record of an op: everything that is needed to execute it again. Records were objects with Python's attributes: a list, a named tuple
// for each input, weak references and numbers, a quarter of the time that recording took.

#pragma once

#include "op_records.h"
#include "pooled.h"
#include "python_objects.h"
#include "tracked_storage.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Export.h>

#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch::jit { // of pybind_utils.h, which takes ten seconds to compile
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
} // namespace torch::jit

void set_settings(KernelSettings settings);

// A tensor that is an argument of an op, without what differs between ops of a signature.
struct InputPattern {
  at::DimVector sizes, strides;
  c10::ScalarType dtype;
  size_t place; // of the argument
  std::optional<size_t> item; // of its list
};

// The facts about the ops of one signature: `KnownOp` of planner.train.eager.sizes.
struct KnownOp {
  int64_t out_bytes = 0, number = 0, workspace_bytes = 0, measurements = 0;
  double seconds = std::numeric_limits<double>::infinity();
  bool guessed = false, needs_block = false;
};

// What the records of a signature share.
struct [[gnu::visibility("hidden")]] OpPattern {
  const pybind11::object operator_; // Python's `Operator`
  KernelSettings settings; // with which it ran
  c10::OperatorHandle handle; // to be called again: the operator, or one that computes the same outputs without side effects
  bool grad_enabled; // some kernels decide by it what they keep for their backward pass
  bool recordable = false;
  KnownOp known{};
  std::vector<c10::IValue> arguments{}; // without tensors
  std::vector<InputPattern> inputs{};
};

// A tensor that an op has read, without what all ops of its signature share.
struct [[gnu::visibility("hidden")]] Read {
  StoragePtr storage; // null if the op writes it in place
  int64_t version, offset;
  bool conjugated, negated;
};

// The generator that an op draws from, and a copy with its state before the op.
struct Draws {
  at::Generator generator, before;
};

at::Tensor get_state(const at::Generator& generator);
void set_state(at::Generator generator, const at::Tensor& state);

// One execution of an operator: what is not the pattern's.
struct [[gnu::visibility("hidden")]] RecordedOp final : c10::intrusive_ptr_target, Pooled<RecordedOp> {
  std::shared_ptr<OpPattern> pattern;
  pybind11::object module{};
  double seconds = 0;
  std::optional<Draws> draws{};
  std::shared_ptr<struct LedgerIds> ids{}; // of the ledger that it was entered into, with `ledger_id`; null before
  c10::SmallVector<Read, 3> reads{};
  c10::SmallVector<c10::Storage, 2> kept{};
  c10::SmallVector<std::pair<int64_t, WeakStoragePtr>, 1> made{}; // positions of outputs, and their storages
  std::shared_ptr<std::vector<RecordedOp*>> pending{}; // where it waits for the ledger, at `place`; null if it does not
  int64_t place = -1, ledger_id = -1, number = 0, room_bytes = 0; // `room_bytes`: of its outputs and its workspace
  bool recordable, in_place = false;

  explicit RecordedOp(std::shared_ptr<OpPattern> of) : pattern(std::move(of)), recordable(pattern->recordable) {}
  RecordedOp(const RecordedOp&) = default;
  ~RecordedOp() override;

  // Keeps an input that cannot be recomputed in memory; returns false if it is not there.
  bool keep(const TrackedStorage& input);
};

// Executes an op again, on tensors that have the storages of its inputs; the stack has its outputs.
torch::jit::Stack execute_again(const RecordedOp& op, c10::ArrayRef<at::Tensor> sources);
