// Executes and records the ops of the eager runtime.
//
// For each signature there is a pattern: the record of such an op without its storages.
// The record of an op (recorded_op.h) refers to the pattern, and has its own storages. What happens around an op is done here too:
// storages that were freed, the log of the step, saved tensors that are packed, unpacked and dropped. Python is asked for the rest:
// copies of contents before they are overwritten, sizes without a rule, and what to do after an error (`Recorder` of
// planner.train.eager.recording).
//
// The library holds records and storages itself. As objects of Python there were three for each op, which its garbage collector
// visited. Known weakness: the interpreter lock is taken for each op, because modules and operators are known by names of Python's.
//
// An op that ends with an error may have written a part of its result, so that storage is kept, as it cannot be recomputed.

#include "op_records.h"

#include "memory.h"
#include "recomputation.h"
#include "sources.h"

#include <c10/util/ScopeExit.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace {

using namespace python_objects;

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

const auto kProfiler = c10::DebugInfoKind::PROFILER_STATE;

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::accumulate(key.begin(), key.end(), uint64_t{key.size()}, &mix);
  }
};

// Holds a lock. The interpreter lock is released while another thread holds it.
class OwnLock {
 public:
  explicit OwnLock(std::recursive_mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (!lock_) {
      const py::gil_scoped_release unlocked;
      lock_.lock();
    }
  }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// Calls a function, and throws its errors of Python's as autograd does.
template <typename Called>
void throw_as_torch(Called called) {
  try {
    called();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

constexpr size_t kMostPatterns = 1 << 13; // of a generation: those that were not used for a whole one are dropped

class Records final : public OpRecords {
 public:
  explicit Records(const py::tuple& parts)
      : recorder_(parts[0]),
        memory_(recorder_.attr("memory").cast<Memory&>()),
        follower_(recorder_.attr("follower")),
        plans_(follower_.attr("plans")),
        recomputation_(recorder_.attr("recomputation").cast<Recomputation&>()),
        costs_(recorder_.attr("costs")),
        sources_(recorder_.attr("sources").cast<Sources&>()),
        names_(recorder_.attr("module").attr("names")),
        module_number_(reinterpret_cast<const int64_t*>(parts[6].cast<intptr_t>())),
        sizes_(recorder_.attr("sizes")),
        longest_chain_(parts[1].cast<size_t>()),
        lock_of_draws_(parts[2]),
        get_default_generator_(parts[3]),
        few_ops_(parts[4].cast<int64_t>()),
        measurements_(parts[5].cast<int64_t>()),
        budget_device_(reinterpret_cast<THPDevice*>(sizes_.attr("device").ptr())->device),
        times_each_(costs_.attr("times_each").cast<bool>()) {
    memory_.recorder = recorder_.ptr();
    memory_.evict_planned = [this] {
      return has_plans.of(plans_).ptr() == Py_True && evict_one.call(follower_).ptr() == Py_True;
    };
  }

  ~Records() override {
    memory_.recorder = nullptr;
    memory_.evict_planned = [] { return false; };
  }

  void record(const CalledOp& called) override {
    const py::gil_scoped_acquire held;
    const OwnLock own(lock_);
    memory_.settle();
    const bool is_between = !sources_.has_saved();
    if (is_between) {
      begin_step();
    }
    const auto written = list_written(called);
    const auto is_pinned = [](const StoragePtr& storage) { return storage->pinned; };
    if (called.facts.only_writes != 0 && std::all_of(written.begin(), written.end(), is_pinned)) {
      return write_pinned(called, written);
    }
    // An op with arguments that no record can have, or that rebinds a tensor, is not executed again.
    record_as(c10::make_intrusive<RecordedOp>(called.unusual ? new_pattern(called) : find_pattern(called)), called, written, is_between);
  }

  // Leaves that have gradients or whose storage is never evicted are held themselves, and so are parameters: as in plain eager PyTorch,
  // a backward pass sees what was assigned to their ``.data`` meanwhile.
  void pack(const at::Tensor& tensor, SavedTensor& saved, const std::shared_ptr<OpRecords>& self) override {
    const OwnLock own(lock_);
    if (!sources_.has_saved()) { // autograd saves the inputs of the first op of a step before the op runs
      memory_.settle();
      begin_saving.call(recorder_);
      memory_.begin_step();
    }
    const auto storage = find_or_add(tensor);
    const bool is_pinned = storage->pinned;
    if (saved.is_parameter || (tensor.is_leaf() && (tensor.requires_grad() || is_pinned))) {
      saved.held = tensor;
    }
    saved.alias = make_alias(tensor);
    saved.storage = storage;
    saved.version = version_of(tensor);
    ++memory_.packs;
    if (storage->saved == 0) {
      sources_.add_saved(*storage);
      memory_.begin_holding(*storage);
    }
    const auto count = ++storage->saved;
    saved.next = std::exchange(storage->first, &saved);
    if (saved.next != nullptr) {
      saved.next->previous = &saved;
    }
    saved.records = self; // from now on it is released
    if (!is_pinned && storage->checked != memory_.overwrites) {
      sources_.pin_if_lost(*storage);
    }
    if (count == 1) {
      memory_.allow(*storage);
    }
  }

  // Returns an alias of a saved tensor: autograd may keep it, then the reference count of the storage is higher.
  at::Tensor unpack(SavedTensor& saved) override {
    const OwnLock own(lock_);
    const auto& storage = saved.storage;
    if (memory_.log) {
      memory_.log->unpacked.emplace_back(memory_.number_of(*storage), memory_.log->ops.size());
    }
    memory_.touch(*storage, memory_.read_s);
    const auto& tensor = saved.held.defined() ? saved.held : saved.alias;
    if (const auto version = version_of(tensor); version != saved.version) {
      raise_overwritten.call(recorder_, steal(THPVariable_Wrap(tensor)), number(saved.version), number(version));
    }
    if (!saved.held.defined() && storage->address == 0) {
      recomputation_.recompute(storage);
    }
    return make_alias(tensor);
  }

  void release(SavedTensor& saved) override {
    const auto& storage = saved.storage;
    (saved.previous == nullptr ? storage->first : saved.previous->next) = saved.next;
    if (saved.next != nullptr) {
      saved.next->previous = saved.previous;
    }
    saved.alias.reset();
    if (--storage->saved == 0) {
      sources_.remove_saved(*storage);
      if (std::exchange(storage->evicted, false)) {
        memory_.evicted_bytes -= storage->size_bytes;
      }
      // The ledger is not updated: the garbage collector may call this while it runs. Its choices are checked instead.
      storage->base.reset();
      memory_.end_holding(*storage);
      const auto* watch = storage->watch;
      if (watch == nullptr || watch->memory.use_count() == 0) {
        memory_.log_release(*storage, true);
      }
    }
    if (!sources_.has_saved() && !recomputation_.in_block) {
      forget.call(recorder_);
    }
  }

 private:
  // Begins to count ops anew where no tensor is saved, and ends the step before.
  void begin_step() {
    if (memory_.recorded > few_ops_) {
      begin_step_of.call(recorder_);
    }
    if (memory_.log) {
      end.call(follower_);
    }
  }

  // Returns the storages that an op writes.
  Written list_written(const CalledOp& called) {
    Written written;
    for (const auto& tensor : called.written) {
      auto storage = find_or_add(tensor);
      if (std::none_of(written.begin(), written.end(), [&](const StoragePtr& other) { return other == storage; })) {
        written.push_back(std::move(storage));
      }
    }
    return written;
  }

  // Executes an op that writes only pinned storages, such as an update of parameters, without recording it.
  void write_pinned(const CalledOp& called, const Written& written) {
    const auto operator_ = borrow(reinterpret_cast<PyObject*>(called.facts.python));
    sources_.copy_before_writes(operator_, written);
    const auto start_s = memory_.now();
    while (const auto error = execute(called)) {
      recover(operator_, std::nullopt, written, error);
    }
    advance_clock(memory_.now() - start_s);
    for (const auto& storage : written) {
      ++storage->version;
    }
    if (memory_.log) {
      auto& logged = add_to_log(called.facts);
      logged.module = module_name();
      std::for_each(written.begin(), written.end(), [&](const StoragePtr& storage) { add_number(logged.written, storage); });
      count_logged(called.facts, 0);
    }
  }

  // Makes room after an error of an op, so that it can be executed again. Throws the error, as Python's, if that does not help: from
  // here, because frames of Python would be in its traceback, which would lead back to it.
  void recover(py::handle operator_, const std::optional<Draws>& draws, const Written& written, const std::exception_ptr& error) {
    torch::translate_exception_to_python(error);
    const py::error_already_set raised;
    const bool is_unwritten = allocates_first.of(operator_).ptr() == Py_True; // else it may have written a part
    const bool can_undo = !written.empty() && std::all_of(written.begin(), written.end(), [](const StoragePtr& storage) {
      return storage->is_recomputable(storage->version);
    });
    bool again = false;
    const auto keep_written = c10::make_scope_exit([&] {
      std::for_each(written.begin(), again ? written.begin() : written.end(), [&](const StoragePtr& storage) { keep(*storage); });
    });
    again = recover_.call(recorder_, operator_, raised.value(), py::bool_(is_unwritten || can_undo)).ptr() == Py_True;
    if (!again) {
      throw raised;
    }
    std::for_each(written.begin(), is_unwritten ? written.begin() : written.end(), [&](const auto& part) { recomputation_.restore(part); });
    if (!times_each_) {
      forget_failures.call(costs_);
    }
    if (draws.has_value()) {
      const Locked locked(lock_of_draws_);
      set_state(draws->generator, get_state(draws->before));
    }
  }

  void advance_clock(double seconds) {
    memory_.clock_s += seconds;
    memory_.read_s = memory_.clock_s;
  }

  py::object module_name() {
    return borrow(PyList_GetItem(names_.ptr(), static_cast<Py_ssize_t>(*module_number_)));
  }

  const std::shared_ptr<OpPattern>& find_pattern(const CalledOp& called) {
    if (const auto found = patterns_.find(called.key); found != patterns_.end()) {
      return found->second;
    }
    if (patterns_.size() >= kMostPatterns) {
      older_patterns_ = std::exchange(patterns_, {});
    }
    if (auto older = older_patterns_.extract(called.key)) {
      return patterns_.insert(std::move(older)).position->second;
    }
    return patterns_.emplace(called.key, build_pattern(called)).first->second;
  }

  std::shared_ptr<OpPattern> build_pattern(const CalledOp& called) {
    auto pattern = new_pattern(called);
    const bool drops_statistics = called.updates_statistics && called.facts.replay == OperatorFacts::kWithoutStatistics;
    if (drops_statistics) {
      pattern->handle = c10::Dispatcher::singleton().findSchemaOrThrow(called.handle.operator_name().name.c_str(), "no_stats");
    }
    auto input = called.inputs.begin();
    const auto add_input = [&](size_t place, std::optional<size_t> item) {
      pattern->inputs.push_back({at::DimVector(input->sizes()), at::DimVector(input->strides()), input->scalar_type(), place, item});
      ++input;
    };
    for (size_t i = 0; i < called.arguments.size(); ++i) {
      const auto& value = called.arguments[i];
      auto& arguments = pattern->arguments;
      if (called.updates_statistics && called.facts.is_written(i, true)) {
        if (!drops_statistics) {
          arguments.emplace_back();
        }
      } else if (has_memory(value)) {
        add_input(arguments.size(), std::nullopt);
        arguments.emplace_back();
      } else if (value.isList() && std::any_of(value.toListRef().begin(), value.toListRef().end(), has_memory)) {
        auto items = value.toList().copy();
        for (size_t item = 0; item < items.size(); ++item) {
          if (has_memory(value.toListRef()[item])) {
            add_input(arguments.size(), item);
            items.set(item, value.isTensorList() ? c10::IValue(at::Tensor()) : c10::IValue());
          }
        }
        arguments.emplace_back(std::move(items));
      } else {
        arguments.push_back(value);
        if (value.isTensor() && value.toTensor().defined()) { // a wrapped number, which Python has seen as a tensor
          arguments.back() = value.toTensor().clone();
          arguments.back().toTensor().unsafeGetTensorImpl()->set_wrapped_number(true);
        }
      }
    }
    const bool has_replay = !called.updates_statistics || called.facts.replay != OperatorFacts::kNoReplay;
    pattern->recordable = called.facts.repeatable != 0 && has_replay;
    if (!called.sized_by_data) {
      learn_sizes(called, pattern);
    }
    return pattern;
  }

  std::shared_ptr<OpPattern> new_pattern(const CalledOp& called) {
    const auto operator_ = borrow(reinterpret_cast<PyObject*>(called.facts.python));
    return std::make_shared<OpPattern>(OpPattern{operator_, present_settings(), called.handle, at::GradMode::is_enabled()});
  }

  static py::object wrap_known(const std::shared_ptr<OpPattern>& pattern) {
    return py::cast(std::shared_ptr<KnownOp>(pattern, &pattern->known));
  }

  // Fills in the facts about a new signature.
  void learn_sizes(const CalledOp& called, const std::shared_ptr<OpPattern>& pattern) {
    auto& known = pattern->known;
    const auto& operator_ = pattern->operator_;
    known.number = static_cast<int64_t>(KeyHash()(called.key) >> 2 | 1);
    const bool has_rule = called.facts.may_guess == 0 && called.facts.resizes_out == 0;
    const auto size_bytes = has_rule ? count_bytes_of(called) : std::nullopt;
    if (size_bytes.has_value()) {
      known.out_bytes = *size_bytes;
    } else {
      const auto [args, kwargs] = to_python(called);
      learn_sizes_of.call(recorder_, wrap_known(pattern), function.of(operator_), args, kwargs);
    }
    if (!times_each_) {
      const auto read_bytes = number(count_read_bytes(called));
      if (const auto likely_bytes = to_int(estimate.call(costs_, operator_, wrap_known(pattern), read_bytes)); likely_bytes > 0) {
        const auto with_op_bytes = memory_.live_bytes + known.out_bytes + likely_bytes;
        memory_.peak_bytes = std::max(memory_.peak_bytes, std::min(with_op_bytes, memory_.budget_bytes));
      }
    }
  }

  static int64_t count_read_bytes(const CalledOp& called) {
    return std::accumulate(called.inputs.begin(), called.inputs.end(), int64_t{0},
                           [](int64_t sum, const at::Tensor& tensor) { return sum + static_cast<int64_t>(tensor.nbytes()); });
  }

  // Returns what the outputs of an op will take on the budget's device, if a rule knows.
  std::optional<int64_t> count_bytes_of(const CalledOp& called) {
    const auto sizes_bytes = count_output_bytes(called);
    if (!sizes_bytes.has_value()) {
      return std::nullopt;
    }
    int64_t total_bytes = 0;
    if (!sizes_bytes->empty()) {
      const auto device = find_device(called);
      for (const auto size_bytes : *sizes_bytes) {
        total_bytes += memory_.count_bytes(size_bytes, device);
      }
    }
    return total_bytes;
  }

  // Returns the most that the outputs of an op take whose sizes depend on data.
  int64_t count_most_bytes(const CalledOp& called, const py::object& operator_) {
    const bool has_rule = called.facts.sized_by_data == OperatorFacts::kSizedByData;
    if (const auto size_bytes = has_rule ? count_bytes_of(called) : std::nullopt; size_bytes.has_value()) {
      return *size_bytes;
    }
    const auto [args, kwargs] = to_python(called);
    return to_int(bound_bytes.call(recorder_, operator_, args, kwargs));
  }

  // Returns the device of the outputs: the one that is asked for, or that of the tensors; numbers may be on another.
  c10::Device find_device(const CalledOp& called) {
    if (const auto asked = called.handle.schema().argumentIndexWithName("device"); asked.has_value()) {
      if (const auto& value = called.arguments[static_cast<size_t>(*asked)]; value.isDevice()) {
        const auto device = value.toDevice();
        return device == c10::Device(budget_device_.type()) ? budget_device_ : device;
      }
    }
    auto device = budget_device_;
    std::pair<bool, bool> best(false, false);
    for (size_t i = 0; i < called.inputs.size(); ++i) {
      const auto& tensor = called.inputs[i];
      const std::pair<bool, bool> rank(tensor.dim() > 0, !tensor.device().is_cpu());
      if (i == 0 || rank > best) {
        best = rank;
        device = tensor.device();
      }
    }
    return device;
  }

  // Returns the arguments of an op as PyTorch passes them to a dispatch mode: without those that are defaults.
  static std::pair<py::list, py::dict> to_python(const CalledOp& called) {
    const auto& declared = called.handle.schema().arguments();
    const auto is_default = [&](size_t i) {
      const auto& value = declared[i].default_value();
      return value.has_value() && *value == called.arguments[i];
    };
    size_t positional = 0;
    while (positional < declared.size() && !declared[positional].kwarg_only()) {
      ++positional;
    }
    size_t given = positional;
    while (given > 0 && is_default(given - 1)) {
      --given;
    }
    py::list args;
    py::dict kwargs;
    for (size_t i = 0; i < declared.size(); ++i) {
      if (i < given) {
        args.append(to_python(declared[i], called.arguments[i]));
      } else if (i >= positional && !is_default(i)) {
        kwargs[declared[i].name().c_str()] = to_python(declared[i], called.arguments[i]);
      }
    }
    return {std::move(args), std::move(kwargs)};
  }

  static py::object to_python(const c10::Argument& declared, const c10::IValue& value) {
    auto type = declared.real_type();
    if (const auto* optional = type->castRaw<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (!value.isNone()) {
      switch (type->kind()) {
        case c10::TypeKind::ScalarTypeType:
          return borrow(reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType())));
        case c10::TypeKind::LayoutType:
          return borrow(reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout())));
        case c10::TypeKind::MemoryFormatType:
          return borrow(torch::utils::getTHPMemoryFormat(value.toMemoryFormat()));
        default:
          break;
      }
    }
    return torch::jit::toPyObject(value);
  }

  static std::exception_ptr execute(const CalledOp& called) {
    const py::gil_scoped_release unlocked;
    return called.execute();
  }

  void record_as(const c10::intrusive_ptr<RecordedOp>& object, const CalledOp& called, const Written& written, bool is_between) {
    auto& op = *object;
    const auto& operator_ = op.pattern->operator_;
    const auto& known = op.pattern->known;
    if (called.sized_by_data && !called.unusual) {
      op.pattern->known.out_bytes = count_most_bytes(called, operator_);
    }
    for (const auto& tensor : called.inputs) {
      refer(tensor, op);
    }
    op.module = module_name();
    const auto out_bytes = known.out_bytes, workspace_bytes = known.workspace_bytes;
    make_room(op, out_bytes, workspace_bytes);
    if (is_between && memory_.live_bytes > memory_.between_peak_bytes) {
      memory_.settle_all();
    }
    const auto held_bytes = memory_.live_bytes;
    sources_.copy_before_writes(operator_, written);
    const auto taken_bytes = run(called, op, written);
    const auto made_bytes = record_outputs(called, object, written, taken_bytes);
    if (called.facts.reads_to_host != 0) {
      ++memory_.host_reads;
    }
    if (memory_.log) {
      log_op(op, called.facts, written);
    }
    if (made_bytes != out_bytes) {
      memory_.make_room(0, function.of(op.pattern->operator_));
    }
    if (is_between) {
      const auto most_bytes = held_bytes + made_bytes + known.workspace_bytes;
      memory_.between_peak_bytes = std::max(memory_.between_peak_bytes, most_bytes);
    }
  }

  // Evicts until an op fits; for a guessed workspace only as far as possible.
  void make_room(RecordedOp& op, int64_t out_bytes, int64_t workspace_bytes) {
    const auto room_bytes = out_bytes + workspace_bytes;
    if (memory_.live_bytes + room_bytes > std::min(memory_.peak_bytes, memory_.budget_bytes)) {
      memory_.settle_all();
    }
    const auto& known = op.pattern->known;
    if (memory_.live_bytes + room_bytes <= memory_.budget_bytes) {
      if (!known.guessed || known.measurements != measurements_) { // else it is an estimate
        memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.live_bytes + room_bytes);
      }
      return;
    }
    const bool is_guessed = known.guessed;
    if (!memory_.try_to_make_room(room_bytes, !is_guessed)) {
      memory_.make_room(is_guessed ? out_bytes : room_bytes, function.of(op.pattern->operator_));
    }
    for (const auto& read : op.reads) { // some may be pinned only now, as their records are dropped
      auto& storage = *read.storage;
      if (storage.pinned) {
        op.keep(storage);
      }
    }
  }

  // Adds a tensor to what an op reads. If its contents cannot be recomputed, the record would keep it alive for longer than the program.
  void refer(const at::Tensor& tensor, RecordedOp& op) {
    auto storage = find_or_add(tensor);
    const auto version = storage->last_read = storage->version;
    memory_.touch(*storage, memory_.read_s);
    if (storage->pinned) {
      op.kept.push_back(tensor.storage());
    } else if (storage->checked != memory_.overwrites) {
      op.recordable = !sources_.pin_if_lost(*storage) && op.recordable;
    }
    op.reads.push_back({std::move(storage), version, tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()});
  }

  StoragePtr find_or_add(const at::Tensor& tensor) {
    auto* found = memory_.find(tensor);
    return found == nullptr ? memory_.add(tensor, nullptr, true) : StoragePtr::reclaim_copy(found);
  }

  // Executes an op and times it, and returns the bytes that it has taken; -1 if that was not measured.
  int64_t run(const CalledOp& called, RecordedOp& op, const Written& written) {
    if (called.facts.draws == 0) {
      return run_timed(called, op, written);
    }
    py::object generator = py::none();
    auto device = called.inputs.empty() ? c10::Device(c10::kCPU) : called.inputs[0].device();
    for (const auto& value : called.arguments) {
      if (value.isGenerator()) {
        generator = torch::jit::toPyObject(value);
      } else if (value.isDevice()) {
        device = value.toDevice();
      }
    }
    const auto set_draws = [&] {
      const auto from = generator.is_none() ? get_default_generator_(steal(THPDevice_New(device))) : generator;
      const auto drawn_from = THPGenerator_Unwrap(from.ptr());
      const std::lock_guard<std::mutex> lock(drawn_from.unsafeGetGeneratorImpl()->mutex_);
      op.draws.emplace(Draws{drawn_from, drawn_from.clone()});
    };
    if (called.facts.random == 0) { // a custom operator, which may wait for another thread
      set_draws();
      return run_timed(called, op, written);
    }
    const Locked locked(lock_of_draws_);
    set_draws();
    return run_timed(called, op, written);
  }

  int64_t run_timed(const CalledOp& called, RecordedOp& op, const Written& written) {
    auto& known = op.pattern->known;
    if (known.needs_block) {
      const auto size_bytes = known.out_bytes + known.workspace_bytes;
      find_block.call(costs_, number(size_bytes), evict_after.of(recorder_));
    }
    const bool is_measured = !times_each_ && start.call(costs_, wrap_known(op.pattern)).ptr() == Py_True;
    int64_t taken_bytes = -1;
    const auto begun_s = memory_.now();
    while (const auto error = times_each_ ? execute_here(called, known, taken_bytes) : execute(called)) {
      try {
        recover(op.pattern->operator_, op.draws, written, error);
      } catch (const py::error_already_set&) {
        if (is_measured) {
          stop.call(costs_);
        }
        throw;
      }
    }
    auto seconds = memory_.now() - begun_s;
    if (!times_each_) {
      check_memory.call(costs_, function.of(op.pattern->operator_));
      seconds = known.seconds;
    }
    if (is_measured) {
      const auto measured = stop.call(costs_);
      seconds = to_double(measured[py::int_(0)]);
      taken_bytes = to_int(measured[py::int_(1)]);
    }
    advance_clock(seconds);
    op.seconds = known.seconds = std::min(known.seconds, seconds);
    ++recomputation_.step_ops;
    return taken_bytes;
  }

  // Executes an op whose time need not be waited for. What the first ones of a signature take is measured, by the allocator's events.
  std::exception_ptr execute_here(const CalledOp& called, KnownOp& known, int64_t& taken_bytes) {
    const bool is_known = known.measurements == measurements_ && !called.sized_by_data; // else sizes depend on more than the signature
    if (is_known || c10::ThreadLocalDebugInfo::get(kProfiler) != nullptr) { // the thread is profiled
      return execute(called);
    }
    ++known.measurements;
    const auto allocated = std::make_shared<AllocatedBytes>();
    const c10::DebugInfoGuard guard(kProfiler, allocated);
    auto error = execute(called);
    taken_bytes = allocated->peak_bytes;
    return error;
  }

  // Records what an op has made and written, and returns the bytes of new storages and of those that have grown.
  int64_t record_outputs(
      const CalledOp& called, const c10::intrusive_ptr<RecordedOp>& object, const Written& written, int64_t taken_bytes) {
    auto& op = *object;
    auto& known = op.pattern->known;
    const auto outputs = called.outputs();
    const bool is_list = outputs.size() == 1 && outputs[0].isTensorList();
    const auto values = is_list ? outputs[0].toListRef() : outputs;
    c10::SmallVector<std::pair<size_t, at::Tensor>, 4> new_tensors; // on different storages, with their positions
    const auto is_sparse = [](const auto& value) { return value.isTensor() && value.toTensor().layout() != at::kStrided; };
    const bool is_unusual = std::any_of(values.begin(), values.end(), is_sparse);
    if (is_unusual) {
      py::list all;
      std::for_each(values.begin(), values.end(), [&](const auto& output) { all.append(torch::jit::toPyObject(output)); });
      op.recordable = false;
      for (auto found : find_made.call(recorder_, all)) {
        new_tensors.emplace_back(to_int(found[py::int_(0)]), THPVariable_Unpack(py::object(found[py::int_(1)]).ptr()));
      }
    }
    for (size_t i = 0; i < values.size() && !is_unusual; ++i) {
      if (!values[i].isTensor() || !values[i].toTensor().defined()) {
        continue;
      }
      const auto& tensor = values[i].toTensor();
      const auto is_like = [&](const auto& found) { return found.second.storage().is_alias_of(tensor.storage()); };
      if (memory_.find(tensor) == nullptr && std::none_of(new_tensors.begin(), new_tensors.end(), is_like)) {
        new_tensors.emplace_back(i, tensor);
      }
    }
    int64_t made_bytes = 0;
    if (!called.written.empty()) {
      for (const auto& storage : written) {
        made_bytes += called.facts.rebinds + called.facts.resizes_out > 0 ? memory_.update_size(*storage) : 0;
      }
      note_writes(called, op, written, !new_tensors.empty());
    }
    for (const auto& [i, tensor] : new_tensors) {
      const auto storage = memory_.add(tensor, nullptr, true, !op.recordable);
      made_bytes += storage->size_bytes;
      op.made.emplace_back(static_cast<int64_t>(i), WeakStoragePtr(storage));
      if (op.recordable) {
        storage->chain.push_back(object);
      }
    }
    if (taken_bytes >= 0) {
      const auto before = known.guessed ? 0 : known.workspace_bytes;
      const auto workspace = taken_bytes - made_bytes;
      known.workspace_bytes = std::max(before, workspace);
      known.guessed = false;
      if (!times_each_) {
        const auto moved_bytes = number(made_bytes + count_read_bytes(called));
        note.call(costs_, op.pattern->operator_, moved_bytes, py::float_(op.seconds), number(workspace));
      }
    }
    op.room_bytes = made_bytes + known.workspace_bytes;
    known.out_bytes = made_bytes;
    if (op.recordable && !op.made.empty()) {
      count_op(op);
    } else if (!op.made.empty()) {
      ++memory_.kept_ops;
    }
    return made_bytes;
  }

  // Begins the next version of each storage that an op has written: adds the op to its chain, or pins it.
  void note_writes(const CalledOp& called, RecordedOp& op, const Written& written, bool makes_outputs) {
    const auto& first = written[0];
    const bool is_repeatable = op.recordable && !called.updates_statistics && written.size() == 1;
    if (is_repeatable && !first->pinned && first->chain.size() < longest_chain_) {
      first->chain.push_back(record_in_place(op, first, called.facts.resizes_out != 0));
      ++first->version;
      return;
    }
    for (const auto& storage : written) {
      keep(*storage);
    }
    if (!called.updates_statistics && makes_outputs) {
      op.recordable = false;
    }
  }

  // Begins a version of a storage that cannot be recomputed.
  void keep(TrackedStorage& storage) {
    ++storage.version;
    sources_.pin(storage);
  }

  // Records an op that writes the next version of a storage.
  c10::intrusive_ptr<RecordedOp> record_in_place(const RecordedOp& op, const StoragePtr& storage, bool resizes_out) {
    auto object = c10::make_intrusive<RecordedOp>(op);
    auto& write = *object;
    for (auto& input : write.reads) {
      if (input.storage == storage) {
        input.storage.reset();
      }
    }
    // The storage counts with its last size from the first op on.
    const auto& known = op.pattern->known;
    write.room_bytes = known.workspace_bytes + (resizes_out ? 0 : known.out_bytes);
    write.in_place = true;
    write.made.emplace_back(0, WeakStoragePtr(storage));
    ++memory_.packs;
    count_op(write);
    return object;
  }

  void count_op(RecordedOp& op) {
    ++memory_.recorded;
    ++memory_.ops;
    op.number = memory_.log ? static_cast<int64_t>(memory_.log->ops.size()) : memory_.ops;
    op.place = static_cast<int64_t>(memory_.pending->size());
    op.pending = memory_.pending;
    memory_.pending->push_back(&op);
  }

  // Logs an op for the plans of repeated steps.
  void log_op(const RecordedOp& op, const OperatorFacts& facts, const Written& written) {
    auto& logged = add_to_log(facts);
    logged.time_s = op.seconds;
    logged.recomputable = op.recordable;
    logged.workspace_bytes = op.pattern->known.workspace_bytes;
    logged.module = op.module;
    for (const auto& input : op.reads) {
      add_number(logged.inputs, input.storage);
    }
    for (const auto& [position, reference] : op.made) {
      add_number(logged.made, reference.lock());
    }
    for (const auto& storage : written) {
      add_number(logged.written, storage);
    }
    count_logged(facts, static_cast<uint64_t>(op.pattern->known.number));
  }

  // Adds the number of a storage, unless it is there.
  void add_number(StorageNumbers& numbers, const StoragePtr& storage) {
    if (const auto added = memory_.number_of(*storage); std::find(numbers.begin(), numbers.end(), added) == numbers.end()) {
      numbers.push_back(added);
    }
  }

  // Begins to log an op, whose storages are to be filled in before it is counted.
  LoggedOp& add_to_log(const OperatorFacts& facts) {
    auto& op = memory_.log->ops.emplace_back();
    op.target = function.of(reinterpret_cast<PyObject*>(facts.python));
    op.random = facts.random != 0;
    if (const auto node = torch::autograd::get_current_node()) {
      op.backward = true;
      op.node = static_cast<int64_t>(node->sequence_nr());
    }
    return op;
  }

  void count_logged(const OperatorFacts& facts, uint64_t shapes) {
    auto& log = *memory_.log;
    log.count_op(facts.python, shapes);
    if (log.followed && !log.followed->is_begun_as(log)) {
      follow_matching_plan.call(plans_);
    }
  }

  const Name allocates_first{"allocates_first"}, begin_saving{"begin_saving"}, begin_step_of{"begin_step"},
      bound_bytes{"bound_bytes"}, check_memory{"check_memory"}, end{"end"}, estimate{"estimate"}, evict_after{"evict_after"},
      evict_one{"evict_one"}, find_block{"find_block"}, find_made{"find_made"}, follow_matching_plan{"follow_matching_plan"},
      forget_failures{"forget_failures"}, forget{"forget"}, function{"function"}, has_plans{"has_plans"},
      learn_sizes_of{"learn_sizes"}, note{"note"}, raise_overwritten{"raise_overwritten"}, recover_{"recover"},
      start{"start"}, stop{"stop"};

  const py::object recorder_;
  std::recursive_mutex lock_; // of the state of the runtime, because a backward pass may run in several threads
  Memory& memory_;
  const py::object follower_, plans_;
  Recomputation& recomputation_;
  const py::object costs_;
  Sources& sources_;
  const py::object names_;
  const int64_t* const module_number_;
  const py::object sizes_;
  const size_t longest_chain_;
  const py::object lock_of_draws_, get_default_generator_;
  const int64_t few_ops_, measurements_;
  const c10::Device budget_device_;
  const bool times_each_; // ops are done when they return
  std::unordered_map<Key, std::shared_ptr<OpPattern>, KeyHash> patterns_, older_patterns_;
};

} // namespace

SavedTensor::SavedTensor(std::shared_ptr<OpRecords> of) : to_pack(std::move(of)) {}

SavedTensor::~SavedTensor() {
  if (!records) { // it holds the tensor itself
    return;
  }
  if (Py_IsInitialized() == 0) { // Python has ended
    static_cast<void>(new auto(std::move(records)));
    static_cast<void>(storage.release());
    return;
  }
  const py::gil_scoped_acquire locked;
  const py::error_scope kept;
  try {
    records->release(*this);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a saved tensor that autograd drops");
  }
  storage.reset();
  records.reset();
}

void SavedTensor::call_pack_hook(const at::Tensor& tensor) {
  const py::gil_scoped_acquire locked;
  const auto self = std::move(to_pack);
  const auto object = steal(THPVariable_Wrap(tensor));
  if (!THPVariable_CheckExact(object.ptr()) || tensor.layout() != at::kStrided) {
    held = tensor;
    return;
  }
  is_parameter = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == ParameterClass;
  throw_as_torch([&] { self->pack(tensor, *this, self); });
}

at::Tensor SavedTensor::call_unpack_hook() {
  if (!records) {
    return held;
  }
  const py::gil_scoped_acquire locked;
  at::Tensor found;
  throw_as_torch([&] { found = records->unpack(*this); });
  return found;
}

std::unique_ptr<OpRecords> new_op_records(PyObject* parts) {
  return std::make_unique<Records>(borrow(parts).cast<py::tuple>());
}
