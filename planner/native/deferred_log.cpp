// A log of the ops of a thread, and of the backward passes that begin there, without calls into Python: the recorder of
// planner.rematerialize reads it only if memory runs out.
//
// While a log is entered, each op below autograd comes to `fallback`. An open log executes the op and notes it: the operator, its
// arguments and outputs with a number in place of each storage, and the time. It does not keep tensors alive, except for storages
// that an op has read and that no op of the log has made: recomputation would need them. The count of bytes in memory is an upper
// bound, which is made exact (`settle`) at a new peak and near the budget. A closed log passes each op to the recorder, which is a
// dispatch mode. An op that an open log cannot note goes there too. Then the recorder first reads and closes the log: each op of
// the log is dispatched to it as to a mode, but nothing runs, and its outputs are the original ones, or empty storages of the same
// size (stand-ins) if these were freed.
//
// Tensors that autograd saves meanwhile stay in memory, each in a `LoggedTensor`. The recorder replaces it by its own handle when
// it reads the log.
//
// The first ops of each signature are measured. On the CPU the log does so, by the allocator's reports of what an op takes while it
// runs. On a CUDA device the recorder executes these ops, and measures their times and workspaces. If an operator
// was measured often, and its outputs are far below the budget, what it takes in other sizes is estimated from these measurements.
// Autograd may run a thread for the device beside the one for the CPU, with the same log.

#include "op_records.h"

#include <structmember.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/accumulate.h>
#include <c10/util/bit_cast.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using c10::StorageImpl;
using torch::jit::Stack;

// Below autograd, autocast and all Python modes; PyTorch uses this key for modes that are written in C++.
constexpr auto kKey = c10::DispatchKey::Fake;
const auto kKind = c10::DebugInfoKind::TEST_INFO_2; // autograd's threads inherit this slot; PyTorch itself does not use it

constexpr size_t kFewOps = 64; // kept when a step begins: autograd saves no tensor of some ops, such as sums
constexpr size_t kMostOps = 1 << 15; // a longer log would take too much memory itself
constexpr int64_t kMostWrites = 900; // less than the recorder's longest chain
constexpr size_t kMostSignatures = 1 << 15;
constexpr int64_t kBlockBytes = 512; // of CUDA's allocator
constexpr int64_t kFewMeasurements = 2; // the first executions of an operator load kernels
constexpr int64_t kMeasurementsHere = 2; // of each signature, on the CPU
constexpr int64_t kEnoughMeasurements = 8; // of an operator, to estimate what it takes in other sizes

// The most bytes that the CPU allocator hands out in a thread while this is the thread's profiler.
class AllocatedBytes final : public torch::profiler::impl::ProfilerStateBase {
 public:
  AllocatedBytes() : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}

  void reportMemoryUsage(void*, int64_t size_bytes, size_t, size_t, c10::Device device) override {
    if (device.is_cpu()) {
      live_bytes_ += size_bytes;
      peak_bytes = std::max(peak_bytes, live_bytes_);
    }
  }

  bool memoryProfilingEnabled() const override {
    return true;
  }

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  int64_t peak_bytes = 0;

 private:
  int64_t live_bytes_ = 0;
};

// How an operator is executed.
enum Way : int64_t {
  kView, // neither memory nor contents change
  kHere, // by the log
  kByRecorder, // by the recorder, which leaves the log open
  kClosed, // by the recorder, which closes the log
};

// What bounds the bytes of an operator's outputs, far below the budget; planner.train.eager.size_rules has the same values.
enum Bound : int64_t {
  kNone,
  kNothingNew,
  kBroadcast, // each output has at most the elements of all tensors, broadcast
  kProduct, // of the last two tensors
  kSize, // the first list of integers
  kIndexed, // the first tensor, at the positions in the list that is the second argument
  kSelected, // rows of the first tensor, by the positions in the last
  kConcatenated, // all tensors
  kPositions, // a position for each element of the first tensor
};
constexpr int64_t kWidest = 16; // bytes of an element of the widest type
constexpr int64_t kMostOutputs = 16; // of an operator that has a bound

// What an operator has taken in all measured executions, from which it is estimated for other sizes.
struct Measured {
  int64_t executions = 0;
  double seconds = 0, bytes = 0; // sums, without the first executions; bytes are those of inputs and outputs
  double most_room_bytes = 0, most_room_of_bytes = 1; // the most taken besides outputs, and inputs and outputs of that execution

  void add(double of_bytes, double room_bytes, double taken_seconds) {
    if (++executions > kFewMeasurements) {
      seconds += taken_seconds;
      bytes += of_bytes;
    }
    if (room_bytes > most_room_bytes) {
      most_room_bytes = room_bytes;
      most_room_of_bytes = std::max(of_bytes, 1.0);
    }
  }

  bool is_enough() const {
    return executions >= kEnoughMeasurements;
  }

  double seconds_of(double of_bytes) const {
    return seconds / std::max(bytes, 1.0) * of_bytes;
  }

  double room_bytes_of(double of_bytes) const {
    return most_room_bytes * std::max(of_bytes / most_room_of_bytes, 1.0);
  }
};

// The facts about an operator, as `planner.train.eager.operators.Operator` has them.
struct Operator {
  int64_t way = kClosed;
  int64_t repeatable = 0, returns_nothing_new = 0, reads_to_host = 0, sized_by_data = 0;
  int64_t statistics = -1, training = -1;
  int64_t mutated = 0; // a bit for each argument
  int64_t needs_block = 0; // its library uses another algorithm if it gets no workspace
  int64_t bound = kNone;
  int64_t pointwise = 0; // sizes do not depend on numbers
  Measured measured{}; // by the log

  bool updates_statistics(c10::ArrayRef<IValue> arguments) const {
    return statistics >= 0 && (training < 0 || arguments[static_cast<size_t>(training)].toBool());
  }

  // Returns whether it writes an argument, if it updates statistics or not.
  bool is_written(size_t i, bool updated_statistics) const {
    const auto position = static_cast<int64_t>(i);
    return statistics >= 0 ? updated_statistics && (position == statistics || position == statistics + 1)
                           : i < 64 && (mutated >> i & 1) != 0;
  }
};

// The facts about ops of one signature.
struct Known {
  int64_t made_bytes = 0; // of the outputs
  int64_t room_bytes = 0; // the most that an execution has taken in addition, if it was measured
  double seconds = -1; // the shortest measured time; -1 if each execution is timed here
  int64_t measurements = 0;
};

struct Storage {
  c10::weak_intrusive_ptr<StorageImpl> weak;
  c10::Device device;
  int64_t size_bytes;
  bool made; // by an op of the log that can be executed again
  bool read = false; // in its current version
  int64_t writes = 0;
  c10::intrusive_ptr<StorageImpl> kept{};
};

// A tensor as an argument or a result: a view of a storage.
struct Reference {
  int64_t position, element; // position of the argument or result, and of the element in its list; -1 if it is not in a list
  int64_t storage;
  int64_t offset;
  size_t geometry, dim; // where its sizes begin, followed by its strides; number of dimensions
  c10::ScalarType dtype;
  bool conjugated, negative;
};

// An op that is executed.
struct Draft {
  c10::SmallVector<IValue, 12> arguments; // the log does not keep the tensors among them
  c10::SmallVector<Reference, 12> references; // inputs, then outputs
  size_t inputs = 0;
  c10::SmallVector<int64_t, 96> geometry;
  c10::SmallVector<int64_t, 4> written; // numbers of storages
};

struct Op {
  c10::OperatorHandle handle;
  size_t arguments, inputs, outputs, end; // where each begins, and where the outputs end
  int64_t module;
  int64_t taken_bytes; // as measured: outputs and what it takes in addition; 0 if it was not measured
  double seconds;
  bool grad_enabled, counted, kept, reads_to_host;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 14695981039346656037ULL;
    for (auto value : key) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211ULL;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// State that the recorder reads and sets without a call.
struct LogState {
  int64_t open = 0; // ops are logged here
  int64_t openings = 0; // how often it was opened
  int64_t must_close = 0; // the recorder must read the log before the next op
  int64_t in_step = 0; // autograd has saved a tensor
  int64_t saved = 0; // number of tensors that autograd has saved here
  int64_t module = 0; // the number of the module that is running
  int64_t position = 0; // number of ops that were logged so far, in all steps
  int64_t peak_bytes = 0;
  int64_t ops = 0, kept_ops = 0, host_reads = 0;
  double seconds = 0;
};

// What the log and the recorder tell each other about an op, in the thread of the op.
struct OpExchange {
  int64_t noted = 0; // the opening of the log that has noted the arguments, and logs the op when it was executed; 0 if none
  int64_t stays_open = 0; // the recorder has executed the op, and the log does not close before it is logged
  int64_t known_bytes = -1; // of the outputs; -1 if unknown, or if the op is to be measured
  int64_t room_bytes = -1; // that it takes in addition, as measured before; -1 if unknown
  int64_t taken_bytes = -1; // that it has taken, as measured now; -1 if it was not measured
  int64_t unserved = 0; // the op has succeeded although the allocator had no memory for a workspace
  int64_t failed = 0; // the op has raised an error, which `raise_error` raises again
  int64_t is_new = 0; // the record of the op may be learned
  double seconds = -1; // as measured now
};
thread_local OpExchange call;
thread_local std::exception_ptr error_of_op;
thread_local Key key_of_new_op; // while `is_new`

// The number of requests of this thread that the allocator had no memory for, by index of the device.
thread_local std::unordered_map<int64_t, int64_t> failures;

// Returns whether a value is a tensor whose memory counts. A Python number wrapped in a tensor counts as a number.
bool has_memory(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

template <typename Visit>
void each_tensor(const IValue& value, Visit visit) { // with its position in a list, or -1
  if (has_memory(value)) {
    visit(value.toTensor(), -1);
  } else if (value.isList()) {
    int64_t element = 0;
    for (const IValue& item : value.toListRef()) {
      if (!item.isTensor() && !item.isNone()) {
        return;
      }
      if (has_memory(item)) {
        visit(item.toTensor(), element);
      }
      ++element;
    }
  }
}

bool is_plain(const at::Tensor& tensor) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  return tensor.layout() == at::kStrided && impl.has_storage() && !impl.has_symbolic_sizes_strides() && !tensor.is_nested() &&
      !tensor.is_quantized() && !impl.key_set().has(c10::DispatchKey::Python);
}

// Returns the tensors that hold the data of a sparse tensor.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor) {
  switch (tensor.layout()) {
    case at::kSparse:
      return {tensor._indices(), tensor._values()};
    case at::kSparseCsr:
    case at::kSparseBsr:
      return {tensor.crow_indices(), tensor.col_indices(), tensor.values()};
    case at::kSparseCsc:
    case at::kSparseBsc:
      return {tensor.ccol_indices(), tensor.row_indices(), tensor.values()};
    default:
      return {};
  }
}

// Adds what the sizes of the outputs depend on, as the recorder does; returns false for an unsupported type of value.
bool add_to_key(Key& key, const IValue& value, bool pointwise) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    key.push_back(tensor.defined() ? 1 : 2);
    if (tensor.defined()) {
      key.push_back(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      key.push_back(static_cast<int64_t>(tensor.scalar_type()));
      key.push_back(static_cast<int64_t>(tensor.device().type()));
      key.push_back(tensor.device().index());
      key.push_back(tensor.dim());
      key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
      key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
    }
  } else if (value.isNone() || value.isComplexDouble() || value.isGenerator()) {
    key.push_back(value.isNone() ? 3 : 4);
  } else if (value.isDouble()) {
    key.push_back(11);
    key.push_back(pointwise ? 0 : c10::bit_cast<int64_t>(value.toDouble()));
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? 5 : 6);
  } else if (value.isInt()) {
    key.push_back(7);
    key.push_back(value.toInt());
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    key.push_back(8);
    key.push_back(static_cast<int64_t>(text.size()));
    key.insert(key.end(), text.begin(), text.end());
  } else if (value.isDevice()) {
    key.push_back(9);
    key.push_back(static_cast<int64_t>(value.toDevice().type()));
    key.push_back(value.toDevice().index());
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.push_back(10);
    key.push_back(static_cast<int64_t>(items.size()));
    for (const IValue& item : items) {
      if (item.isList() || !add_to_key(key, item, pointwise)) {
        return false;
      }
    }
  } else {
    return false;
  }
  return true;
}

// Adds the value of a Python number that is wrapped in a tensor; returns false for a complex one.
bool add_wrapped_number(Key& key, const IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || has_memory(value)) {
    return true;
  }
  const auto& wrapped = value.toTensor();
  switch (wrapped.scalar_type()) {
    case at::kDouble:
      key.push_back(c10::bit_cast<int64_t>(*static_cast<const double*>(wrapped.const_data_ptr())));
      return true;
    case at::kLong:
      key.push_back(*static_cast<const int64_t*>(wrapped.const_data_ptr()));
      return true;
    case at::kBool:
      key.push_back(*static_cast<const bool*>(wrapped.const_data_ptr()));
      return true;
    default:
      return false;
  }
}

// The settings that kernels read, as `planner.torch_private.core.get_kernel_settings` has them.
using Settings = std::array<int64_t, 5>;

Settings present_settings() {
  const auto& context = at::globalContext();
  return {static_cast<int64_t>(c10::get_default_dtype_as_scalartype()), context.userEnabledMkldnn(), context.userEnabledCuDNN(),
          context.benchmarkCuDNN(), context.deterministicCuDNN()};
}

// The shape of several tensors, broadcast, or a larger one.
class BroadcastShape {
 public:
  void add(c10::IntArrayRef sizes) {
    from_last_.resize(std::max(from_last_.size(), sizes.size()), 1); // a sum along an empty dimension is not empty
    for (size_t i = 0; i < sizes.size(); ++i) {
      auto& largest = from_last_[sizes.size() - 1 - i];
      largest = std::max(largest, sizes[i]);
    }
  }

  int64_t elements() const {
    return c10::multiply_integers(from_last_);
  }

 private:
  c10::SmallVector<int64_t, 6> from_last_;
};

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// Returns the most elements of a tensor at positions: each is a tensor of integers, a mask, or none for all of a dimension.
int64_t indexed_elements(const at::Tensor& tensor, const IValue& positions) {
  BroadcastShape chosen;
  int64_t others = 1, dim = 0;
  for (const IValue& value : positions.toListRef()) {
    if (!has_memory(value)) {
      others *= dim < tensor.dim() ? tensor.size(dim++) : 1;
    } else if (const auto& index = value.toTensor(); is_mask(index)) {
      chosen.add({index.numel()});
      dim += index.dim();
    } else {
      chosen.add(index.sizes());
      ++dim;
    }
  }
  for (; dim < tensor.dim(); ++dim) {
    others *= tensor.size(dim);
  }
  return others * chosen.elements();
}

// Stops PyTorch from calling `fallback` for an operator, in the whole process.
void leave_alone(const c10::OperatorName& name) {
  static auto& mutex = *new std::mutex;
  static auto& left = *new std::unordered_map<c10::OperatorName, torch::Library>; // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  if (left.count(name) != 0) {
    return;
  }
  const auto space = std::string(name.getNamespace().value_or(""));
  const auto full = name.name.substr(space.size() + 2) + (name.overload_name.empty() ? "" : "." + name.overload_name);
  auto& library = left.emplace(name, torch::Library(torch::Library::IMPL, space, kKey, __FILE__, __LINE__)).first->second;
  library.impl(full.c_str(), torch::CppFunction::makeFallthrough());
}

struct LoggedTensor;

class Log : public c10::DebugInfoBase {
 public:
  // `measurements`: the number of executions of each signature that the recorder measures.
  Log(int64_t budget_bytes, c10::Device device, int64_t measurements, void (*describe)(const char*, const char*, int64_t*))
      : budget_bytes_(budget_bytes), device_(device), measurements_(measurements), describe_(describe) {}

  LogState shared;
  std::shared_ptr<OpRecords> records; // while the log is entered; guarded by Python's global interpreter lock
  std::list<LoggedTensor*> saved; // in order; guarded by Python's global interpreter lock
  std::recursive_mutex mutex;
  bool left = false;

  Operator& facts_of(const c10::OperatorHandle& handle) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    auto& facts = operators_[handle];
    if (!facts) {
      facts = std::make_unique<Operator>();
      const auto& name = handle.operator_name();
      describe_(name.name.c_str(), name.overload_name.c_str(), &facts->way);
      if (facts->way == kView) {
        leave_alone(name);
      }
    }
    return *facts;
  }

  // Lets the recorder execute an op.
  void by_recorder(const c10::OperatorHandle& handle, Stack* stack) {
    c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(recorder_);
    const auto at_the_end = c10::make_scope_exit([] { c10::impl::TorchDispatchModeTLS::pop_stack(); });
    recorder_->pyinterpreter()->dispatch(handle, stack);
  }

  // Executes an op while the log is closed, and records it if it is known how; returns false if the recorder has to do so.
  bool record(const c10::OperatorHandle& handle, const Operator& facts, c10::DispatchKeySet below, Stack* stack) {
    const bool is_executed = facts.way == kHere || facts.way == kByRecorder;
    if (records == nullptr || !is_executed || facts.repeatable == 0 || facts.reads_to_host != 0) {
      return false;
    }
    const auto begin = stack->size() - handle.schema().arguments().size();
    const c10::SmallVector<IValue, 12> arguments(stack->begin() + static_cast<int64_t>(begin), stack->end());
    if (is_sized_by_data(arguments, facts)) {
      return false;
    }
    c10::SmallVector<at::Tensor, 4> inputs, written;
    bool plain = true;
    const auto settings = present_settings();
    Key key;
    key.reserve(128);
    key.assign(settings.begin(), settings.end());
    key.push_back(reinterpret_cast<int64_t>(&facts));
    key.push_back(at::GradMode::is_enabled());
    const bool updates_statistics = facts.updates_statistics(arguments);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool is_written = facts.is_written(i, updates_statistics);
      each_tensor(arguments[i], [&](const at::Tensor& tensor, int64_t) {
        plain = plain && is_plain(tensor);
        if (is_written) {
          written.push_back(tensor);
        }
        if (!is_written || !updates_statistics) {
          inputs.push_back(tensor);
        }
      });
      plain = plain && add_to_key(key, arguments[i], false) && !arguments[i].isComplexDouble() && !arguments[i].isGenerator() &&
          add_wrapped_number(key, arguments[i]);
    }
    if (!plain) {
      return false;
    }
    const auto run = [&] {
      const bool succeeded = try_execute([&] { handle.redispatchBoxed(below, stack); });
      if (!succeeded) {
        stack->resize(begin);
        stack->insert(stack->end(), arguments.begin(), arguments.end());
      }
      return succeeded;
    };
    const auto outputs = [&] { return c10::ArrayRef<IValue>(*stack).slice(begin); };
    const auto recorded = records->record({key, inputs, written, updates_statistics, shared.module, run, outputs, [this](const StorageImpl& storage) { return bytes_of(storage); }});
    if (recorded == Recorded::kFailed) {
      std::rethrow_exception(std::exchange(error_of_op, nullptr));
    }
    if (recorded == Recorded::kNotKnown) {
      call.is_new = 1;
      key_of_new_op = std::move(key);
    }
    return recorded == Recorded::kDone;
  }

  // Executes an op and logs it, or lets the recorder do so.
  void execute(const c10::OperatorHandle& handle, Operator& facts, c10::DispatchKeySet below, Stack* stack) {
    call = OpExchange();
    std::shared_lock<std::shared_mutex> until_logged(unlogged_);
    if (!shared.open) { // another thread has closed it meanwhile
      until_logged.unlock();
      return by_recorder(handle, stack);
    }
    Draft draft;
    const auto begin = stack->size() - handle.schema().arguments().size();
    draft.arguments.append(stack->begin() + static_cast<int64_t>(begin), stack->end());
    std::optional<Key> new_key;
    std::shared_ptr<Known> known;
    ++drafts_;
    const auto at_the_end = c10::make_scope_exit([this] { --drafts_; });
    bool fits = prepare(draft, handle, facts, new_key, known);
    const auto start = std::chrono::steady_clock::now();
    if (fits && facts.way == kHere && call.known_bytes >= 0) {
      fits = execute_here(handle, facts, below, known.get(), stack);
      if (!fits) {
        stack->resize(begin);
        stack->insert(stack->end(), draft.arguments.begin(), draft.arguments.end());
      }
    } else if (fits) {
      call.noted = shared.openings;
      until_logged.unlock();
      try {
        by_recorder(handle, stack);
      } catch (...) {
        if (call.stays_open) { // an interrupt came between the op and here
          unlogged_.unlock_shared();
        }
        throw;
      }
      if (!call.stays_open) {
        return;
      }
      until_logged = std::shared_lock<std::shared_mutex>(unlogged_, std::adopt_lock);
    }
    if (!fits) {
      until_logged.unlock();
      shared.must_close = 1;
      return by_recorder(handle, stack);
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    // What a signature takes is known where it has run by a bound, but where ops are measured, only from a measurement.
    const bool is_known = measurements_ == 0 ? call.known_bytes >= 0 : call.taken_bytes >= 0;
    if (known == nullptr && new_key && is_known) {
      if (sizes_.size() >= kMostSignatures) {
        sizes_.clear();
      }
      known = sizes_.emplace(std::move(*new_key), std::make_shared<Known>()).first->second;
    }
    finish(draft, handle, facts, *stack, elapsed.count(), known.get());
  }

  // Returns whether the allocator has a free block.
  bool has_block(int64_t size_bytes) const {
    const c10::DeviceGuard guard(device_);
    try {
      c10::GetAllocator(device_.type())->allocate(static_cast<size_t>(size_bytes));
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }

  // Executes an op; returns false if it failed, or got no memory for a workspace: the recorder evicts, or raises the error.
  bool execute_here(const c10::OperatorHandle& handle, const Operator& facts, c10::DispatchKeySet below, const Known* known, Stack* stack) {
    if (facts.needs_block && !has_block(known->made_bytes + known->room_bytes)) {
      return false;
    }
    const auto failed = failures[device_.index()];
    const auto kProfiler = c10::DebugInfoKind::PROFILER_STATE;
    const bool is_new = measurements_ == 0 && (known == nullptr || known->measurements < kMeasurementsHere);
    const bool succeeded = try_execute([&] {
      if (is_new && c10::ThreadLocalDebugInfo::get(kProfiler) == nullptr) { // else the thread is profiled
        const auto allocated = std::make_shared<AllocatedBytes>();
        const c10::DebugInfoGuard guard(kProfiler, allocated);
        handle.redispatchBoxed(below, stack);
        call.taken_bytes = allocated->peak_bytes;
      } else {
        handle.redispatchBoxed(below, stack);
      }
    });
    call.unserved = failures[device_.index()] != failed;
    return succeeded && !call.unserved;
  }

  // Returns false if a call raises an error, which is kept for the recorder.
  template <typename Call>
  static bool try_execute(Call execute) {
    try {
      execute();
    } catch (...) {
      error_of_op = std::current_exception();
      call.failed = 1;
      return false;
    }
    return true;
  }

  // Notes an op that is about to run, and finds what is known of its signature; false if the recorder has to read the log first.
  bool prepare(Draft& draft, const c10::OperatorHandle& handle, const Operator& facts, std::optional<Key>& new_key, std::shared_ptr<Known>& known) {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!shared.in_step) {
      forget_last_step(1);
    }
    if (shared.must_close || facts.way == kClosed || ops_.size() == kMostOps || settings_ != present_settings() || !note(draft, facts)) {
      return false;
    }
    if (!is_sized_by_data(draft.arguments, facts) && find_key(draft, facts)) {
      const auto found = sizes_.find(key_);
      if (found == sizes_.end()) {
        new_key = key_;
      } else {
        known = found->second;
      }
    }
    if (is_measured(known.get())) {
      call.known_bytes = known->made_bytes;
      call.room_bytes = known->room_bytes;
      return fits(known->made_bytes + known->room_bytes);
    }
    if (known != nullptr) {
      call.room_bytes = known->room_bytes;
    }
    if (measurements_ == 0 || (facts.measured.is_enough() && !facts.needs_block)) {
      const auto most_bytes = bound_bytes(handle, draft, facts);
      const auto room_bytes = estimated_room_bytes(draft, facts, most_bytes);
      if (most_bytes >= 0 && would_fit(most_bytes + room_bytes)) {
        call.known_bytes = 0; // the outputs are counted when the op has run
      }
    }
    return true;
  }

  // Sets the key of an op; returns false if it has none.
  bool find_key(const Draft& draft, const Operator& facts) {
    key_.assign(settings_.begin(), settings_.end());
    key_.push_back(reinterpret_cast<int64_t>(&facts));
    key_.push_back(at::GradMode::is_enabled());
    for (const auto& value : draft.arguments) {
      if (!add_to_key(key_, value, facts.pointwise != 0)) {
        return false;
      }
    }
    for (auto number : draft.written) { // tensors for results are resized
      key_.push_back(storages_[static_cast<size_t>(number)].size_bytes);
    }
    return true;
  }

  // Keeps the log open until the op that the recorder has executed in this thread is logged.
  void stay_open() {
    unlogged_.lock_shared();
    call.stays_open = 1;
  }

  // Returns whether `size_bytes` more fit the budget.
  bool would_fit(int64_t size_bytes) {
    if (live_bytes_ + size_bytes > budget_bytes_) {
      settle();
    }
    return live_bytes_ + size_bytes <= budget_bytes_;
  }

  // Returns the same; if they fit, they are included in the peak.
  bool fits(int64_t size_bytes) {
    if (!would_fit(size_bytes)) {
      return false;
    }
    include(size_bytes);
    return true;
  }

  // Includes `size_bytes` more in the peak.
  void include(int64_t size_bytes) {
    if (live_bytes_ + size_bytes > shared.peak_bytes) {
      settle();
      shared.peak_bytes = std::max(shared.peak_bytes, live_bytes_ + size_bytes);
    }
  }

  // `other_bytes`: in memory in addition to the storages.
  void open(int64_t count, StorageImpl* const* storages, int64_t other_bytes, int64_t peak_bytes) {
    live_bytes_ = other_bytes;
    for (int64_t i = 0; i < count; ++i) {
      add(storages[i], false);
    }
    settings_ = present_settings();
    shared.peak_bytes = peak_bytes;
    shared.in_step = shared.must_close = 0;
    ++shared.openings;
    shared.open = 1;
  }

  void begin_step() {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    forget_last_step(0);
    shared.in_step = 1;
  }

  // Functions with which the recorder reads the log.

  int64_t length() const {
    return static_cast<int64_t>(ops_.size());
  }

  // Closes the log, and returns tensors on the resident storages that no op of the log has made.
  std::vector<at::Tensor> close() {
    const std::lock_guard<std::shared_mutex> when_all_are_logged(unlogged_);
    shared.open = 0;
    settle();
    std::vector<at::Tensor> found;
    for (auto number : alive_) {
      const auto& storage = storages_[static_cast<size_t>(number)];
      if (auto held = storage.made ? nullptr : storage.weak.lock()) {
        found.push_back(empty_tensor(std::move(held), at::kByte));
      }
    }
    for (const auto& op : ops_) { // the recorder counts them when it reads them
      shared.ops -= op.counted;
      shared.kept_ops -= op.kept;
      shared.host_reads -= op.reads_to_host;
      shared.seconds -= op.seconds;
    }
    stand_ins_.assign(storages_.size(), {});
    last_uses_.assign(storages_.size(), -1);
    for (int64_t i = 0; i < length(); ++i) {
      for (const auto& reference : references(op(i).inputs, op(i).end)) {
        last_uses_[static_cast<size_t>(reference.storage)] = i;
      }
    }
    return found;
  }

  // Returns the module of an op, its outputs, with None for those that are not tensors, and what it has taken: bytes and seconds.
  std::tuple<int64_t, c10::List<std::optional<at::Tensor>>, int64_t, double> unread(int64_t index) {
    const auto& logged = op(index);
    const auto shown = references(logged.outputs, logged.end);
    size_t length = logged.handle.schema().returns().size();
    for (const auto& reference : shown) {
      length = std::max(length, static_cast<size_t>(reference.element + 1));
    }
    c10::List<std::optional<at::Tensor>> found;
    found.resize(length);
    for (const auto& reference : shown) {
      found.set(static_cast<size_t>(reference.element < 0 ? reference.position : reference.element), tensor(reference));
    }
    return {logged.module, std::move(found), logged.taken_bytes, logged.seconds};
  }

  // Passes an op of the log to the recorder. Then frees the stand-ins that it was the last to use.
  void show(int64_t index) {
    const auto& shown = op(index);
    const auto first = arguments_.begin() + static_cast<int64_t>(shown.arguments);
    Stack stack(first, first + static_cast<int64_t>(shown.handle.schema().arguments().size()));
    for (auto& value : stack) {
      if (value.isList() && holds_tensors(value)) {
        value = empty_list(value);
      }
    }
    for (const auto& reference : references(shown.inputs, shown.outputs)) {
      auto& value = stack[static_cast<size_t>(reference.position)];
      if (reference.element < 0) {
        value = tensor(reference);
      } else {
        value.toList().set(static_cast<size_t>(reference.element), IValue(tensor(reference)));
      }
    }
    const at::AutoGradMode as_then(shown.grad_enabled);
    by_recorder(shown.handle, &stack);
    for (const auto& reference : references(shown.inputs, shown.end)) {
      if (last_uses_[static_cast<size_t>(reference.storage)] == index) {
        stand_ins_[static_cast<size_t>(reference.storage)].reset();
      }
    }
  }

  // Removes the recorder from the stack of modes.
  void enter() {
    recorder_ = c10::impl::TorchDispatchModeTLS::pop_stack();
  }

  void leave() {
    left = true;
    shared.open = 0;
    forget();
    c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(recorder_));
  }

  void forget() {
    forget_ops();
    storages_.clear();
    numbers_.clear();
    alive_.clear();
    stand_ins_.clear();
    last_uses_.clear();
    live_bytes_ = 0;
  }

 private:
  // Drops the ops of ended steps, so that their storages can no longer be recomputed, unless they are few, because it takes time,
  // or another thread executes an op. `own`: the number of ops that this thread executes.
  void forget_last_step(int64_t own) {
    if (ops_.size() <= kFewOps || drafts_ > own) {
      return;
    }
    forget_ops();
    settle();
    std::vector<Storage> storages;
    std::vector<int64_t> alive;
    for (auto number : alive_) {
      auto& storage = storages_[static_cast<size_t>(number)];
      numbers_[storage.weak._unsafe_get_target()] = static_cast<int64_t>(storages.size());
      alive.push_back(static_cast<int64_t>(storages.size()));
      storages.push_back({std::move(storage.weak), storage.device, storage.size_bytes, false});
    }
    storages_ = std::move(storages);
    alive_ = std::move(alive);
  }

  const Op& op(int64_t index) const {
    return ops_[static_cast<size_t>(index)];
  }

  c10::ArrayRef<Reference> references(size_t begin, size_t end) const {
    return c10::ArrayRef<Reference>(references_).slice(begin, end - begin);
  }

  void forget_ops() {
    ops_.clear();
    arguments_.clear();
    references_.clear();
    geometry_.clear();
  }

  bool is_measured(const Known* known) const {
    return known != nullptr && known->measurements >= measurements_;
  }

  // Returns whether the sizes of the outputs depend on the contents of the arguments.
  static bool is_sized_by_data(c10::ArrayRef<IValue> arguments, const Operator& facts) {
    if (facts.sized_by_data == 0 || facts.bound != kIndexed) {
      return facts.sized_by_data != 0;
    }
    bool found = false;
    each_tensor(arguments[1], [&](const at::Tensor& index, int64_t) { found = found || is_mask(index); });
    return found;
  }

  // Returns what an op takes in addition to its outputs, by what other sizes have taken; on a CUDA device with a copy of each input
  // that is not contiguous, because contiguous ones need none, and with what the allocator adds to each output.
  int64_t estimated_room_bytes(const Draft& draft, const Operator& facts, int64_t most_bytes) const {
    const auto room_bytes = facts.measured.room_bytes_of(static_cast<double>(most_bytes) + bytes_in(draft));
    if (measurements_ == 0) {
      return static_cast<int64_t>(room_bytes);
    }
    double copied_bytes = 0;
    for (const auto& value : draft.arguments) {
      each_tensor(value, [&](const at::Tensor& tensor, int64_t) {
        copied_bytes += tensor.is_contiguous() ? 0 : static_cast<double>(tensor.nbytes() + kBlockBytes);
      });
    }
    return static_cast<int64_t>(room_bytes + copied_bytes) + kBlockBytes * kMostOutputs;
  }

  // Returns an upper bound of the bytes of the outputs; -1 if there is none.
  static int64_t bound_bytes(const c10::OperatorHandle& handle, const Draft& draft, const Operator& facts) {
    const auto& arguments = draft.arguments;
    c10::SmallVector<c10::IntArrayRef, 8> shapes;
    for (const auto& value : arguments) {
      each_tensor(value, [&](const at::Tensor& tensor, int64_t) { shapes.push_back(tensor.sizes()); });
    }
    int64_t elements = 0;
    switch (facts.bound) {
      case kNothingNew:
        return 0;
      case kBroadcast: {
        BroadcastShape all;
        for (const auto& shape : shapes) {
          all.add(shape);
        }
        elements = all.elements() * static_cast<int64_t>(handle.schema().returns().size());
        break;
      }
      case kProduct: {
        if (shapes.size() < 2 || shapes.back().empty() || shapes[shapes.size() - 2].empty()) {
          return -1;
        }
        const auto& left = shapes[shapes.size() - 2];
        elements = c10::multiply_integers(left.slice(0, left.size() - 1)) * shapes.back().back();
        break;
      }
      case kSize: {
        const auto size = std::find_if(arguments.begin(), arguments.end(), [](const IValue& value) { return value.isIntList(); });
        if (size == arguments.end()) {
          return -1;
        }
        elements = c10::multiply_integers(size->toIntVector());
        break;
      }
      case kIndexed:
        elements = indexed_elements(arguments[0].toTensor(), arguments[1]);
        break;
      case kSelected: {
        const auto dim = static_cast<int64_t>(shapes.front().size());
        const auto along = arguments[1].isInt() ? arguments[1].toInt() : 0;
        elements = c10::multiply_integers(shapes.back());
        for (int64_t i = 0; i < dim; ++i) {
          elements *= i == along || i == along + dim ? 1 : shapes.front()[static_cast<size_t>(i)];
        }
        break;
      }
      case kConcatenated:
        for (const auto& shape : shapes) {
          elements += c10::multiply_integers(shape);
        }
        break;
      case kPositions:
        elements = c10::multiply_integers(shapes.front()) * static_cast<int64_t>(shapes.front().size());
        break;
      default:
        return -1;
    }
    return elements < 0 ? -1 : kWidest * elements;
  }

  // Returns the bytes of the tensors that an op reads and, if it was executed, of those that it returns.
  static double bytes_in(const Draft& draft) {
    double found = 0;
    for (const auto& tensor : draft.references) {
      const auto sizes = c10::ArrayRef<int64_t>(draft.geometry).slice(tensor.geometry, tensor.dim);
      found += static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(c10::elementSize(tensor.dtype));
    }
    return found;
  }

  // Returns the bytes that the budget counts of a storage.
  int64_t bytes_of(const StorageImpl& storage) const {
    const auto size_bytes = static_cast<int64_t>(storage.nbytes());
    if (device_.is_cpu()) {
      return storage.device_type() == at::kCPU ? size_bytes : 0;
    }
    return storage.device() == device_ ? (size_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes : 0;
  }

  int64_t add(StorageImpl* address, bool made) {
    const auto held = c10::intrusive_ptr<StorageImpl>::reclaim_copy(address);
    const auto number = static_cast<int64_t>(storages_.size());
    const auto size_bytes = bytes_of(*held);
    storages_.push_back({c10::weak_intrusive_ptr<StorageImpl>(held), held->device(), size_bytes, made});
    numbers_[address] = number;
    alive_.push_back(number);
    live_bytes_ += size_bytes;
    return number;
  }

  int64_t number_of(const at::Tensor& tensor) {
    auto* address = tensor.storage().unsafeGetStorageImpl();
    const auto found = numbers_.find(address);
    return found == numbers_.end() ? add(address, false) : found->second;
  }

  // Subtracts the storages that were freed.
  void settle() {
    size_t left = 0;
    for (auto number : alive_) {
      auto& storage = storages_[static_cast<size_t>(number)];
      if (storage.weak.expired()) {
        live_bytes_ -= storage.size_bytes;
        numbers_.erase(storage.weak._unsafe_get_target());
        storage.weak = c10::weak_intrusive_ptr<StorageImpl>(c10::intrusive_ptr<StorageImpl>());
      } else {
        alive_[left++] = number;
      }
    }
    alive_.resize(left);
  }

  Reference& refer(Draft& draft, const at::Tensor& tensor, size_t position, int64_t element) {
    draft.references.push_back({static_cast<int64_t>(position), element, number_of(tensor), tensor.storage_offset(),
                                draft.geometry.size(), static_cast<size_t>(tensor.dim()), tensor.scalar_type(), tensor.is_conj(),
                                tensor.is_neg()});
    draft.geometry.append(tensor.sizes().begin(), tensor.sizes().end());
    draft.geometry.append(tensor.strides().begin(), tensor.strides().end());
    return draft.references.back();
  }

  // Notes the arguments of an op and the storages that it writes; returns false if the recorder must execute the op.
  bool note(Draft& draft, const Operator& facts) {
    const auto& arguments = draft.arguments;
    bool plain = true;
    for (const auto& value : arguments) {
      each_tensor(value, [&](const at::Tensor& tensor, int64_t) { plain = plain && is_plain(tensor); });
    }
    if (!plain) {
      return false;
    }
    const bool updates_statistics = facts.updates_statistics(arguments);
    const auto is_written = [&](size_t i) { return facts.is_written(i, updates_statistics); };
    bool all_made = true, none_made = true;
    auto& written = draft.written;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!is_written(i)) {
        continue;
      }
      each_tensor(arguments[i], [&](const at::Tensor& tensor, int64_t) {
        const auto number = number_of(tensor);
        if (std::find(written.begin(), written.end(), number) == written.end()) {
          const auto& storage = storages_[static_cast<size_t>(number)];
          written.push_back(number);
          all_made = all_made && storage.made && storage.writes < kMostWrites;
          none_made = none_made && !storage.made;
          plain = plain && (storage.made || !storage.read); // else its contents must be copied before the op changes them
        }
      });
    }
    const bool writes_what_is_kept = !written.empty() && none_made && facts.returns_nothing_new;
    const bool writes_what_it_may = written.empty() || writes_what_is_kept || (updates_statistics && none_made) ||
        (facts.statistics < 0 && all_made && written.size() == 1 && facts.repeatable);
    if (!plain || !writes_what_it_may) {
      return false;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool reads = !writes_what_is_kept && !(updates_statistics && is_written(i));
      each_tensor(arguments[i], [&](const at::Tensor& tensor, int64_t element) {
        auto& storage = storages_[static_cast<size_t>(refer(draft, tensor, i, element).storage)];
        if (reads && !storage.made) {
          storage.read = true;
          if (!storage.kept) {
            storage.kept = storage.weak.lock();
          }
        }
      });
    }
    draft.inputs = draft.references.size();
    return true;
  }

  static bool holds_tensors(const IValue& list) {
    const auto type = list.toList().elementType();
    return type->isSubtypeOf(*c10::getTypePtr<std::optional<at::Tensor>>());
  }

  static IValue empty_list(const IValue& like) {
    c10::impl::GenericList list(like.toList().elementType());
    list.resize(like.toListRef().size());
    return list;
  }

  // Logs an op that has run, and adds what it shows of its signature to `known`, if not null.
  void finish(Draft& draft, const c10::OperatorHandle& handle, Operator& facts, const Stack& stack, double seconds, Known* known) {
    const size_t count = handle.schema().returns().size();
    bool repeatable = facts.repeatable != 0;
    for (size_t i = 0; i < count; ++i) {
      each_tensor(stack[stack.size() - count + i],
                  [&](const at::Tensor& tensor, int64_t element) {
                    repeatable = repeatable && is_plain(tensor) && (element < 0 || count == 1);
                  });
    }
    int64_t made_bytes = 0;
    bool makes = false;
    for (size_t i = 0; i < count; ++i) {
      each_tensor(stack[stack.size() - count + i], [&](const at::Tensor& tensor, int64_t element) {
        if (!is_plain(tensor)) {
          for (const auto& part : parts_of(tensor)) {
            number_of(part);
          }
          return;
        }
        auto* address = tensor.storage().unsafeGetStorageImpl();
        if (numbers_.find(address) == numbers_.end()) {
          makes = true;
          made_bytes += storages_[static_cast<size_t>(add(address, repeatable))].size_bytes;
        }
        if (element < 0 || count == 1) { // the recorder ignores lists among several results
          refer(draft, tensor, i, element);
        }
      });
    }
    bool turns = false; // it writes the next version of a storage that an op has made
    for (auto number : draft.written) {
      auto& storage = storages_[static_cast<size_t>(number)];
      turns = turns || storage.made;
      ++storage.writes;
      if (auto held = storage.weak.lock()) {
        const auto size_bytes = bytes_of(*held);
        const auto grown_bytes = size_bytes - std::exchange(storage.size_bytes, size_bytes);
        live_bytes_ += grown_bytes;
        made_bytes += grown_bytes > 0 ? size_bytes : 0;
      }
    }
    int64_t taken_bytes = std::max(call.taken_bytes, int64_t(0));
    seconds = call.seconds < 0 ? seconds : call.seconds;
    if (call.taken_bytes >= 0) {
      facts.measured.add(bytes_in(draft), static_cast<double>(call.taken_bytes - made_bytes), call.seconds);
      include(call.taken_bytes - made_bytes);
    } else if (!is_measured(known)) {
      include(static_cast<int64_t>(facts.measured.most_room_bytes)); // not scaled by size: a peak is no upper bound
    }
    if (known != nullptr) {
      known->made_bytes = made_bytes;
      if (call.taken_bytes >= 0) {
        known->measurements += 1;
        known->room_bytes = std::max(known->room_bytes, call.taken_bytes - made_bytes);
        if (measurements_ > 0) {
          known->seconds = known->seconds < 0 ? call.seconds : std::min(known->seconds, call.seconds);
        }
      }
      seconds = known->seconds < 0 ? seconds : known->seconds;
      taken_bytes = known->measurements == 0 ? 0 : made_bytes + known->room_bytes;
    } else if (measurements_ > 0 && call.seconds < 0) {
      seconds = facts.measured.seconds_of(bytes_in(draft));
    }
    Op op{handle, arguments_.size(), references_.size(), references_.size() + draft.inputs,
          references_.size() + draft.references.size(), shared.module, taken_bytes, seconds, at::GradMode::is_enabled(),
          repeatable && (makes || turns), !repeatable && makes, facts.reads_to_host != 0};
    shared.ops += op.counted;
    shared.kept_ops += op.kept;
    shared.host_reads += op.reads_to_host;
    shared.seconds += seconds;
    ++shared.position;
    include(0);
    if (!would_fit(0)) { // its outputs were larger than expected
      shared.must_close = 1;
    }
    for (auto& value : draft.arguments) { // tensors that were read may be freed
      if (has_memory(value)) {
        value = IValue();
      } else if (value.isList() && holds_tensors(value)) {
        value = empty_list(value);
      }
      arguments_.push_back(std::move(value));
    }
    for (auto reference : draft.references) {
      reference.geometry += geometry_.size();
      references_.push_back(reference);
    }
    geometry_.insert(geometry_.end(), draft.geometry.begin(), draft.geometry.end());
    ops_.push_back(op);
  }

  static at::Tensor empty_tensor(c10::intrusive_ptr<StorageImpl> held, c10::ScalarType dtype) {
    const auto key = c10::DispatchKeySet(c10::computeDispatchKey(dtype, at::kStrided, held->device()));
    return at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(held)), key, c10::scalarTypeToTypeMeta(dtype));
  }

  // Returns the tensor of a reference, on a stand-in if its storage was freed.
  at::Tensor tensor(const Reference& reference) {
    const auto number = static_cast<size_t>(reference.storage);
    auto& storage = storages_[number];
    auto held = storage.weak.lock();
    if (!held) {
      auto& stand_in = stand_ins_[number];
      if (!stand_in) {
        stand_in = c10::make_intrusive<StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.size_bytes,
                                                    at::DataPtr(nullptr, storage.device), nullptr, false);
      }
      held = stand_in;
    }
    auto tensor = empty_tensor(std::move(held), reference.dtype);
    const auto geometry = c10::ArrayRef<int64_t>(geometry_).slice(reference.geometry, 2 * reference.dim);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.slice(0, reference.dim), geometry.slice(reference.dim), reference.offset);
    tensor._set_conj(reference.conjugated);
    tensor._set_neg(reference.negative);
    return tensor;
  }

  Settings settings_{}; // with which all ops in the log ran
  const int64_t budget_bytes_;
  const c10::Device device_;
  const int64_t measurements_;
  std::atomic<int64_t> drafts_{0}; // ops that are executed; while there are others, storages keep their numbers
  std::shared_mutex unlogged_; // held by ops until they are logged, alone while the log is closed
  void (*const describe_)(const char*, const char*, int64_t*);
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> recorder_;
  std::unordered_map<c10::OperatorHandle, std::unique_ptr<Operator>> operators_;
  std::unordered_map<Key, std::shared_ptr<Known>, KeyHash> sizes_; // by what sizes of outputs depend on
  Key key_; // of the op that is executed
  std::vector<Op> ops_;
  std::vector<IValue> arguments_; // of all ops
  std::vector<Reference> references_;
  std::vector<int64_t> geometry_; // sizes and strides
  std::vector<Storage> storages_; // by number
  ska::flat_hash_map<StorageImpl*, int64_t> numbers_; // a weak reference keeps the address from being used again
  std::vector<int64_t> alive_; // numbers of the storages that were resident at the last `settle`
  int64_t live_bytes_ = 0; // an upper bound
  std::vector<c10::intrusive_ptr<StorageImpl>> stand_ins_; // by number, while the recorder reads
  std::vector<int64_t> last_uses_;
};

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  auto* log = static_cast<Log*>(c10::ThreadLocalDebugInfo::get(kKind));
  // PyTorch may place this key above Python's. Modes and subclasses still run first: their ops come here again. If Python's key
  // is excluded, a kernel for fake tensors is running.
  if (log == nullptr || log->left || below.has(c10::DispatchKey::Python) ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  auto& facts = log->facts_of(handle);
  if (facts.way == kView) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard not_again(kKey);
  if (log->shared.open) {
    log->execute(handle, facts, below, stack);
  } else {
    call = OpExchange();
    if (!log->record(handle, facts, below, stack)) {
      log->by_recorder(handle, stack);
    }
  }
}

std::shared_ptr<Log>& of(int64_t log) {
  return *reinterpret_cast<std::shared_ptr<Log>*>(log);
}

// The object that autograd holds in place of a tensor that was saved while the log was open.
struct LoggedTensor {
  PyObject ob_base;
  PyObject* held; // the tensor or an alias; after the log was read, the recorder's handle
  int64_t version; // autograd's version counter when the tensor was saved
  std::shared_ptr<Log> log; // null after it was read
  std::list<LoggedTensor*>::iterator position; // in the log
};

void take_from_log(LoggedTensor& logged) {
  auto& log = *logged.log;
  log.saved.erase(logged.position);
  if (--log.shared.saved == 0) {
    log.shared.in_step = 0;
  }
  logged.log.reset();
}

void drop_logged_tensor(PyObject* self) {
  auto* logged = reinterpret_cast<LoggedTensor*>(self);
  PyTypeObject* type = Py_TYPE(self);
  if (logged->log) {
    take_from_log(*logged);
  }
  Py_CLEAR(logged->held);
  logged->log.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* logged_tensor_type() {
  static PyMemberDef members[] = {{"held", T_OBJECT_EX, offsetof(LoggedTensor, held), 0, nullptr},
                                  {"version", T_LONGLONG, offsetof(LoggedTensor, version), READONLY, nullptr},
                                  {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&drop_logged_tensor)}, {Py_tp_members, members}, {0, nullptr}};
  static PyType_Spec spec = {"planner.train.eager.LoggedTensor", sizeof(LoggedTensor), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* type = PyType_FromSpec(&spec);
  return reinterpret_cast<PyTypeObject*>(type);
}

// The hooks on saved tensors of a log, and the Python functions that they call.
struct Hooks {
  std::shared_ptr<Log> log;
  PyObject* begin_step; // called before the first tensor of a step is saved
  PyObject* pack; // packs while the log is closed; returns None if it has opened the log, which then packs the tensor
  PyObject* unpack; // unpacks tensors that are not in the log, or were modified in place
};

Hooks& hooks_of(PyObject* capsule) {
  return *static_cast<Hooks*>(PyCapsule_GetPointer(capsule, nullptr));
}

void drop_hooks(PyObject* capsule) {
  auto* hooks = &hooks_of(capsule);
  for (PyObject* object : {hooks->begin_step, hooks->pack, hooks->unpack}) {
    Py_DECREF(object);
  }
  delete hooks;
}

PyObject* pack(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  auto& hooks = hooks_of(self);
  auto& log = *hooks.log;
  if (!log.shared.open) {
    if (const auto records = log.records) {
      if (PyObject* packed = records->pack(tensor)) {
        return packed;
      }
    }
    PyObject* packed = PyObject_CallOneArg(hooks.pack, tensor);
    if (packed != Py_None) {
      return packed;
    }
    Py_DECREF(packed);
  }
  if (!THPVariable_CheckExact(tensor) || THPVariable_Unpack(tensor).layout() != at::kStrided) {
    return Py_NewRef(tensor);
  }
  const auto& saved = THPVariable_Unpack(tensor);
  if (log.shared.saved == 0) {
    PyObject* begun = PyObject_CallNoArgs(hooks.begin_step);
    if (begun == nullptr) {
      return nullptr;
    }
    Py_DECREF(begun);
  }
  // The saved output of a node would hold that node, a reference cycle: it is replaced by an alias.
  PyObject* held = saved.is_leaf() ? Py_NewRef(tensor) : THPVariable_Wrap(make_alias(saved));
  if (held == nullptr) {
    return nullptr;
  }
  PyTypeObject* type = logged_tensor_type();
  auto* logged = reinterpret_cast<LoggedTensor*>(type->tp_alloc(type, 0));
  if (logged == nullptr) {
    Py_DECREF(held);
    return nullptr;
  }
  logged->held = held;
  logged->version = version_of(saved);
  new (&logged->log) std::shared_ptr<Log>(hooks.log);
  new (&logged->position) auto(log.saved.insert(log.saved.end(), logged));
  ++log.shared.saved;
  return reinterpret_cast<PyObject*>(logged);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack_recorded(const Hooks& hooks, PyObject* saved) {
  if (const auto records = hooks.log->records) {
    if (PyObject* unpacked = records->unpack(saved)) {
      return unpacked;
    }
  }
  return PyObject_CallOneArg(hooks.unpack, saved);
}

PyObject* unpack(PyObject* self, PyObject* saved) {
  HANDLE_TH_ERRORS
  auto& hooks = hooks_of(self);
  if (Py_TYPE(saved) != logged_tensor_type()) {
    return unpack_recorded(hooks, saved);
  }
  const auto* logged = reinterpret_cast<LoggedTensor*>(saved);
  if (!logged->log) {
    return unpack_recorded(hooks, logged->held);
  }
  return version_of(THPVariable_Unpack(logged->held)) == logged->version ? Py_NewRef(logged->held) : PyObject_CallOneArg(hooks.unpack, saved);
  END_HANDLE_TH_ERRORS
}

std::shared_ptr<OpRecords> records_of(PyObject* capsule) {
  return (*static_cast<std::shared_ptr<Log>*>(PyCapsule_GetPointer(capsule, nullptr)))->records;
}

// Forgets a tensor that autograd drops; returns False if Python has to do it.
PyObject* release(PyObject* self, PyObject* saved) {
  HANDLE_TH_ERRORS
  const auto records = records_of(self);
  if (records) {
    records->release(saved);
  }
  return PyBool_FromLong(records != nullptr);
  END_HANDLE_TH_ERRORS
}

// Enters ops into the ledger; returns False if Python has to do it.
PyObject* enter_ops(PyObject* self, PyObject* pending) {
  HANDLE_TH_ERRORS
  const auto records = records_of(self);
  return PyBool_FromLong(records && records->enter_ops(pending));
  END_HANDLE_TH_ERRORS
}

} // namespace

extern "C" {

// Registers the fallback, and operators for the functions that may raise errors; the rest are plain functions. Returns false if
// PyTorch refuses a registration.
bool deferred_install() {
  try {
    static torch::Library operators(torch::Library::DEF, "planner_log", std::nullopt, __FILE__, __LINE__);
    operators.def("raise_error() -> ()", []() { std::rethrow_exception(std::exchange(error_of_op, nullptr)); });
    operators.def("close(int log) -> Tensor[]", [](int64_t log) { return of(log)->close(); });
    operators.def("unread(int log, int index) -> (int, Tensor?[], int, float)", [](int64_t log, int64_t index) { return of(log)->unread(index); });
    operators.def("show(int log, int index) -> ()", [](int64_t log, int64_t index) { of(log)->show(index); });
    static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

// `cuda_device`: the index of the device where memory is counted; -1 for the CPU.
int64_t deferred_new(int64_t budget_bytes, int64_t cuda_device, int64_t measurements, void (*describe)(const char*, const char*, int64_t*)) {
  const auto device = cuda_device < 0 ? c10::Device(at::kCPU) : c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(cuda_device));
  return reinterpret_cast<int64_t>(new std::shared_ptr<Log>(std::make_shared<Log>(budget_bytes, device, measurements, describe)));
}

void deferred_drop(int64_t log) {
  delete &of(log);
}

void* deferred_shared(int64_t log) {
  return &of(log)->shared;
}

// Returns the `OpExchange` of this thread.
void* deferred_call() {
  return &call;
}

// Notes that the allocator of a CUDA device had no memory for a request of this thread.
void deferred_failed(int64_t cuda_device) {
  ++failures[cuda_device];
}

void deferred_stay_open(int64_t log) {
  of(log)->stay_open();
}

// Takes the place of the recorder, which must be the last mode that was entered.
void deferred_enter(int64_t log) {
  of(log)->enter();
  c10::ThreadLocalDebugInfo::_push(kKind, of(log));
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void deferred_leave(int64_t log) {
  of(log)->leave();
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  try {
    c10::ThreadLocalDebugInfo::_pop(kKind);
  } catch (...) { // another entry, such as a profiler's, is still above it
  }
}

void deferred_open(int64_t log, int64_t count, void* const* storages, int64_t other_bytes, int64_t peak_bytes) {
  of(log)->open(count, reinterpret_cast<StorageImpl* const*>(storages), other_bytes, peak_bytes);
}

void deferred_begin_step(int64_t log) {
  of(log)->begin_step();
}

bool deferred_fits(int64_t log, int64_t size_bytes) {
  auto& asked = *of(log);
  const std::lock_guard<std::recursive_mutex> lock(asked.mutex);
  return asked.fits(size_bytes);
}

int64_t deferred_length(int64_t log) {
  return of(log)->length();
}

void deferred_forget(int64_t log) {
  of(log)->forget();
}

// The following functions need Python's global interpreter lock.

// Returns the hooks that pack and unpack saved tensors, `release` and `enter_ops`; null, with Python's error set, on failure.
PyObject* deferred_hooks(int64_t log, PyObject* begin_step, PyObject* pack_closed, PyObject* unpack_other) {
  static PyMethodDef methods[] = {
      {"pack", &pack, METH_O, nullptr}, {"unpack", &unpack, METH_O, nullptr}, {"release", &release, METH_O, nullptr},
      {"enter_ops", &enter_ops, METH_O, nullptr}};
  auto* hooks = new Hooks{of(log), Py_NewRef(begin_step), Py_NewRef(pack_closed), Py_NewRef(unpack_other)};
  PyObject* capsule = PyCapsule_New(hooks, nullptr, &drop_hooks);
  if (capsule == nullptr) {
    return nullptr;
  }
  // The recorder has the last two, so that they must not lead back to Python.
  PyObject* only_log = PyCapsule_New(new std::shared_ptr<Log>(of(log)), nullptr, [](PyObject* dropped) {
    delete static_cast<std::shared_ptr<Log>*>(PyCapsule_GetPointer(dropped, nullptr));
  });
  PyObject* found = Py_BuildValue("NNNN", PyCFunction_New(&methods[0], capsule), PyCFunction_New(&methods[1], capsule),
                                  PyCFunction_New(&methods[2], only_log), PyCFunction_New(&methods[3], only_log));
  Py_DECREF(capsule);
  Py_DECREF(only_log);
  return found;
}

// Lets known ops be recorded without Python's dispatch; not any more if there are no `parts`. Returns false, with Python's error
// set, on failure.
bool deferred_record_with(int64_t log, PyObject* parts) {
  try {
    of(log)->records = parts == Py_None ? nullptr : new_op_records(parts);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
  return true;
}

// Learns the record of the op of this thread, without its tensors.
void deferred_learn(int64_t log, PyObject* pattern) {
  of(log)->records->learn(key_of_new_op, pattern);
}

// Removes the saved tensors from the log, and returns them in the order in which they were saved, each with the tensor that it has
// held. From then on all hold aliases.
PyObject* deferred_take_saved(int64_t log) {
  auto& taken = of(log)->saved;
  PyObject* found = PyList_New(0);
  while (found != nullptr && !taken.empty()) {
    auto* logged = taken.front();
    PyObject* alias = THPVariable_Wrap(make_alias(THPVariable_Unpack(logged->held)));
    PyObject* pair = alias == nullptr ? nullptr : PyTuple_Pack(2, reinterpret_cast<PyObject*>(logged), logged->held);
    const bool is_added = pair != nullptr && PyList_Append(found, pair) == 0;
    Py_XDECREF(pair);
    if (!is_added) {
      Py_XDECREF(alias);
      Py_CLEAR(found);
      break;
    }
    Py_SETREF(logged->held, alias);
    take_from_log(*logged);
  }
  return found;
}
}
