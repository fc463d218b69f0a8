// Objects that guards read: whether a step, its modules and what else it holds are as they were when all guards passed.
//
// A check compares the addresses that a dict, a list or a tuple holds, and what guards ask of a tensor. Objects are checked after
// those that hold them, so that one whose memory was freed is never read, and only values whose contents are not checked have to be
// kept alive, by the caller: another object at the same address that looks the same is as good.

#include <Python.h>

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <vector>

namespace {

namespace py = pybind11;

// What guards ask of a tensor.
struct TensorState {
  c10::DispatchKeySet keys;
  caffe2::TypeMeta dtype;
  c10::Device device;
  bool requires_grad;
  c10::SmallVector<int64_t, 5> sizes, strides;

  explicit TensorState(const at::Tensor& tensor)
      : keys(tensor.key_set()),
        dtype(tensor.dtype()),
        device(tensor.device()),
        requires_grad(tensor.requires_grad()),
        sizes(tensor.sizes()),
        strides(tensor.strides()) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.key_set() == keys && tensor.dtype() == dtype && tensor.device() == device &&
        tensor.requires_grad() == requires_grad && tensor.sizes() == sizes && tensor.strides() == strides;
  }
};

struct Entry {
  PyObject* key; // nullptr in a list or a tuple
  PyObject* value; // nullptr for any
};

struct Stored {
  PyObject* object;
  PyTypeObject* type;
  PyObject* container = nullptr; // the dict of its attributes, or itself
  size_t entries = 0; // the number of those in the container
  uint64_t version = 0; // of a container that had them
  std::optional<TensorState> tensor = std::nullopt;
};

struct NamedValue {
  PyObject *table, *key, *value; // nullptr for none
};

struct StoredValues {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set(); // of the thread, which guards on tensors read
  std::vector<Stored> objects;
  std::vector<Entry> entries;
  std::vector<NamedValue> names;
  std::vector<PyObject*> tensors; // some of the objects; None in place of others
};

// A number that each write to a dict changes, and no other dict has; 0 of what has none, such as all dicts since Python 3.12.
uint64_t get_version([[maybe_unused]] PyObject* container) {
#if PY_VERSION_HEX < 0x030C0000
  return PyDict_Check(container) ? reinterpret_cast<PyDictObject*>(container)->ma_version_tag : 0;
#else
  return 0;
#endif
}

bool has_entries(PyObject* container, const Entry* expected, size_t count) {
  if (PyDict_Check(container)) {
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    size_t i = 0;
    for (; PyDict_Next(container, &position, &key, &value) != 0; i++) {
      if (i == count || key != expected[i].key || (expected[i].value != nullptr && value != expected[i].value)) {
        return false;
      }
    }
    return i == count;
  }
  if (PySequence_Fast_GET_SIZE(container) != static_cast<Py_ssize_t>(count)) {
    return false;
  }
  PyObject** items = PySequence_Fast_ITEMS(container);
  for (size_t i = 0; i < count; i++) {
    if (expected[i].value != nullptr && items[i] != expected[i].value) {
      return false;
    }
  }
  return true;
}

bool are_unchanged(StoredValues& values) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  if (keys.included_ != values.keys.included_ || keys.excluded_ != values.keys.excluded_) {
    return false;
  }
  const Entry* entries = values.entries.data();
  for (Stored& stored : values.objects) {
    if (Py_TYPE(stored.object) != stored.type) {
      return false;
    }
    if (stored.tensor) {
      if (!stored.tensor->is_of(THPVariable_Unpack(stored.object))) {
        return false;
      }
      continue;
    }
    if (stored.container != stored.object) {
      const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(stored.object, nullptr));
      if (dict.ptr() != stored.container) {
        PyErr_Clear();
        return false;
      }
    }
    const uint64_t version = get_version(stored.container);
    if (version == 0 || version != stored.version) {
      if (!has_entries(stored.container, entries, stored.entries)) {
        return false;
      }
      stored.version = version;
    }
    entries += stored.entries;
  }
  for (const NamedValue& name : values.names) {
    if (PyDict_GetItemWithError(name.table, name.key) != name.value) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

// Each object is a tuple of itself, its container, the keys and the values of that; names are tuples of a dict, keys and values.
std::unique_ptr<StoredValues> read_values(py::handle objects, py::handle names, py::handle any, py::handle tensors) {
  const auto find = [&](py::handle value) { return value.is(any) ? nullptr : value.ptr(); };
  auto values = std::make_unique<StoredValues>();
  for (py::handle each : objects) {
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    const py::handle object = fields[0];
    auto& stored = values->objects.emplace_back(Stored{object.ptr(), Py_TYPE(object.ptr())});
    if (THPVariable_Check(object.ptr())) {
      stored.tensor.emplace(THPVariable_Unpack(object.ptr()));
      continue;
    }
    const auto keys = py::reinterpret_borrow<py::tuple>(fields[2]), held = py::reinterpret_borrow<py::tuple>(fields[3]);
    stored.container = py::handle(fields[1]).ptr();
    stored.entries = held.size();
    for (size_t i = 0; i < held.size(); i++) {
      values->entries.push_back({i < keys.size() ? py::handle(keys[i]).ptr() : nullptr, find(held[i])});
    }
  }
  for (py::handle each : names) {
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    const auto keys = py::reinterpret_borrow<py::tuple>(fields[1]), held = py::reinterpret_borrow<py::tuple>(fields[2]);
    for (size_t i = 0; i < keys.size(); i++) {
      values->names.push_back({py::handle(fields[0]).ptr(), py::handle(keys[i]).ptr(), find(held[i])});
    }
  }
  for (py::handle tensor : tensors) {
    values->tensors.push_back(tensor.ptr());
  }
  return values;
}

void drop_values(PyObject* capsule) {
  delete static_cast<StoredValues*>(PyCapsule_GetPointer(capsule, nullptr));
}

} // namespace

extern "C" {

PyObject* stored_values_new(PyObject* objects, PyObject* names, PyObject* any, PyObject* tensors) {
  HANDLE_TH_ERRORS
  auto values = read_values(objects, names, any, tensors);
  PyObject* capsule = PyCapsule_New(values.get(), nullptr, drop_values);
  if (capsule != nullptr) {
    values.release();
  }
  return capsule;
  END_HANDLE_TH_ERRORS
}

// Return the list of the tensors if all is as it was, else None.
PyObject* stored_values_find_unchanged(PyObject* capsule) {
  HANDLE_TH_ERRORS
  auto& values = *static_cast<StoredValues*>(PyCapsule_GetPointer(capsule, nullptr));
  if (!are_unchanged(values)) {
    Py_RETURN_NONE;
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.tensors.size()));
  for (size_t i = 0; list != nullptr && i < values.tensors.size(); i++) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), Py_NewRef(values.tensors[i]));
  }
  return list;
  END_HANDLE_TH_ERRORS
}

} // extern "C"
