// Executes and records ops near the budget without Python's dispatch, as `Recorder.run` of planner.train.eager.recording does,
// which says what a record is.
//
// The first ops of each signature go through the recorder, which leaves a pattern here: the record of such an op without its
// tensors. The record of a further op is a copy of the pattern with its own tensors. Everything else is the recorder's: ops that
// write, draw random numbers or are measured, room for an op, tensors that it has not seen, errors. So there is one kind of
// records, and without this file nothing but time is different.
//
// Attributes of classes with slots are read and written in place. All others have their names.

#include "op_records.h"

#include <structmember.h>

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace {

py::object steal(PyObject* made) {
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(made);
}

py::object borrow(PyObject* object) {
  return py::reinterpret_borrow<py::object>(object);
}

void check(int failed) {
  if (failed < 0) {
    throw py::error_already_set();
  }
}

py::object number(int64_t value) {
  return steal(PyLong_FromLongLong(value));
}

int64_t to_int(py::handle value) {
  const auto found = PyLong_AsLongLong(value.ptr());
  check(found == -1 && PyErr_Occurred() != nullptr ? -1 : 0);
  return found;
}

double to_double(py::handle value) {
  const auto found = PyFloat_AsDouble(value.ptr());
  check(found == -1 && PyErr_Occurred() != nullptr ? -1 : 0);
  return found;
}

py::object boolean(bool value) {
  return borrow(value ? Py_True : Py_False);
}

py::object tuple_of(c10::IntArrayRef values) {
  auto made = steal(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), number(values[i]).release().ptr());
  }
  return made;
}

// An instance of a named tuple.
template <size_t N>
py::object new_tuple(py::handle type, std::array<py::object, N> values) {
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  auto made = steal(of->tp_alloc(of, N));
  for (size_t i = 0; i < N; ++i) {
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), values[i].release().ptr());
  }
  return made;
}

// The name of an attribute.
class Name {
 public:
  explicit Name(const char* name) : name_(steal(PyUnicode_InternFromString(name))) {}

  py::object of(py::handle object) const {
    return steal(PyObject_GetAttr(object.ptr(), name_.ptr()));
  }

  void set(py::handle object, const py::object& value) const {
    check(PyObject_SetAttr(object.ptr(), name_.ptr(), value.ptr()));
  }

  void add(py::handle object, int64_t value) const {
    set(object, number(to_int(of(object)) + value));
  }

  template <typename... Arguments>
  py::object call(py::handle object, const Arguments&... arguments) const {
    return steal(PyObject_CallMethodObjArgs(object.ptr(), name_.ptr(), arguments.ptr()..., nullptr));
  }

 private:
  py::object name_;
};

// Where the objects of a class have an attribute, one of its __slots__.
class Slot {
 public:
  Slot(py::handle type, const char* name)
      : offset_(reinterpret_cast<PyMemberDescrObject*>(py::object(type.attr(name)).ptr())->d_member->offset) {}

  PyObject*& in(py::handle object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_);
  }

  py::handle of(py::handle object) const {
    return in(object);
  }

  void set(py::handle object, py::object value) const {
    Py_XSETREF(in(object), value.release().ptr());
  }

 private:
  Py_ssize_t offset_;
};

// A class with slots, whose objects can be copied.
class Slotted {
 public:
  explicit Slotted(py::handle type) : type_(borrow(type.ptr())) {
    for (auto name : type.attr("__slots__")) {
      const auto text = name.cast<std::string>();
      if (text != "__weakref__") {
        slots_.emplace_back(type, text.c_str());
      }
    }
  }

  py::object copy(py::handle object) const {
    auto* type = reinterpret_cast<PyTypeObject*>(type_.ptr());
    auto made = steal(type->tp_alloc(type, 0));
    for (const auto& slot : slots_) {
      slot.in(made) = Py_XNewRef(slot.in(object));
    }
    return made;
  }

 protected:
  py::object type_;

 private:
  std::vector<Slot> slots_;
};

// The attributes of planner.train.eager.storages.TrackedStorage that are used here.
struct StorageClass : Slotted {
  explicit StorageClass(py::handle type) : Slotted(type) {}

  Slot address{type_, "address"}, aliases{type_, "aliases"}, chain{type_, "chain"}, checked{type_, "checked"}, device{type_, "device"},
      last_read{type_, "last_read"}, ledger_id{type_, "ledger_id"}, number{type_, "number"}, pinned{type_, "pinned"},
      size_bytes{type_, "size_bytes"}, step{type_, "step"}, touched_s{type_, "touched_s"}, version{type_, "version"},
      watch{type_, "watch"};
};

// Those of RecordedOp.
struct OpClass : Slotted {
  explicit OpClass(py::handle type) : Slotted(type) {}

  Slot args{type_, "args"}, function{type_, "function"}, inputs{type_, "inputs"}, kept{type_, "kept"}, known{type_, "known"},
      kwargs{type_, "kwargs"}, module{type_, "module"}, number{type_, "number"}, operator_{type_, "operator"},
      outputs{type_, "outputs"}, recordable{type_, "recordable"}, room_bytes{type_, "room_bytes"}, seconds{type_, "seconds"};
};

// Those of planner.train.eager.sizes.KnownOp.
struct KnownClass {
  explicit KnownClass(py::handle type)
      : number(type, "number"), out_bytes(type, "out_bytes"), seconds(type, "seconds"), workspace_bytes(type, "workspace_bytes") {}

  Slot number, out_bytes, seconds, workspace_bytes;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(key.data()), key.size() * sizeof(int64_t)});
  }
};

constexpr size_t kMostPatterns = 1 << 14;

class Records final : public OpRecords {
 public:
  explicit Records(const py::tuple& parts)
      : recorder_(parts[0]),
        new_storage_(parts[1]),
        watch_type_(parts[2]),
        reference_type_(parts[3]),
        logged_type_(parts[4]),
        op_(parts[5]),
        known_(parts[6]),
        storage_(new_storage_),
        watch_extra_(watch_type_, "extra_bytes"),
        watch_size_(watch_type_, "size_bytes"),
        watch_storage_(watch_type_, "storage"),
        lock_(recorder_.attr("lock")),
        memory_(recorder_.attr("memory")),
        follower_(recorder_.attr("follower")),
        plans_(follower_.attr("plans")),
        recomputation_(recorder_.attr("recomputation")),
        costs_(recorder_.attr("costs")),
        sources_(recorder_.attr("sources")),
        saved_(sources_.attr("saved")),
        names_(recorder_.attr("module").attr("names")),
        resident_(memory_.attr("resident")),
        freed_(memory_.attr("freed")),
        note_freed_(freed_.attr("append")),
        times_each_(costs_.attr("times_each").cast<bool>()) {}

  Recorded record(const CalledOp& called) override {
    const py::gil_scoped_acquire held;
    acquire.call(lock_);
    const Unlocked at_the_end{*this};
    if (PyObject_IsTrue(running.of(recomputation_).ptr()) == 1) {
      return execute(called) ? Recorded::kDone : Recorded::kFailed;
    }
    const auto found = patterns_.find(called.key);
    if (found == patterns_.end()) {
      return Recorded::kNotKnown;
    }
    settle_freed();
    if (PyDict_GET_SIZE(saved_.ptr()) == 0) {
      return Recorded::kLeft;
    }
    return record_like(found->second, called) ? Recorded::kDone : Recorded::kLeft;
  }

  void learn(const Key& key, PyObject* pattern) override {
    if (patterns_.size() >= kMostPatterns) {
      patterns_.clear();
    }
    patterns_.insert_or_assign(key, borrow(pattern));
  }

 private:
  struct Unlocked {
    const Records& records;

    ~Unlocked() {
      const py::error_scope kept;
      records.release.call(records.lock_);
    }
  };

  // What the copy of a pattern is filled with.
  struct Filled {
    c10::ArrayRef<at::Tensor> inputs;
    py::object references, kept;
    bool recordable;
    size_t next = 0;
  };

  static bool execute(const CalledOp& called) {
    const py::gil_scoped_release unlocked;
    return called.execute();
  }

  bool record_like(const py::object& pattern, const CalledOp& called) {
    auto op = op_.copy(pattern);
    const auto known = borrow(op_.known.in(op));
    Filled filled{called.inputs, py::list(), py::list(), op_.recordable.in(op) == Py_True};
    op_.args.set(op, fill(op_.args.of(op), filled));
    if (PyDict_GET_SIZE(op_.kwargs.in(op)) > 0) {
      py::dict kwargs;
      for (auto [name, value] : borrow(op_.kwargs.in(op)).cast<py::dict>()) {
        kwargs[name] = fill(value, filled);
      }
      op_.kwargs.set(op, std::move(kwargs));
    }
    TORCH_CHECK(filled.next == called.inputs.size(), "the record of an op does not have its tensors");
    op_.inputs.set(op, filled.references);
    op_.kept.set(op, filled.kept);
    op_.recordable.set(op, boolean(filled.recordable));
    op_.module.set(op, borrow(PyList_GetItem(names_.ptr(), called.module)));
    const auto out_bytes = to_int(known_.out_bytes.of(known)), workspace_bytes = to_int(known_.workspace_bytes.of(known));
    const auto with_op_bytes = to_int(live_bytes.of(memory_)) + out_bytes + workspace_bytes;
    if (with_op_bytes > to_int(budget_bytes.of(memory_))) {
      make_room_for.call(recorder_, known, op);
    } else if (with_op_bytes > to_int(peak_bytes.of(memory_))) {
      peak_bytes.set(memory_, number(with_op_bytes));
    }
    if (!run(called, op, known)) {
      return false;
    }
    settle_freed();
    const auto made_bytes = record_outputs(called, op, known, workspace_bytes);
    if (const auto log = log_.of(follower_); !log.is_none()) {
      log_op(log, op, known);
    }
    if (made_bytes != out_bytes) {
      make_room.call(memory_, number(0), op_.function.of(op));
    }
    return true;
  }

  // Returns arguments with references in place of tensors.
  py::object fill(py::handle values, Filled& filled) {
    if (values.ptr() == Py_Ellipsis) {
      TORCH_CHECK(filled.next < filled.inputs.size(), "the record of an op does not have its tensors");
      return refer(filled.inputs[filled.next++], filled);
    }
    if (!PyList_CheckExact(values.ptr())) {
      return borrow(values.ptr());
    }
    const auto size = PyList_GET_SIZE(values.ptr());
    auto made = steal(PyList_New(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyList_SET_ITEM(made.ptr(), i, fill(PyList_GET_ITEM(values.ptr(), i), filled).release().ptr());
    }
    return made;
  }

  // Returns a reference to a tensor that is read, as `Recorder._replace_by_references` does.
  py::object refer(const at::Tensor& tensor, Filled& filled) {
    const auto storage = find_or_add(tensor);
    const auto version = borrow(storage_.version.in(storage));
    storage_.last_read.set(storage, version);
    auto now_s = read_s.of(memory_);
    if (storage_.ledger_id.of(storage).is_none()) {
      storage_.touched_s.set(storage, std::move(now_s));
    } else {
      touch.call(memory_, storage, now_s);
    }
    if (storage_.pinned.in(storage) == Py_True) {
      check(PyList_Append(filled.kept.ptr(), steal(THPStorage_Wrap(tensor.storage())).ptr()));
    } else if (to_int(storage_.checked.of(storage)) != to_int(overwrites.of(memory_))) {
      filled.recordable = !pin_if_lost.call(sources_, storage).cast<bool>() && filled.recordable;
    }
    auto reference = new_tuple<8>(
        reference_type_,
        {storage, version, tuple_of(tensor.sizes()), tuple_of(tensor.strides()), number(tensor.storage_offset()),
         borrow(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()))), boolean(tensor.is_conj()),
         boolean(tensor.is_neg())});
    check(PyList_Append(filled.references.ptr(), reference.ptr()));
    return reference;
  }

  py::object find_or_add(const at::Tensor& tensor) {
    auto* found = PyDict_GetItemWithError(resident_.ptr(), address_of(tensor).ptr());
    check(found == nullptr && PyErr_Occurred() != nullptr ? -1 : 0);
    return found == nullptr ? add_of_memory.call(memory_, steal(THPVariable_Wrap(tensor))) : borrow(found);
  }

  static py::object address_of(const at::Tensor& tensor) {
    return number(reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl()));
  }

  void settle_freed() {
    if (PyObject_Size(freed_.ptr()) > 0) {
      settle.call(memory_);
    }
  }

  // Executes an op and times it, as `Recorder._execute` does; returns false if it failed.
  bool run(const CalledOp& called, py::handle op, py::handle known) {
    if (!times_each_) {
      forget_failures.call(costs_);
    }
    const auto start = to_double(now.call(memory_));
    if (!execute(called)) {
      return false;
    }
    auto seconds = to_double(now.call(memory_)) - start;
    const auto& shortest_s = known_.seconds;
    if (!times_each_) {
      check_memory.call(costs_, op_.function.of(op));
      seconds = to_double(shortest_s.of(known));
    }
    const auto clock = steal(PyFloat_FromDouble(to_double(clock_s.of(memory_)) + seconds));
    clock_s.set(memory_, clock);
    read_s.set(memory_, clock);
    if (seconds < to_double(shortest_s.of(known))) {
      shortest_s.set(known, steal(PyFloat_FromDouble(seconds)));
    }
    op_.seconds.set(op, borrow(shortest_s.in(known)));
    step_ops.add(recomputation_, 1);
    return true;
  }

  // Records what an op has made, as `Recorder.record` does, and returns its bytes.
  int64_t record_outputs(const CalledOp& called, const py::object& op, py::handle known, int64_t workspace_bytes) {
    const bool recordable = op_.recordable.in(op) == Py_True;
    const auto outputs = called.outputs();
    const bool is_list = outputs.size() == 1 && outputs[0].isTensorList();
    const auto size = is_list ? outputs[0].toTensorVector().size() : outputs.size();
    py::list made;
    int64_t made_bytes = 0;
    for (size_t i = 0; i < size; ++i) {
      if (!is_list && !outputs[i].isTensor()) {
        continue;
      }
      const at::Tensor tensor = is_list ? outputs[0].toTensorVector()[i] : outputs[i].toTensor();
      if (!tensor.defined() || PyDict_Contains(resident_.ptr(), address_of(tensor).ptr()) != 0) {
        continue;
      }
      const auto storage = add(tensor, called, recordable);
      made_bytes += to_int(storage_.size_bytes.of(storage));
      made.append(steal(PyTuple_Pack(2, number(static_cast<int64_t>(i)).ptr(), steal(PyWeakref_NewRef(storage.ptr(), nullptr)).ptr())));
      if (recordable) {
        check(PyList_Append(storage_.chain.in(storage), op.ptr()));
      }
    }
    const bool has_made = PyList_GET_SIZE(made.ptr()) > 0;
    op_.outputs.set(op, std::move(made));
    op_.room_bytes.set(op, number(made_bytes + workspace_bytes));
    known_.out_bytes.set(known, number(made_bytes));
    if (recordable && has_made) {
      count.call(recorder_, op);
    } else if (has_made) {
      kept_ops.add(recorder_, 1);
    }
    return made_bytes;
  }

  // Records that the storage of a new tensor is resident, as `Memory.add` does.
  py::object add(const at::Tensor& tensor, const CalledOp& called, bool recordable) {
    const auto device = device_of(tensor);
    const auto size = called.bytes_of(*tensor.storage().unsafeGetStorageImpl());
    auto size_object = number(size);
    auto storage = storage_.copy(empty_);
    storage_.chain.set(storage, py::list());
    storage_.aliases.set(storage, py::dict());
    storage_.size_bytes.set(storage, size_object);
    storage_.device.set(storage, device);
    storage_.pinned.set(storage, boolean(!recordable));
    storage_.touched_s.set(storage, clock_s.of(memory_));
    storage_.checked.set(storage, overwrites.of(memory_));
    const auto address = address_of(tensor);
    storage_.address.set(storage, address);
    const auto held = steal(THPStorage_Wrap(tensor.storage()));
    const auto watch = steal(PyObject_CallFunctionObjArgs(watch_type_.ptr(), held.ptr(), note_freed_.ptr(), nullptr));
    watch_storage_.set(watch, steal(PyWeakref_NewRef(storage.ptr(), nullptr)));
    watch_size_.set(watch, size_object);
    watch_extra_.set(watch, number(0));
    storage_.watch.set(storage, watch);
    const auto live = to_int(live_bytes.of(memory_)) + size;
    live_bytes.set(memory_, number(live));
    if (live > to_int(peak_bytes.of(memory_))) {
      peak_bytes.set(memory_, number(live));
    }
    const auto eager = live + to_int(evicted_bytes.of(memory_)) - to_int(extra_bytes.of(memory_));
    if (eager > to_int(eager_peak_bytes.of(memory_))) {
      eager_peak_bytes.set(memory_, number(eager));
    }
    check(PyDict_SetItem(resident_.ptr(), address.ptr(), storage.ptr()));
    return storage;
  }

  py::object device_of(const at::Tensor& tensor) {
    const auto found = std::find_if(devices_.begin(), devices_.end(), [&](const auto& pair) { return pair.first == tensor.device(); });
    if (found != devices_.end()) {
      return found->second;
    }
    return devices_.emplace_back(tensor.device(), steal(THPDevice_New(tensor.device()))).second;
  }

  // Logs an op for the plans of repeated steps, as `StepFollower.log_op` does.
  void log_op(const py::object& log, py::handle op, py::handle known) {
    const auto step = step_number.of(follower_);
    py::dict read, made;
    for (auto reference : borrow(op_.inputs.in(op)).cast<py::list>()) {
      number_storage(PyTuple_GET_ITEM(reference.ptr(), 0), log, step, read);
    }
    for (auto output : borrow(op_.outputs.in(op)).cast<py::list>()) {
      number_storage(steal(PyObject_CallNoArgs(PyTuple_GET_ITEM(output.ptr(), 1))), log, step, made);
    }
    const auto operator_ = op_.operator_.of(op);
    const auto node = torch::autograd::get_current_node();
    const auto logged = new_tuple<11>(
        logged_type_,
        {function.of(operator_), steal(PySequence_Tuple(read.ptr())), steal(PySequence_Tuple(made.ptr())), py::tuple(),
         borrow(op_.seconds.in(op)), borrow(op_.recordable.in(op)), random.of(operator_), boolean(node != nullptr),
         number(node == nullptr ? -1 : static_cast<int64_t>(node->sequence_nr())), borrow(known_.workspace_bytes.in(known)),
         borrow(op_.module.in(op))});
    add_op.call(plans_, logged, steal(PyLong_FromVoidPtr(operator_.ptr())), known_.number.of(known));
  }

  // Adds the number of a storage in a step to `numbers`.
  void number_storage(py::handle storage, const py::object& log, const py::object& step, const py::dict& numbers) {
    if (to_int(storage_.step.of(storage)) != to_int(step)) {
      const auto sizes = sizes_bytes.of(log);
      storage_.step.set(storage, step);
      storage_.number.set(storage, number(PyList_GET_SIZE(sizes.ptr())));
      check(PyList_Append(sizes.ptr(), storage_.size_bytes.in(storage)));
      check(PyList_Append(storages.of(follower_).ptr(), steal(PyWeakref_NewRef(storage.ptr(), nullptr)).ptr()));
    }
    check(PyDict_SetItem(numbers.ptr(), storage_.number.in(storage), Py_None));
  }

  const Name acquire{"acquire"}, add_of_memory{"add"}, add_op{"add_op"}, budget_bytes{"budget_bytes"}, check_memory{"check_memory"}, clock_s{"clock_s"},
      count{"_count"}, eager_peak_bytes{"eager_peak_bytes"}, evicted_bytes{"evicted_bytes"}, extra_bytes{"extra_bytes"},
      forget_failures{"forget_failures"}, function{"function"}, kept_ops{"kept_ops"}, live_bytes{"live_bytes"}, log_{"log"},
      make_room{"make_room"}, make_room_for{"_make_room"}, now{"now"}, overwrites{"overwrites"}, peak_bytes{"peak_bytes"},
      pin_if_lost{"pin_if_lost"}, random{"random"}, read_s{"read_s"}, release{"release"}, running{"running"}, settle{"settle"},
      sizes_bytes{"sizes_bytes"}, step_number{"number"}, step_ops{"step_ops"}, storages{"_storages"}, touch{"touch"};

  const py::object recorder_, new_storage_, watch_type_, reference_type_, logged_type_;
  const OpClass op_;
  const KnownClass known_;
  const StorageClass storage_;
  const Slot watch_extra_, watch_size_, watch_storage_;
  const py::object lock_, memory_, follower_, plans_, recomputation_, costs_, sources_, saved_, names_, resident_, freed_, note_freed_;
  const bool times_each_; // ops are done when they return
  const py::object empty_ = new_storage_(0, py::none(), py::arg("pinned") = true);
  std::vector<std::pair<c10::Device, py::object>> devices_;
  std::unordered_map<Key, py::object, KeyHash> patterns_; // records of ops, with Ellipsis in place of tensors
};

} // namespace

std::unique_ptr<OpRecords> new_op_records(PyObject* parts) {
  return std::make_unique<Records>(borrow(parts).cast<py::tuple>());
}
