// Records of the ops of the eager runtime: op_records.cpp describes them.

#pragma once

#include "pooled.h"

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

// Returns a detached alias of a tensor that shares its version counter.
inline at::Tensor make_alias(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
}

// Returns whether a value is a tensor whose memory counts. A Python number wrapped in a tensor counts as a number.
inline bool has_memory(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

inline int64_t version_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

// The facts about an operator, as `planner.train.eager.operators.Operator` has them: `_fill_facts` of native_recording fills them in.
struct OperatorFacts {
  enum Replay : int64_t { kNoReplay, kWithNone, kWithoutStatistics };
  enum SizedByData : int64_t { kNever, kSizedByMasks, kSizedByData }; // masks are in the list that is the second argument

  int64_t passes = 1; // neither memory nor contents change, or Python does not know it
  int64_t python = 0; // the `Operator`, which is never freed
  int64_t only_writes = 0; // it returns only tensors that it has written, and keeps their sizes
  int64_t rebinds = 0, resizes_out = 0;
  int64_t reads_to_host = 0, sized_by_data = kNever;
  int64_t may_guess = 0; // `OutputSizes.guess_bytes` may guess a workspace
  int64_t statistics = -1, training = -1;
  int64_t replay = 0; // after an update of statistics: itself with None for them, or its overload `no_stats` without them
  int64_t mutated = 0; // a bit for each argument
  int64_t draws = 0, random = 0, repeatable = 0;

  bool updates_statistics(c10::ArrayRef<c10::IValue> arguments) const {
    return statistics >= 0 && (training < 0 || arguments[static_cast<size_t>(training)].toBool());
  }

  // Returns whether it writes an argument, if it updates statistics or not.
  bool is_written(size_t i, bool updated_statistics) const {
    const auto position = static_cast<int64_t>(i);
    return statistics >= 0 ? updated_statistics && (position == statistics || position == statistics + 1)
                           : i < 64 && (mutated >> i & 1) != 0;
  }
};

// What the record of an op depends on, but for its tensors.
using Key = c10::SmallVector<int64_t, 64>;

// The settings that kernels read: default dtype, and a bit each for oneDNN, cuDNN, its benchmarks, its deterministic algorithms.
using KernelSettings = int64_t;
KernelSettings present_settings();

// A call of an operator.
struct CalledOp {
  const c10::OperatorHandle& handle;
  const OperatorFacts& facts;
  const Key& key;
  c10::ArrayRef<c10::IValue> arguments;
  c10::ArrayRef<at::Tensor> inputs; // those whose memory counts, in order, without running statistics that it updates
  c10::ArrayRef<at::Tensor> written;
  bool updates_statistics; // `written` are running statistics
  bool sized_by_data; // the sizes of its outputs depend on the contents of its arguments
  bool unusual; // it has arguments, not among `inputs`, that no record can have, or rebinds a tensor: there is no `key`
  c10::function_ref<std::exception_ptr()> execute; // without the interpreter lock; returns the error if it failed
  c10::function_ref<c10::ArrayRef<c10::IValue>()> outputs; // when it has run
};

// The bytes of each output of an op that will be new, if a rule knows: size_rules.cpp.
using ByteCounts = std::optional<c10::SmallVector<int64_t, 4>>;
ByteCounts count_output_bytes(const CalledOp& called);

struct SavedTensor;
struct TrackedStorage;

// The functions need Python's interpreter lock unless they say something else, and throw Python's errors.
class OpRecords {
 public:
  virtual ~OpRecords() = default;

  // Executes an op and records it. Called without the interpreter lock.
  virtual void record(const CalledOp& called) = 0;

  // Packs a tensor that autograd saves; a handle of it holds `self`, these records.
  virtual void pack(const at::Tensor& tensor, SavedTensor& saved, const std::shared_ptr<OpRecords>& self) = 0;

  // Returns the tensor of a handle, recomputed if it was evicted.
  virtual at::Tensor unpack(SavedTensor& saved) = 0;

  // Forgets a saved tensor that autograd drops.
  virtual void release(SavedTensor& saved) = 0;
};

// The handle that autograd holds in place of a saved tensor, so that its storage can be evicted.
struct SavedTensor final : torch::autograd::SavedVariableHooks, Pooled<SavedTensor> {
  explicit SavedTensor(std::shared_ptr<OpRecords> of);
  ~SavedTensor() override;

  void call_pack_hook(const at::Tensor& tensor) override;
  at::Tensor call_unpack_hook() override;

  std::shared_ptr<OpRecords> to_pack, records; // `records`: null if it is not packed but held
  at::Tensor held; // the tensor itself, if it is a leaf or a parameter that is not evicted, a subclass or not strided
  bool is_parameter = false;
  c10::intrusive_ptr<TrackedStorage> storage;
  int64_t version = 0; // autograd's version counter when it was saved
  at::Tensor alias; // keeps the storage in memory; on no memory while it is evicted
  SavedTensor *next = nullptr, *previous = nullptr; // of its storage
};

// The ledger of evictions; ledger.cpp describes it.
class EvictionLedger {
 public:
  virtual ~EvictionLedger() = default;
  virtual int64_t add_storage(int64_t size_bytes, std::optional<std::pair<int64_t, int64_t>> origin) = 0;
  virtual int64_t add_op(const std::vector<int64_t>& inputs, const std::vector<int64_t>& outputs, double seconds) = 0;
  virtual double estimate_s(double seconds, int64_t moved_bytes) const = 0; // `Heuristic.estimate_s`
  virtual void touch(const std::vector<int64_t>& ids, double now_s) = 0;
  virtual void note_recomputed(int64_t op) = 0;
  virtual void note_evicted(int64_t id) = 0;
  virtual void note_computed(int64_t id) = 0;
  virtual void pin(int64_t id) = 0;
  virtual void unpin(int64_t id) = 0;
  virtual void drop(int64_t id) = 0;
  virtual std::optional<int64_t> choose_victim(double now_s) = 0;
};

// Returns the ledger of ledger.cpp that an object is; null if it is another one.
EvictionLedger* find_ledger(PyObject* object);

// `parts`: the recorder, and what else the constructor in op_records.cpp names.
std::unique_ptr<OpRecords> new_op_records(PyObject* parts);
