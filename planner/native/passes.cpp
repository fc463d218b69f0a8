// The passes of a schedule as flat programs: the same calls and frees as in Python, without Python between them.
//
// A program has registers, which hold tensors, numbers, lists of tensors or objects of Python, and instructions, which call an
// operator by its boxed kernel, call a function of Python, take an item out of a list, or read the state of a generator. Each
// frees some registers at its end.
// Operators run below autograd: nothing in a pass is recorded for it. Those that write, or return what callers see, keep the
// counting of versions, on which checks of later writes rely.
//
// In Python each call took 2 to 4 us more than its boxed kernel, and a planned step was slower than eager PyTorch before anything was
// recomputed. A view took 0.5 to 1 us even here, since its operator derives sizes that a static step has every time: the first one of
// an instruction is remembered, and an equal tensor made from it. Whether a result is a view is told by what the run has made; counts
// of references, tried before, differ under a mode that watches storages.
//
// Python's interpreter lock is released between calls of Python. An instruction that fails ends the pass; all registers are
// freed before the error reaches Python, with the position of the instruction.

#include <Python.h>

#include <ATen/ScalarOps.h>
#include <ATen/core/Generator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recorded_op.h"

namespace torch::jit { // of pybind_utils.h, which takes ten seconds to compile
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle object, const c10::TypePtr& type, std::optional<int32_t> length);
} // namespace torch::jit

namespace {

namespace py = pybind11;
using c10::IValue;
using python_objects::borrow;
using python_objects::steal;

// The values of a run.
struct Registers {
  std::vector<IValue> values;
  std::vector<bool> is_copy; // where a view was asked for, or a view of such a copy

  explicit Registers(size_t count) : values(count), is_copy(count) {}

  IValue& operator[](size_t index) {
    return values[index];
  }

  const IValue& operator[](size_t index) const {
    return values[index];
  }
};

// The functions of Python of the same names, of which passes may call hundreds: planner.capture.rewrites.layouts and
// .reproducible_random describe them. As operators they are called like any other.
at::Tensor copy_with_strides(const at::Tensor& value, at::IntArrayRef strides) {
  at::Tensor copied = value;
  for (size_t dim = 0; dim < strides.size(); dim++) {
    copied = strides[dim] == 0 ? copied.narrow(static_cast<int64_t>(dim), 0, 1) : copied;
  }
  return copied.new_empty_strided(copied.sizes(), strides).copy_(copied).expand(value.sizes());
}

std::tuple<at::Tensor, at::Tensor> draw_dropout(
    const at::Tensor& x, double p, std::optional<bool> /*train*/, std::optional<at::Generator> generator) {
  at::Tensor mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p, std::move(generator));
  at::Tensor out = x.mul(mask);
  return {out.mul_(at::scalar_tensor(1 / (1 - p), x.options())), mask};
}

std::unique_ptr<torch::Library> register_operators() {
  auto library =
      std::make_unique<torch::Library>(torch::Library::DEF, "remat_planner", std::nullopt, __FILE__, __LINE__);
  library->def("copy_with_strides(Tensor value, int[] strides) -> Tensor", copy_with_strides);
  library->def("draw_dropout(Tensor x, float p, bool? train, *, Generator? generator) -> (Tensor, Tensor)", draw_dropout);
  return library;
}

// An object of Python in a register.
struct Object final : torch::CustomClassHolder {
  explicit Object(py::object object) : object(std::move(object)) {}

  ~Object() override {
    python_objects::drop_object(object);
  }

  py::object object;
};

// What an argument is made of; the values are those of planner.native.passes.
enum Form : int64_t {
  kConstant,
  kRegister,
  kList,
  kTuple,
  kSlice,
};

struct Argument {
  Form form = kConstant;
  IValue constant; // of operators
  py::object object; // of functions of Python
  int64_t index = -1; // of a register
  bool number_is_tensor = false, is_float = false, is_optional = false; // of an operator's argument, or its items
  std::vector<Argument> items;
};

enum Kind : int64_t {
  kOperator,
  kFunction,
  kItem,
  kState,
};

// How an operator draws random numbers: planner.capture.program.draws.
enum Draw : int64_t {
  kNoDraw = -1,
  kDrawOnce,
  kDrawFirst,
  kDrawAgain,
};

using Numbers = c10::SmallVector<int64_t, 5>;

// A view that an operator made of a tensor, or a list of them. An equal tensor gets equal views without the operator, which takes
// ten times as long: a pass makes more views than anything else.
struct View {
  struct Part {
    Numbers sizes, strides;
    int64_t offset; // in the tensor
  };

  c10::DispatchKeySet keys; // of the tensor
  caffe2::TypeMeta dtype; // of all
  Numbers base_sizes, base_strides;
  std::vector<Part> parts;
  bool is_list;

  View(const at::Tensor& base, const std::vector<at::Tensor>& made, bool is_list)
      : keys(base.key_set()), dtype(base.dtype()), base_sizes(base.sizes()), base_strides(base.strides()), is_list(is_list) {
    for (const at::Tensor& each : made) {
      parts.push_back({Numbers(each.sizes()), Numbers(each.strides()), each.storage_offset() - base.storage_offset()});
    }
  }

  // Whether another view of the tensor can be made as `make` does.
  static bool describes(const at::Tensor& base, const at::Tensor& made) {
    const bool is_plain = base.layout() == c10::kStrided && !base.key_set().has(c10::DispatchKey::Python);
    return is_plain && made.key_set() == base.key_set() && made.dtype() == base.dtype() && made.is_alias_of(base);
  }

  bool is_of(const at::Tensor& base) const {
    return base.key_set() == keys && base.dtype() == dtype && base.sizes() == base_sizes && base.strides() == base_strides;
  }

  IValue make(const at::Tensor& base) const {
    if (!is_list) {
      return make(base, parts[0]);
    }
    c10::List<at::Tensor> list;
    list.reserve(parts.size());
    for (const Part& part : parts) {
      list.push_back(make(base, part));
    }
    return list;
  }

 private:
  at::Tensor make(const at::Tensor& base, const Part& part) const {
    at::Tensor made = at::detail::make_tensor<at::TensorImpl>(at::TensorImpl::VIEW, at::Storage(base.storage()), keys, dtype);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(part.sizes, part.strides, base.storage_offset() + part.offset);
    return made;
  }
};

// The view of an instruction, once it was made; threads may run a program at the same time.
class FirstView {
 public:
  FirstView() = default;
  FirstView(const FirstView&) = delete;
  FirstView& operator=(const FirstView&) = delete;

  ~FirstView() {
    delete view_.load();
  }

  const View* get() const {
    return view_.load(std::memory_order_acquire);
  }

  void keep(const at::Tensor& base, const IValue& made) {
    const auto all = made.isTensor() ? std::vector{made.toTensor()} : made.toTensorVector();
    if (!std::all_of(all.begin(), all.end(), [&](const at::Tensor& each) { return View::describes(base, each); })) {
      return;
    }
    const View* none = nullptr;
    auto view = std::make_unique<const View>(base, all, made.isTensorList());
    if (view_.compare_exchange_strong(none, view.get())) {
      view.release();
    }
  }

 private:
  std::atomic<const View*> view_{nullptr};
};

struct Instruction {
  Kind kind = kOperator;
  std::optional<c10::OperatorHandle> op;
  bool counts_versions = false;
  py::object target;
  std::vector<Argument> arguments; // those by name last
  py::object names; // of the arguments by name, as a tuple
  std::vector<int64_t> results; // registers; -1 for what nothing reads
  std::vector<int64_t> freed; // the inverse of a register's number: only if it holds a copy
  std::unique_ptr<FirstView> view; // of an operator that makes one of its first argument, or a list of them
  Draw draw = kNoDraw; // of an operator
  std::vector<Argument> drawn_from; // the saved state, the generator and the operator's own generator
};

struct Parameter {
  std::vector<int64_t> items; // registers of a sequence's items
  int64_t index = -1; // the register of a value that is no sequence
  bool emptied = false; // true for a list that is emptied once it is read
};

struct Program {
  int64_t registers = 0;
  std::vector<Parameter> parameters;
  std::vector<Instruction> instructions;
  Argument returned;
  py::object draw_lock;
};

// Return a number as the tensor that operators take for it. As in a call from Python, its bytes count while the operator runs:
// workspaces are measured by either.
IValue wrap_number(const IValue& number) {
  at::Tensor wrapped = c10::scalar_to_tensor(number.toScalar());
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  return wrapped;
}

IValue to_value(py::handle object) {
  PyObject* given = object.ptr();
  if (THPVariable_Check(given)) {
    return THPVariable_Unpack(given);
  }
  if (given == Py_None) {
    return {};
  }
  if (PyBool_Check(given)) {
    return given == Py_True;
  }
  if (PyFloat_Check(given)) { // NumPy's doubles are floats too
    return PyFloat_AS_DOUBLE(given);
  }
  if (PyLong_Check(given)) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow == 0) {
      return number;
    }
  }
  return IValue::make_capsule(c10::make_intrusive<Object>(borrow(given)));
}

py::object to_object(const IValue& value) {
  if (value.isTensor()) {
    return steal(THPVariable_Wrap(value.toTensor()));
  }
  if (value.isCapsule()) {
    return c10::static_intrusive_pointer_cast<Object>(value.toCapsule())->object;
  }
  return torch::jit::toPyObject(value);
}

py::object build_object(const Argument& argument, const Registers& registers) {
  switch (argument.form) {
    case kConstant:
      return argument.object;
    case kRegister:
      return to_object(registers[argument.index]);
    case kList: {
      py::list list(argument.items.size());
      for (size_t i = 0; i < argument.items.size(); i++) {
        list[i] = build_object(argument.items[i], registers);
      }
      return list;
    }
    case kTuple: {
      py::tuple tuple(argument.items.size());
      for (size_t i = 0; i < argument.items.size(); i++) {
        tuple[i] = build_object(argument.items[i], registers);
      }
      return tuple;
    }
    case kSlice: {
      py::object ends[3];
      for (size_t i = 0; i < 3; i++) {
        ends[i] = build_object(argument.items[i], registers);
      }
      return steal(PySlice_New(ends[0].ptr(), ends[1].ptr(), ends[2].ptr()));
    }
  }
  TORCH_INTERNAL_ASSERT(false, "an argument has the unknown form ", static_cast<int64_t>(argument.form));
}

IValue build_value(const Argument& argument, const Registers& registers) {
  if (argument.form == kConstant) {
    return argument.number_is_tensor ? wrap_number(argument.constant) : argument.constant;
  }
  if (argument.form == kRegister) {
    const IValue& value = registers[argument.index];
    if (value.isScalar()) {
      if (argument.number_is_tensor) {
        return wrap_number(value);
      }
      if (argument.is_float) {
        return value.toScalar().toDouble();
      }
    }
    return value;
  }
  if (argument.is_optional) {
    c10::List<std::optional<at::Tensor>> list;
    list.reserve(argument.items.size());
    for (const Argument& item : argument.items) {
      list.push_back(build_value(item, registers).toOptional<at::Tensor>());
    }
    return list;
  }
  c10::List<at::Tensor> list;
  list.reserve(argument.items.size());
  for (const Argument& item : argument.items) {
    list.push_back(build_value(item, registers).toTensor());
  }
  return list;
}

// The dispatch keys of a thread, which are as before at the end.
//
// A Python mode around the step, such as a counter of FLOPs, sees operators after autograd has decomposed them: it keeps the keys.
class DispatchKeys {
 public:
  DispatchKeys()
      : has_modes_(c10::impl::TorchDispatchModeTLS::any_modes_set()),
        outside_(c10::impl::tls_local_dispatch_key_set()),
        counting_(outside_),
        plain_(outside_) {
    counting_.excluded_ = counting_.excluded_ | c10::autograd_dispatch_keyset;
    plain_.excluded_ = plain_.excluded_ | c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  }

  ~DispatchKeys() {
    leave();
  }

  bool has_modes() const {
    return has_modes_;
  }

  void enter(bool counts_versions) {
    if (has_modes_) {
      return;
    }
    const int now = counts_versions ? 1 : 2;
    if (now != now_) {
      c10::impl::_force_tls_local_dispatch_key_set(counts_versions ? counting_ : plain_);
      now_ = now;
    }
  }

  void leave() {
    if (now_ != 0) {
      c10::impl::_force_tls_local_dispatch_key_set(outside_);
      now_ = 0;
    }
  }

 private:
  const bool has_modes_;
  const c10::impl::LocalDispatchKeySet outside_;
  c10::impl::LocalDispatchKeySet counting_, plain_;
  int now_ = 0;
};

void call_operator(const Instruction& instruction, Registers& registers, torch::jit::Stack& stack, bool has_modes) {
  const at::Tensor* base = nullptr;
  const View* view = nullptr;
  if (instruction.view) {
    const int64_t made = instruction.results[0];
    if (!registers[made].isNone()) {
      return; // for an earlier reader
    }
    base = &registers[instruction.arguments[0].index].toTensor();
    registers.is_copy[made] = registers.is_copy[instruction.arguments[0].index];
    view = instruction.view->get();
    if (view != nullptr && !has_modes && view->is_of(*base)) {
      registers[made] = view->make(*base);
      return;
    }
  }
  stack.clear();
  for (const Argument& argument : instruction.arguments) {
    stack.push_back(build_value(argument, registers));
  }
  instruction.op->callBoxed(stack);
  if (base != nullptr && stack[0].isTensor()) {
    const at::Tensor& made = stack[0].toTensor();
    if (!made.has_storage() || !base->has_storage() || !made.is_alias_of(*base)) {
      registers.is_copy[instruction.results[0]] = true;
    }
  }
  if (base != nullptr && view == nullptr && !has_modes) {
    instruction.view->keep(*base, stack[0]);
  }
  for (size_t i = 0; i < instruction.results.size(); i++) {
    if (instruction.results[i] >= 0) {
      registers[instruction.results[i]] = std::move(stack[i]);
    }
  }
  stack.clear();
}

// Python's lock of all draws of planned steps.
class DrawLock {
 public:
  explicit DrawLock(const py::object& lock) : lock_(lock) {
    py::gil_scoped_acquire held;
    lock_.attr("acquire")();
  }

  ~DrawLock() {
    py::gil_scoped_acquire held;
    lock_.attr("release")();
  }

 private:
  const py::object& lock_;
};

// Call a random operator so that each execution of its op draws the same numbers.
void draw(const Instruction& instruction, Registers& registers, torch::jit::Stack& stack, const py::object& lock) {
  const DrawLock held(lock);
  if (instruction.draw == kDrawOnce) {
    call_operator(instruction, registers, stack, true);
    return;
  }
  at::Tensor state = build_value(instruction.drawn_from[0], registers).toTensor();
  const at::Generator generator = instruction.drawn_from[1].constant.toGenerator();
  const auto own = instruction.drawn_from[2].constant.toOptional<at::Generator>();
  if (instruction.draw == kDrawFirst) {
    state.copy_(get_state(generator)); // what was saved before is outdated: others may have drawn since
  }
  if (own) {
    set_state(*own, state);
    call_operator(instruction, registers, stack, true);
    if (instruction.draw == kDrawFirst) {
      set_state(generator, get_state(*own));
    }
    return;
  }
  if (instruction.draw == kDrawFirst) {
    call_operator(instruction, registers, stack, true);
    return;
  }
  const at::Generator now = generator.clone();
  const auto restore = [&] { set_state(generator, now.get_state()); };
  set_state(generator, state);
  try {
    call_operator(instruction, registers, stack, true);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

void call_function(const Instruction& instruction, Registers& registers) {
  py::gil_scoped_acquire lock;
  py::object result;
  {
    std::vector<py::object> given;
    std::vector<PyObject*> pointers;
    for (const Argument& argument : instruction.arguments) {
      given.push_back(build_object(argument, registers));
      pointers.push_back(given.back().ptr());
    }
    const size_t named = instruction.names ? PyTuple_GET_SIZE(instruction.names.ptr()) : 0;
    result = steal(PyObject_Vectorcall(
        instruction.target.ptr(), pointers.data(), pointers.size() - named, named > 0 ? instruction.names.ptr() : nullptr));
  }
  if (!instruction.results.empty() && instruction.results[0] >= 0) {
    registers[instruction.results[0]] = to_value(result);
    registers.is_copy[instruction.results[0]] = true; // for all that is known
  }
}

void take_item(const Instruction& instruction, Registers& registers) {
  const IValue& sequence = registers[instruction.arguments[0].index];
  IValue& item = registers[instruction.results[0]];
  if (!item.isNone()) {
    return; // for an earlier reader
  }
  registers.is_copy[instruction.results[0]] = registers.is_copy[instruction.arguments[0].index];
  if (sequence.isCapsule()) {
    py::gil_scoped_acquire lock;
    const py::object subscript = build_object(instruction.arguments[1], registers);
    py::object found = steal(PyObject_GetItem(to_object(sequence).ptr(), subscript.ptr()));
    item = to_value(found);
    return;
  }
  const int64_t index = instruction.arguments[1].constant.toInt();
  if (sequence.isTensorList()) {
    item = sequence.toTensorList().get(index < 0 ? sequence.toTensorList().size() + index : index);
  } else if (sequence.isTuple()) {
    item = sequence.toTupleRef().elements()[index];
  } else {
    item = sequence.toListRef()[index];
  }
}

void read_parameters(const Program& program, py::handle given, Registers& registers) {
  for (size_t i = 0; i < program.parameters.size(); i++) {
    const Parameter& parameter = program.parameters[i];
    PyObject* value = PyTuple_GET_ITEM(given.ptr(), i);
    if (parameter.index >= 0) {
      registers[parameter.index] = to_value(value);
      continue;
    }
    const auto sequence = steal(PySequence_Fast(value, "a pass was called without a sequence"));
    TORCH_CHECK_VALUE(
        PySequence_Fast_GET_SIZE(sequence.ptr()) == static_cast<Py_ssize_t>(parameter.items.size()),
        "a pass takes ", parameter.items.size(), " values and got ", PySequence_Fast_GET_SIZE(sequence.ptr()));
    for (size_t item = 0; item < parameter.items.size(); item++) {
      if (parameter.items[item] >= 0) {
        registers[parameter.items[item]] = to_value(PySequence_Fast_GET_ITEM(sequence.ptr(), item));
      }
    }
    if (parameter.emptied) {
      python_objects::check(PyList_SetSlice(value, 0, PyList_GET_SIZE(value), nullptr));
    }
  }
}

py::object run(const Program& program, py::handle given, int64_t& position) {
  Registers registers(program.registers);
  read_parameters(program, given, registers);
  {
    py::gil_scoped_release unlocked;
    DispatchKeys keys;
    torch::jit::Stack stack;
    stack.reserve(16);
    for (const Instruction& instruction : program.instructions) {
      switch (instruction.kind) {
        case kOperator:
          keys.enter(instruction.counts_versions);
          if (instruction.draw == kNoDraw) {
            call_operator(instruction, registers, stack, keys.has_modes());
          } else {
            draw(instruction, registers, stack, program.draw_lock);
          }
          break;
        case kFunction:
          keys.leave();
          call_function(instruction, registers);
          break;
        case kItem:
          take_item(instruction, registers);
          break;
        case kState:
          registers[instruction.results[0]] = get_state(instruction.arguments[0].constant.toGenerator());
          break;
      }
      for (int64_t freed : instruction.freed) {
        const int64_t index = freed < 0 ? ~freed : freed;
        if (freed >= 0 || registers.is_copy[index]) {
          registers[index] = IValue();
        }
      }
      position++;
    }
  }
  return build_object(program.returned, registers);
}

// An argument is a pair of its form and what it holds.
Argument read_argument(py::handle described) {
  const auto pair = py::reinterpret_borrow<py::tuple>(described);
  Argument argument;
  argument.form = static_cast<Form>(pair[0].cast<int64_t>());
  if (argument.form == kConstant) {
    argument.object = pair[1];
  } else if (argument.form == kRegister) {
    argument.index = pair[1].cast<int64_t>();
  } else {
    for (py::handle item : pair[1]) {
      argument.items.push_back(read_argument(item));
    }
  }
  return argument;
}

// Adapt an argument to the type that the schema of an operator has for it.
void adapt(Argument& argument, c10::TypePtr type) {
  if (argument.form == kConstant) {
    const py::object& number = argument.object;
    auto unwrapped = type;
    if (const auto optional = type->cast<c10::OptionalType>()) {
      unwrapped = optional->getElementType();
    }
    const bool is_number = PyFloat_Check(number.ptr()) || PyLong_Check(number.ptr()) || PyComplex_Check(number.ptr());
    argument.number_is_tensor = unwrapped->kind() == c10::TypeKind::TensorType && is_number;
    argument.constant = torch::jit::toIValue(number, argument.number_is_tensor ? c10::NumberType::get() : type, std::nullopt);
    return;
  }
  if (const auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  if (argument.form == kRegister) {
    argument.number_is_tensor = type->kind() == c10::TypeKind::TensorType;
    argument.is_float = type->kind() == c10::TypeKind::FloatType;
    return;
  }
  const auto list = type->cast<c10::ListType>();
  TORCH_CHECK_TYPE(list && (argument.form == kList || argument.form == kTuple), "no list is expected");
  auto item_type = list->getElementType();
  argument.is_optional = item_type->kind() == c10::TypeKind::OptionalType;
  const auto inner = argument.is_optional ? item_type->expectRef<c10::OptionalType>().getElementType() : item_type;
  TORCH_CHECK_TYPE(inner->kind() == c10::TypeKind::TensorType, "a list of other values than tensors has one that varies");
  for (Argument& item : argument.items) {
    adapt(item, item_type);
  }
}

// Whether an instruction makes a view of its first argument, or a list of them, that depends on nothing else.
bool makes_view(const Instruction& instruction) {
  const auto& schema = instruction.op->schema();
  const auto& arguments = instruction.arguments;
  if (schema.is_mutable() || instruction.counts_versions || schema.returns().size() != 1 || instruction.results[0] < 0) {
    return false;
  }
  const bool is_view = schema.returns()[0].alias_info() != nullptr || schema.name().starts_with("aten::unsafe_"); // of an RNN
  const auto is_constant = [](const Argument& argument) { return argument.form == kConstant; };
  return is_view && arguments[0].form == kRegister && std::all_of(arguments.begin() + 1, arguments.end(), is_constant);
}

// A draw is a pair of its kind, and what it draws from.
void read_draw(Instruction& instruction, const py::tuple& described) {
  instruction.draw = static_cast<Draw>(described[0].cast<int64_t>());
  for (py::handle argument : described[1]) {
    instruction.drawn_from.push_back(read_argument(argument));
  }
  if (instruction.draw != kDrawOnce) {
    adapt(instruction.drawn_from[0], c10::TensorType::get());
    adapt(instruction.drawn_from[1], c10::GeneratorType::get());
    adapt(instruction.drawn_from[2], c10::OptionalType::create(c10::GeneratorType::get()));
  }
}

Instruction read_instruction(py::handle described) {
  const auto fields = py::reinterpret_borrow<py::tuple>(described);
  Instruction instruction;
  instruction.kind = static_cast<Kind>(fields[0].cast<int64_t>());
  for (py::handle argument : fields[2]) {
    instruction.arguments.push_back(read_argument(argument));
  }
  for (py::handle result : fields[4]) {
    instruction.results.push_back(result.cast<int64_t>());
  }
  for (py::handle freed : fields[5]) {
    instruction.freed.push_back(freed.cast<int64_t>());
  }
  if (instruction.kind == kOperator) {
    const auto name = py::reinterpret_borrow<py::tuple>(fields[1]);
    const auto schema_name = name[0].cast<std::string>(), overload = name[1].cast<std::string>();
    instruction.op = c10::Dispatcher::singleton().findSchemaOrThrow(schema_name.c_str(), overload.c_str());
    const auto options = py::reinterpret_borrow<py::tuple>(fields[3]);
    instruction.counts_versions = options[0].cast<bool>();
    if (!options[1].is_none()) {
      read_draw(instruction, py::reinterpret_borrow<py::tuple>(options[1]));
    }
    const auto& expected = instruction.op->schema().arguments();
    TORCH_CHECK_TYPE(expected.size() == instruction.arguments.size(), "the schema has other arguments");
    for (size_t i = 0; i < expected.size(); i++) {
      adapt(instruction.arguments[i], expected[i].type());
    }
    if (makes_view(instruction)) {
      instruction.view = std::make_unique<FirstView>();
    }
  } else if (instruction.kind == kFunction) {
    instruction.target = fields[1];
    instruction.names = fields[3];
  } else if (instruction.kind == kState) {
    adapt(instruction.arguments[0], c10::GeneratorType::get());
  } else if (instruction.arguments[1].form == kConstant && PyLong_Check(instruction.arguments[1].object.ptr())) {
    instruction.arguments[1].constant = instruction.arguments[1].object.cast<int64_t>();
  }
  return instruction;
}

std::unique_ptr<Program> read_program(py::handle described) {
  const auto fields = py::reinterpret_borrow<py::tuple>(described);
  auto program = std::make_unique<Program>();
  program->registers = fields[0].cast<int64_t>();
  for (py::handle each : fields[1]) {
    const auto parts = py::reinterpret_borrow<py::tuple>(each);
    Parameter parameter;
    if (parts[1].is_none()) {
      parameter.index = parts[0].cast<int64_t>();
    } else {
      for (py::handle item : parts[1]) {
        parameter.items.push_back(item.cast<int64_t>());
      }
    }
    parameter.emptied = parts[2].cast<bool>();
    program->parameters.push_back(std::move(parameter));
  }
  for (py::handle each : fields[2]) {
    program->instructions.push_back(read_instruction(each));
  }
  program->returned = read_argument(fields[3]);
  program->draw_lock = fields[4];
  return program;
}

void drop_program(PyObject* capsule) {
  delete static_cast<Program*>(PyCapsule_GetPointer(capsule, nullptr));
}

} // namespace

extern "C" {

// Register the operators of this library. Not by TORCH_LIBRARY, whose failure, while the library is loaded, ends the process.
PyObject* passes_register() {
  HANDLE_TH_ERRORS
  static const std::unique_ptr<torch::Library> library = register_operators();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Return whether an operator can be called with such arguments: an instruction of kind kOperator.
PyObject* passes_accepts(PyObject* instruction) {
  HANDLE_TH_ERRORS
  try {
    read_instruction(instruction);
  } catch (const c10::Error&) {
    Py_RETURN_FALSE;
  } catch (const std::exception&) { // a conversion by pybind11
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* passes_new(PyObject* described) {
  HANDLE_TH_ERRORS
  auto program = read_program(described);
  PyObject* capsule = PyCapsule_New(program.get(), nullptr, drop_program);
  if (capsule != nullptr) {
    program.release();
  }
  return capsule;
  END_HANDLE_TH_ERRORS
}

// Run a program on a tuple of arguments; `position` gets the number of instructions that were executed.
PyObject* passes_run(PyObject* capsule, PyObject* given, int64_t* position) {
  HANDLE_TH_ERRORS
  *position = 0;
  return run(*static_cast<Program*>(PyCapsule_GetPointer(capsule, nullptr)), given, *position).release().ptr();
  END_HANDLE_TH_ERRORS
}

} // extern "C"
