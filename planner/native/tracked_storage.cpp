// The Python type of storages: tracked_storage.h describes it.

#include "tracked_storage.h"

#include "op_records.h"

#include <c10/core/Storage.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <iterator>
#include <utility>

namespace {

namespace py = pybind11;
using namespace python_objects;

int visit_fields(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(storage_of(self).snapshots);
  for (const auto& op : storage_of(self).chain) {
    Py_VISIT(op.ptr());
  }
  return 0;
}

int clear_fields(PyObject* self) {
  Py_CLEAR(storage_of(self).snapshots);
  const auto dropped = std::exchange(storage_of(self).chain, {});
  return 0;
}

void drop_storage(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_TRASHCAN_BEGIN(self, drop_storage)
  PyObject_ClearWeakRefs(self);
  clear_fields(self);
  auto& storage = storage_of(self);
  if (storage.watch != nullptr) {
    storage.watch->storage = nullptr;
  }
  if (storage.ids) {
    storage.ids->storages[static_cast<size_t>(storage.ledger_id)] = nullptr;
    storage.ids->dropped.push_back(storage.ledger_id);
  }
  std::destroy_at(&storage.chain);
  std::destroy_at(&storage.ids);
  std::destroy_at(&storage.base);
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
  Py_TRASHCAN_END
}

PyObject* get_chain(PyObject* self, void*) {
  const auto& chain = storage_of(self).chain;
  auto* made = PyTuple_New(static_cast<Py_ssize_t>(chain.size()));
  for (size_t i = 0; made != nullptr && i < chain.size(); ++i) {
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), Py_NewRef(chain[i].ptr()));
  }
  return made;
}

PyObject* drop_records(PyObject* self, PyObject*) {
  storage_of(self).drop_records();
  return Py_NewRef(Py_None);
}

PyObject* is_recomputable(PyObject* self, PyObject* version) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(to_int(version) < std::ssize(storage_of(self).chain));
  END_HANDLE_TH_ERRORS
}

PyObject* is_owned(PyObject* self, PyObject*) {
  return PyBool_FromLong(storage_of(self).is_owned());
}

PyObject* has_copy(PyObject* self, PyObject* version) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(find_snapshot(storage_of(self), to_int(version)).defined());
  END_HANDLE_TH_ERRORS
}

PyObject* get_storage(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto* watch = storage_of(self).watch;
  auto held = watch == nullptr ? nullptr : watch->memory.lock();
  return held ? THPStorage_Wrap(c10::Storage(std::move(held))) : Py_NewRef(Py_None);
  END_HANDLE_TH_ERRORS
}

PyObject* find_alias(PyObject* self, PyObject*) {
  const auto& storage = storage_of(self);
  return storage.first == nullptr || storage.address == 0 ? Py_NewRef(Py_None) : THPVariable_Wrap(storage.first->alias);
}

template <typename Field>
PyMemberDef describe(const char* name, int kind, Field TrackedStorage::* field) {
  alignas(TrackedStorage) static const char example[sizeof(TrackedStorage)] = {};
  const auto& storage = *reinterpret_cast<const TrackedStorage*>(example);
  return {name, kind, reinterpret_cast<const char*>(&(storage.*field)) - example, 0, nullptr};
}

} // namespace

void TrackedStorage::drop_records() {
  pinned = true;
  Py_CLEAR(snapshots);
  const auto dropped = std::exchange(chain, {});
}

void TrackedStorage::move_aliases(const at::Tensor& tensor) {
  for (auto* saved = first; saved != nullptr; saved = saved->next) {
    const auto device = saved->alias.device();
    auto none = [&] { return c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, device), nullptr, false); };
    saved->alias.unsafeGetTensorImpl()->set_storage_keep_dtype(tensor.defined() ? tensor.storage() : none());
  }
}

PyTypeObject* tracked_storage_type() {
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr},
      describe("size_bytes", T_LONGLONG, &TrackedStorage::size_bytes),
      describe("version", T_LONGLONG, &TrackedStorage::version),
      describe("address", T_LONGLONG, &TrackedStorage::address),
      describe("saved", T_LONGLONG, &TrackedStorage::saved),
      describe("last_read", T_LONGLONG, &TrackedStorage::last_read),
      describe("checked", T_LONGLONG, &TrackedStorage::checked),
      describe("pinned", T_BOOL, &TrackedStorage::pinned),
      describe("snapshots", T_OBJECT, &TrackedStorage::snapshots),
      {}};
  static PyGetSetDef made[] = {{"chain", &get_chain, nullptr, nullptr, nullptr}, {}};
  static PyMethodDef functions[] = {
      {"is_recomputable", &is_recomputable, METH_O, nullptr}, {"has_copy", &has_copy, METH_O, nullptr},
      {"drop_records", &drop_records, METH_NOARGS, nullptr},
      {"is_owned", &is_owned, METH_NOARGS, nullptr}, {"get_storage", &get_storage, METH_NOARGS, nullptr}, {"find_alias", &find_alias, METH_NOARGS, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&drop_storage)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&visit_fields)},
                                {Py_tp_clear, reinterpret_cast<void*>(&clear_fields)},
                                {Py_tp_getset, made},
                                {Py_tp_members, members},
                                {Py_tp_methods, functions},
                                {0, nullptr}};
  static PyType_Spec spec = {"planner.native.TrackedStorage", sizeof(TrackedStorage), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(steal(PyType_FromSpec(&spec)).release().ptr());
  return type;
}

py::object new_tracked_storage(int64_t size_bytes, bool pinned) {
  auto* type = tracked_storage_type();
  auto made = steal(type->tp_alloc(type, 0));
  auto& storage = storage_of(made);
  std::construct_at(&storage.chain);
  std::construct_at(&storage.ids);
  std::construct_at(&storage.base);
  storage.size_bytes = size_bytes;
  storage.pinned = pinned;
  storage.last_read = -1;
  return made;
}

at::Tensor find_snapshot(const TrackedStorage& storage, int64_t version) {
  if (storage.snapshots == nullptr || storage.snapshots == Py_None) {
    return {};
  }
  auto* found = PyDict_GetItemWithError(storage.snapshots, number(version).ptr());
  check(found == nullptr && PyErr_Occurred() != nullptr ? -1 : 0);
  return found == nullptr ? at::Tensor() : THPVariable_Unpack(found);
}
