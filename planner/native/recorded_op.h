// A record of an op with the attributes of planner.train.eager.storages.RecordedOp, of which the lists are made when Python reads
// them. Records were copies of such objects: a list, a named tuple for each input, weak references and numbers, a quarter of the time
// that recording took.

#pragma once

#include "python_objects.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Export.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch::jit { // of pybind_utils.h, which takes ten seconds to compile
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
} // namespace torch::jit

// A tensor that is an argument of an op, without what differs between ops of a signature.
struct Argument {
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  size_t place; // of the argument
  std::optional<size_t> item; // of its list
};

// What the records of a signature share.
struct [[gnu::visibility("hidden")]] OpPattern {
  pybind11::object operator_, settings; // Python's `Operator`, and what `get_kernel_settings` returned
  c10::OperatorHandle handle; // to be called again: the operator, or one that computes the same outputs without side effects
  std::vector<c10::IValue> arguments; // without tensors
  std::vector<Argument> inputs;
  bool grad_enabled; // some kernels decide by it what they keep for their backward pass
};

// A tensor that an op has read, without what all ops of its signature share.
struct [[gnu::visibility("hidden")]] Read {
  pybind11::object storage; // None if the op writes it in place
  int64_t version, offset;
  bool conjugated, negated;
};

// What is not the pattern's. No `Read` is changed when Python may have seen it.
struct [[gnu::visibility("hidden")]] OpFields {
  std::shared_ptr<const OpPattern> pattern;
  pybind11::object known, draws, module, seconds, ledger_id;
  pybind11::object references; // the list of inputs, once Python has asked for it
  c10::SmallVector<Read, 3> reads;
  c10::SmallVector<c10::Storage, 2> kept;
  c10::SmallVector<std::pair<int64_t, pybind11::object>, 1> made; // positions of outputs, and weak references to their storages
  int64_t number, room_bytes;
  bool recordable, in_place;
};

// Returns a new record, with the fields of another one, or with those of a pattern that has no storages.
pybind11::object copy_recorded_op(const OpFields& fields);

OpFields& fields_of_op(pybind11::handle record);
