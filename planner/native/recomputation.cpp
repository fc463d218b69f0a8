// Recomputation of evicted storages, and of the storages that they need and that are not resident.
//
// No recursion: a chain of in-place writes may be longer than the stack. The outputs that are wanted come last, as in the replay of
// planner.solvers.baselines.common.online, so that the runtime evicts what the replay of its step evicts.

#include "recomputation.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>
#include <string>

namespace py = pybind11;

using namespace python_objects;

namespace {

// With fewer recomputed ops than this, the limit on recomputation is not checked.
constexpr int64_t kFewOps = 1000;

c10::DispatchKeySet keys_above(bool in_block) {
  using enum c10::DispatchKey;
  const c10::DispatchKeySet keys(
      {AutocastCPU, AutocastCUDA, FuncTorchVmapMode, FuncTorchDynamicLayerFrontMode, FuncTorchDynamicLayerBackMode, VmapMode});
  return in_block ? keys.add(Fake) : keys;
}

// While it exists, ops run unrecorded, below autograd, autocast and vmap, where the recorded ops were recorded.
class OwnOps {
 public:
  explicit OwnOps(bool in_block) : keys_(keys_above(in_block)), settings_(present_settings()) {}
  OwnOps(const OwnOps&) = delete;
  OwnOps& operator=(const OwnOps&) = delete;

  ~OwnOps() {
    set_settings(settings_);
  }

 private:
  const at::AutoDispatchBelowAutograd below_;
  const c10::impl::ExcludeDispatchKeyGuard keys_;
  const KernelSettings settings_;
};

at::Tensor find_resident(const TrackedStorage& storage) {
  if (storage.base.defined()) {
    return storage.base;
  }
  if (storage.first != nullptr && storage.address != 0) {
    return storage.first->alias;
  }
  auto held = storage.watch == nullptr ? nullptr : storage.watch->memory.lock();
  return held ? view_whole(c10::Storage(std::move(held))) : at::Tensor();
}

} // namespace

at::Tensor view_whole(c10::Storage storage) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  return at::empty({0}, options).set_(std::move(storage));
}

// The rebuild of one version of a storage, in new memory, by the first ops of its chain.
class [[gnu::visibility("hidden")]] Rebuild {
 public:
  Rebuild(StoragePtr rebuilt, int64_t of_version) : storage(std::move(rebuilt)), version(of_version) {
    const auto& all = storage->chain;
    TORCH_INTERNAL_ASSERT(storage->is_recomputable(version), "an evicted tensor cannot be recomputed");
    chain.assign(all.begin(), all.begin() + version + 1);
  }

  bool is_done() const {
    return step == chain.size();
  }

  bool is_current() const {
    return version == storage->version;
  }

  // Returns the next input of the next op that is not resident.
  const Read* find_next_missing() const {
    if (is_done()) {
      return nullptr;
    }
    for (const auto& read : chain[step]->reads) {
      if (!read.storage || (read.storage->address != 0 && read.version == read.storage->version)) {
        continue;
      }
      if (!find_input(read).defined() && !find_snapshot(*read.storage, read.version).defined()) {
        return &read;
      }
    }
    return nullptr;
  }

  // Holds a rebuilt storage as an input of the next op.
  void receive(const Rebuild& made) {
    inputs.emplace_back(Read{made.storage, made.version, 0, false, false}, made.built);
  }

  // Drops the inputs of the next op; returns false if there are none or they were dropped once before.
  bool let_go() {
    if (inputs.empty() || last_let_go > step) {
      return false;
    }
    last_let_go = step + 1;
    inputs.clear();
    return true;
  }

  // Returns another tensor on the storage of an input: whoever holds it keeps the storage from being evicted.
  at::Tensor find_source(const Read& read) const {
    if (!read.storage) {
      return built;
    }
    if (auto found = find_input(read); found.defined()) {
      return found;
    }
    if (auto found = find_snapshot(*read.storage, read.version); found.defined()) {
      return found;
    }
    const auto resident = find_resident(*read.storage);
    return resident.defined() ? make_alias(resident) : resident;
  }

  StoragePtr storage;
  int64_t version;
  std::vector<c10::intrusive_ptr<RecordedOp>> chain;
  size_t step = 0;
  at::Tensor built;
  std::vector<std::pair<Read, at::Tensor>> inputs;

 private:
  at::Tensor find_input(const Read& read) const {
    const auto is_same = [&](const auto& input) { return input.first.storage == read.storage && input.first.version == read.version; };
    const auto found = std::find_if(inputs.rbegin(), inputs.rend(), is_same);
    return found == inputs.rend() ? at::Tensor() : found->second;
  }

  size_t last_let_go = 0;
};

namespace {

// Drops the inputs of the first unfinished rebuild below the top that can drop them; returns false if none can.
bool let_go(std::vector<Rebuild>& stack) {
  return std::any_of(stack.begin(), stack.end() - 1, [](Rebuild& rebuild) { return rebuild.let_go(); });
}

} // namespace

Recomputation::Recomputation(py::object memory, double max_recomputation, py::object costs, py::object lock_of_draws)
    : memory_object_(std::move(memory)), costs_(std::move(costs)), lock_of_draws_(std::move(lock_of_draws)),
      memory_(memory_object_.cast<Memory&>()), max_recomputation_(max_recomputation),
      times_each_(costs_.attr("times_each").cast<bool>()) {}

void Recomputation::begin_step() {
  ops_before_ = ops;
  step_ops = 0;
}

void Recomputation::recompute(const StoragePtr& storage) {
  const OwnOps own(in_block);
  rebuild(storage, storage->version);
}

void Recomputation::restore(const StoragePtr& object) {
  auto& storage = *object;
  const auto version = storage.version++; // nothing reads this one, so the contents before it are rebuilt in new memory
  const OwnOps own(in_block);
  at::Tensor rebuilt;
  try {
    rebuilt = rebuild(object, version);
  } catch (...) {
    storage.version = version;
    throw;
  }
  storage.version = version;
  view_whole(c10::Storage(storage.watch->memory.lock())).copy_(view_whole(rebuilt.storage()));
  rebuilt.reset();
  memory_.settle();
}

// Returns a tensor with the contents of a version of a storage, rebuilt in new memory.
at::Tensor Recomputation::rebuild(const StoragePtr& storage, int64_t version) {
  Stack stack{begin(storage, version)};
  try {
    while (true) {
      memory_.settle();
      if (const auto* missing = stack.back().find_next_missing()) {
        stack.push_back(begin(missing->storage, missing->version));
      } else if (!stack.back().is_done()) {
        execute(stack);
      } else {
        const auto made = std::move(stack.back());
        stack.pop_back();
        if (stack.empty()) {
          return made.built;
        }
        stack.back().receive(made);
      }
    }
  } catch (...) {
    std::for_each(stack.begin(), stack.end(), [&](Rebuild& unfinished) { abandon(unfinished); });
    throw;
  }
}

// Returns a new rebuild of a storage. All inputs of its ops count as read now, before missing ones are recomputed.
Rebuild Recomputation::begin(const StoragePtr& storage, int64_t version) {
  Rebuild begun(storage, version);
  for (const auto& op : begun.chain) {
    for (const auto& read : op->reads) {
      if (read.storage) {
        memory_.touch(*read.storage, memory_.clock_s);
      }
    }
  }
  return begun;
}

void Recomputation::execute(Stack& stack) {
  auto& top = stack.back();
  const auto& op = *top.chain[top.step];
  c10::SmallVector<at::Tensor, 4> sources; // they hold the inputs, so that they are not evicted
  for (const auto& read : op.reads) {
    sources.push_back(top.find_source(read));
    if (!sources.back().defined()) { // the garbage collector has just freed one
      return;
    }
  }
  // A tensor for results counts with its last size, although an op resizes it only later.
  make_room(op, op.in_place ? op.room_bytes : std::max<int64_t>(op.room_bytes, top.storage->size_bytes), stack);
  torch::jit::Stack outputs;
  double taken_s = 0;
  if (!call(op, sources, stack, outputs, taken_s)) {
    sources.clear();
    abandon(top);
    top.step = 0;
    top.inputs.clear();
    return;
  }
  take_outputs(top, op, outputs);
  memory_.note_recomputed(op);
  count(op, taken_s);
}

// Makes room for an op. As the last resort, drops inputs that unfinished rebuilds hold, once per op.
void Recomputation::make_room(const RecordedOp& op, int64_t room_bytes, Stack& stack) {
  bool at_last = false;
  while (!memory_.try_to_make_room(room_bytes, at_last)) {
    if (at_last) {
      return memory_.make_room(room_bytes, py::str("recomputing {}").format(function_.of(op.pattern->operator_)));
    }
    at_last = !let_go(stack);
  }
  memory_.peak_bytes = std::max(memory_.peak_bytes, memory_.live_bytes + room_bytes);
}

// Executes an op again, until the allocator has memory for it or nothing is left to evict. Returns false if the op may have written
// before the allocator failed: then the storage that it writes is to be rebuilt from the start.
bool Recomputation::call(
    const RecordedOp& op, c10::ArrayRef<at::Tensor> sources, Stack& stack, torch::jit::Stack& outputs, double& taken_s) {
  const auto recorder = borrow(memory_.recorder);
  const auto& operator_ = op.pattern->operator_;
  set_settings(op.pattern->settings);
  if (!times_each_ && !op.in_place && op.pattern->known.needs_block) {
    find_block_.call(costs_, number(op.room_bytes), evict_after_.of(recorder));
  }
  while (true) {
    const auto start_s = memory_.now();
    if (!times_each_) {
      forget_failures_.call(costs_);
    }
    try {
      outputs = op.draws.has_value() ? draw_again(op, sources) : execute_again(op, sources);
      taken_s = times_each_ ? memory_.now() - start_s : op.seconds;
      break;
    } catch (...) {
      torch::translate_exception_to_python(std::current_exception());
    }
    const py::error_already_set raised;
    if (!raised.matches(PyExc_Exception)) {
      throw raised;
    }
    while (evict_after_.call(recorder, raised.value()).ptr() != Py_True) {
      if (is_memory_error_.call(recorder, raised.value()).ptr() != Py_True || !let_go(stack)) {
        throw raised;
      }
    }
    if (op.in_place && allocates_first_.of(operator_).ptr() != Py_True) {
      return false;
    }
  }
  if (!times_each_) {
    check_memory_.call(costs_, function_.of(operator_));
  }
  return true;
}

torch::jit::Stack Recomputation::draw_again(const RecordedOp& op, c10::ArrayRef<at::Tensor> sources) {
  const Locked locked(lock_of_draws_);
  const auto [generator, before] = *op.draws;
  const auto now = get_state(generator);
  set_state(generator, get_state(before));
  try {
    auto outputs = execute_again(op, sources);
    set_state(generator, now);
    return outputs;
  } catch (...) {
    set_state(generator, now);
    throw;
  }
}

// Takes the output of an op of the chain, and keeps its other outputs that saved tensors need.
void Recomputation::take_outputs(Rebuild& rebuild, const RecordedOp& op, const torch::jit::Stack& outputs) {
  ++rebuild.step;
  rebuild.inputs.clear();
  if (op.in_place) {
    return;
  }
  const bool is_list = outputs.size() == 1 && outputs[0].isTensorList();
  const auto values = is_list ? outputs[0].toListRef() : c10::ArrayRef<c10::IValue>(outputs);
  const at::Tensor* own = nullptr;
  for (const auto& [position, reference] : op.made) {
    const auto made = reference.lock();
    const auto& tensor = values[static_cast<size_t>(position)].toTensor();
    if (made == rebuild.storage) {
      own = &tensor; // last, as in the replay
    } else if (made && made->saved > 0 && made->address == 0 && made->version == 0) {
      memory_.record_computed(*made, tensor);
    }
  }
  if (own == nullptr) {
    return;
  }
  rebuild.built = *own;
  if (rebuild.is_current()) {
    memory_.record_computed(*rebuild.storage, rebuild.built);
  } else {
    memory_.add(rebuild.built, nullptr, false);
  }
}

// Frees the unfinished result.
void Recomputation::abandon(Rebuild& rebuild) {
  const bool is_kept = rebuild.built.defined() && rebuild.is_current();
  rebuild.built.reset();
  if (auto& storage = *rebuild.storage; is_kept) {
    storage.move_aliases({});
    if (!memory_.drop_base(storage)) {
      memory_.end_holding(storage);
    }
  }
  memory_.settle();
}

void Recomputation::count(const RecordedOp& op, double taken_s) {
  ++ops;
  seconds += taken_s;
  memory_.clock_s += taken_s;
  for (auto [totals, name] : {std::pair{&by_operator, &op.pattern->operator_}, std::pair{&by_module, &op.module}}) {
    auto& total = (*totals)[name->ptr()];
    total.name = *name;
    ++total.ops;
    total.seconds += taken_s;
  }
  if (const auto step = ops - ops_before_; step > kFewOps && static_cast<double>(step) > max_recomputation_ * static_cast<double>(step_ops)) {
    raise_too_much_.call(borrow(memory_.recorder), number(step), number(step_ops));
  }
}

py::object recomputation_type() {
  // Names with the number and the time of ops.
  static const auto list = [](const Recomputation::Totals& totals, auto describe) {
    py::dict found;
    for (const auto& [key, total] : totals) {
      found[describe(total.name)] = py::make_tuple(total.ops, total.seconds);
    }
    return found;
  };
  static py::object* type = new py::object(
      py::class_<Recomputation>(py::handle(), "Recomputation", py::module_local())
          .def(py::init<py::object, double, py::object, py::object>())
          .def_readwrite("in_block", &Recomputation::in_block)
          .def_readonly("ops", &Recomputation::ops)
          .def_readonly("seconds", &Recomputation::seconds)
          .def_property_readonly("by_operator", [](const Recomputation& self) {
            return list(self.by_operator, [](const py::object& operator_) { return py::str(operator_.attr("function")); });
          })
          .def_property_readonly("by_module", [](const Recomputation& self) {
            return list(self.by_module, [](const py::object& name) { return py::len(name) > 0 ? py::str(name) : py::str("outside of modules"); });
          })
          .def("begin_step", &Recomputation::begin_step));
  return *type;
}
