// Receives the ops of a thread, and of the backward passes that begin there, below autograd, without calls into Python.
//
// While a receiver is entered, each op comes to `fallback`, which lets op_records.cpp execute and record it.
//
// Autograd may run a thread for a CUDA device beside the one for the CPU, with the same receiver.

#include "memory.h"
#include "op_records.h"
#include "recomputation.h"
#include "sources.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <c10/util/bit_cast.h>
#include <c10/util/flat_hash_map.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using c10::IValue;
using torch::jit::Stack;

// Below autograd, autocast and all Python modes; PyTorch uses this key for modes that are written in C++.
constexpr auto kKey = c10::DispatchKey::Fake;
const auto kKind = c10::DebugInfoKind::TEST_INFO_2; // autograd's threads inherit this slot; PyTorch itself does not use it

template <typename Visit>
void each_tensor(const IValue& value, Visit visit) {
  if (has_memory(value)) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) {
      if (!item.isTensor() && !item.isNone()) {
        return;
      }
      if (has_memory(item)) {
        visit(item.toTensor());
      }
    }
  }
}

bool is_plain(const at::Tensor& tensor) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  return tensor.layout() == at::kStrided && impl.has_storage() && !impl.has_symbolic_sizes_strides() && !tensor.is_nested() &&
      !tensor.is_quantized() && !impl.key_set().has(c10::DispatchKey::Python);
}

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// Adds the value of a Python number that is wrapped in a tensor; returns false for a complex one.
bool add_wrapped_number(Key& key, const at::Tensor& wrapped) {
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

// Adds what the record of an op depends on, but for its tensors; returns false for an unsupported type of value. The low bits of the
// first number say what it is.
bool add_to_key(Key& key, const IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) {
      key.push_back(2);
      return true;
    }
    const bool counts = has_memory(value);
    const auto device = tensor.device();
    key.push_back(1 | counts << 4 | static_cast<int64_t>(tensor.scalar_type()) << 8 | static_cast<int64_t>(device.type()) << 16 |
                  static_cast<int64_t>(static_cast<uint8_t>(device.index())) << 24 | tensor.dim() << 32);
    key.append(tensor.sizes().begin(), tensor.sizes().end());
    key.append(tensor.strides().begin(), tensor.strides().end());
    return counts || add_wrapped_number(key, tensor);
  }
  if (value.isNone()) {
    key.push_back(3);
  } else if (value.isDouble()) {
    key.append({4, c10::bit_cast<int64_t>(value.toDouble())});
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? 5 : 6);
  } else if (value.isInt()) {
    key.append({7, value.toInt()});
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    key.push_back(8 | static_cast<int64_t>(text.size()) << 4);
    key.append(text.begin(), text.end());
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    key.append({11, c10::bit_cast<int64_t>(number.real()), c10::bit_cast<int64_t>(number.imag())});
  } else if (value.isGenerator()) {
    key.append({12, reinterpret_cast<int64_t>(value.toGenerator().unsafeGetGeneratorImpl())});
  } else if (value.isDevice()) {
    key.append({9, static_cast<int64_t>(value.toDevice().type()), value.toDevice().index()});
  } else if (value.isList()) {
    const auto items = value.toListRef();
    key.push_back(10 | static_cast<int64_t>(items.size()) << 4);
    return std::all_of(items.begin(), items.end(), [&](const IValue& item) { return !item.isList() && add_to_key(key, item); });
  } else {
    return false;
  }
  return true;
}

// Returns whether the sizes of the outputs depend on the contents of the arguments.
bool is_sized_by_data(c10::ArrayRef<IValue> arguments, const OperatorFacts& facts) {
  bool found = facts.sized_by_data == OperatorFacts::kSizedByData;
  if (facts.sized_by_data == OperatorFacts::kSizedByMasks) {
    each_tensor(arguments[1], [&](const at::Tensor& index) { found = found || is_mask(index); });
  }
  return found;
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

class Receiver : public c10::DebugInfoBase {
 public:
  explicit Receiver(void (*describe)(const char*, const char*, int64_t*)) : describe_(describe) {}
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  ~Receiver() override {
    auto* dropped = new auto(std::move(records)); // leaked if Python has ended
    if (Py_IsInitialized() != 0) {
      const auto state = PyGILState_Ensure();
      delete dropped;
      PyGILState_Release(state);
    }
  }

  std::shared_ptr<OpRecords> records;
  bool left = false;
  int64_t number = 0; // by which Python knows it
  size_t hooks_around = 0; // of Python's, when it was entered

  const OperatorFacts& facts_of(const c10::OperatorHandle& handle) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    auto& facts = operators_[handle];
    if (!facts) {
      facts = std::make_unique<OperatorFacts>();
      const auto& name = handle.operator_name();
      describe_(name.name.c_str(), name.overload_name.c_str(), &facts->passes);
      if (facts->passes != 0) {
        leave_alone(name);
      }
    }
    return *facts;
  }

  // Executes an op and records it.
  void record(const c10::OperatorHandle& handle, const OperatorFacts& facts, c10::DispatchKeySet below, Stack* stack) {
    const auto begin = stack->size() - handle.schema().arguments().size();
    const c10::SmallVector<IValue, 12> arguments(stack->begin() + static_cast<int64_t>(begin), stack->end());
    c10::SmallVector<at::Tensor, 4> inputs, written;
    bool usual = facts.rebinds == 0;
    Key key{present_settings() << 1 | at::GradMode::is_enabled(), reinterpret_cast<int64_t>(&facts)};
    const bool updates_statistics = facts.updates_statistics(arguments);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool is_written = facts.is_written(i, updates_statistics);
      each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (!is_plain(tensor)) {
          usual = false;
          return;
        }
        if (is_written) {
          written.push_back(tensor);
          if (facts.resizes_out != 0) {
            key.push_back(static_cast<int64_t>(tensor.storage().nbytes()));
          }
        }
        if (!is_written || !updates_statistics) {
          inputs.push_back(tensor);
        }
      });
      usual = usual && add_to_key(key, arguments[i]);
    }
    const auto run = [&]() -> std::exception_ptr {
      try {
        handle.redispatchBoxed(below, stack);
        return nullptr;
      } catch (...) {
        stack->resize(begin);
        stack->insert(stack->end(), arguments.begin(), arguments.end());
        return std::current_exception();
      }
    };
    const auto outputs = [&] { return c10::ArrayRef<IValue>(*stack).slice(begin); };
    records->record({handle, facts, key, arguments, inputs, written, updates_statistics, is_sized_by_data(arguments, facts), !usual, run,
                     outputs});
  }

 private:
  void (*const describe_)(const char*, const char*, int64_t*);
  std::recursive_mutex mutex_; // of the operators
  ska::flat_hash_map<c10::OperatorHandle, std::unique_ptr<OperatorFacts>> operators_;
};

void fallback(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  auto* receiver = static_cast<Receiver*>(c10::ThreadLocalDebugInfo::get(kKind));
  // PyTorch may place this key above Python's. Modes and subclasses still run first: their ops come here again. If Python's key
  // is excluded, a kernel for fake tensors is running.
  if (receiver == nullptr || receiver->left || below.has(c10::DispatchKey::Python) ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  const auto& facts = receiver->facts_of(handle);
  if (facts.passes != 0) {
    handle.redispatchBoxed(below, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard not_again(kKey);
  receiver->record(handle, facts, below, stack);
}

using Shared = std::shared_ptr<Receiver>;

Shared& of(int64_t receiver) {
  return *reinterpret_cast<Shared*>(receiver);
}

Shared& receiver_in(PyObject* capsule) {
  return *static_cast<Shared*>(PyCapsule_GetPointer(capsule, nullptr));
}

// Returns the receiver of this thread, if no hooks on saved tensors were set inside of its block.
Receiver* find_receiver() {
  auto* receiver = static_cast<Receiver*>(c10::ThreadLocalDebugInfo::get(kKind));
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  const bool is_innermost =
      receiver != nullptr && !receiver->left && !hooks.is_tracing && hooks.stack.size() <= receiver->hooks_around;
  return is_innermost ? receiver : nullptr;
}

using torch::autograd::Engine;

// An engine with the methods of another one, whose parameters differ between versions of PyTorch.
template <typename Method>
class EngineLike;

template <typename Returned, typename... Arguments>
class EngineLike<Returned (Engine::*)(Arguments...)> : public Engine {
 public:
  explicit EngineLike(Engine& like) : engine(like) {}

  Returned execute_with_graph_task(Arguments... arguments) override {
    return engine.execute_with_graph_task(std::forward<Arguments>(arguments)...);
  }

  Engine& engine;
};

// PyTorch's engine, but that saved tensors are packed without calls into Python. Hooks of Python's cost more than the rest of recording:
// each node of a backward pass copies the state of its thread, with a lock of the interpreter for each reference to a hook.
class HookedEngine final : public EngineLike<decltype(&Engine::execute_with_graph_task)> {
 public:
  using EngineLike::EngineLike;

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots, const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return engine.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return engine.make_anomaly_metadata();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto* receiver = find_receiver();
    return receiver == nullptr ? engine.get_default_saved_variable_hooks() : std::make_unique<SavedTensor>(receiver->records);
  }

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return engine.get_node_creation_hooks();
  }
#endif
};

std::atomic<int> entered_blocks = 0;

HookedEngine& hooked_engine() {
  static auto& engine = *new HookedEngine(Engine::get_default_engine()); // never destroyed
  return engine;
}

constexpr const char* kSaved = "planner.SavedTensor";

PyObject* pack(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  auto saved = std::make_unique<SavedTensor>(receiver_in(self)->records);
  saved->call_pack_hook(THPVariable_Unpack(tensor));
  return PyCapsule_New(saved.release(), kSaved, [](PyObject* dropped) {
    delete static_cast<SavedTensor*>(PyCapsule_GetPointer(dropped, kSaved));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(static_cast<SavedTensor*>(PyCapsule_GetPointer(packed, kSaved))->call_unpack_hook());
  END_HANDLE_TH_ERRORS
}

} // namespace

extern "C" {

// Registers the fallback. Returns false if PyTorch refuses to.
bool eager_install() {
  try {
    static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

int64_t eager_new(void (*describe)(const char*, const char*, int64_t*)) {
  auto* made = new Shared(std::make_shared<Receiver>(describe));
  return (*made)->number = reinterpret_cast<int64_t>(made);
}

void eager_drop(int64_t receiver) {
  delete &of(receiver);
}

void eager_enter(int64_t receiver) {
  of(receiver)->hooks_around = at::SavedTensorDefaultHooks::get_tls_state().stack.size();
  hooked_engine();
  if (entered_blocks++ == 0) {
    torch::autograd::set_default_engine_stub([]() -> Engine& { return hooked_engine(); });
  }
  c10::ThreadLocalDebugInfo::_push(kKind, of(receiver));
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void eager_leave(int64_t receiver) {
  if (--entered_blocks == 0) {
    torch::autograd::set_default_engine_stub([]() -> Engine& { return hooked_engine().engine; });
  }
  of(receiver)->left = true;
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  try {
    c10::ThreadLocalDebugInfo::_pop(kKind);
  } catch (...) { // another entry, such as a profiler's, is still above it
  }
}

// The following functions need Python's global interpreter lock.

// Returns the receiver that packs the tensors that autograd saves in this thread; 0 if there is none, or other hooks are inside of it.
int64_t eager_find_packing() {
  const auto* found = find_receiver();
  return found == nullptr ? 0 : found->number;
}

// Makes the records, with the objects that op_records.cpp names, and returns the hooks that pack and unpack saved tensors; null, with
// Python's error set, on failure.
PyObject* eager_record_with(int64_t receiver, PyObject* parts) {
  HANDLE_TH_ERRORS
  static PyMethodDef methods[] = {{"pack", &pack, METH_O, nullptr}, {"unpack", &unpack, METH_O, nullptr}};
  of(receiver)->records = new_op_records(parts);
  PyObject* held = PyCapsule_New(new Shared(of(receiver)), nullptr, [](PyObject* dropped) { delete &receiver_in(dropped); });
  PyObject* found = Py_BuildValue("NN", PyCFunction_New(&methods[0], held), PyCFunction_New(&methods[1], held));
  Py_DECREF(held);
  return found;
  END_HANDLE_TH_ERRORS
}

// Returns the types of the budgeted memory, of recomputation, of sources and of logs.
PyObject* eager_types() {
  HANDLE_TH_ERRORS
  return py::make_tuple(memory_type(), recomputation_type(), sources_type(), step_log_type()).release().ptr();
  END_HANDLE_TH_ERRORS
}
}
