// The Python type of storages: tracked_storage.h describes it.

#include "tracked_storage.h"

#include "op_records.h"

#include <c10/core/Storage.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

namespace py = pybind11;
using namespace python_objects;

PyTypeObject* storage_type = nullptr; // never freed

// What may lead back to a storage.
constexpr PyObject* TrackedStorage::* kTraversed[] = {
    &TrackedStorage::base, &TrackedStorage::snapshots, &TrackedStorage::chain};

int visit_fields(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (const auto field : kTraversed) {
    Py_VISIT(storage_of(self).*field);
  }
  return 0;
}

int clear_fields(PyObject* self) {
  for (const auto field : kTraversed) {
    Py_CLEAR(storage_of(self).*field);
  }
  return 0;
}

void drop_storage(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_TRASHCAN_BEGIN(self, drop_storage)
  PyObject_ClearWeakRefs(self);
  clear_fields(self);
  Py_CLEAR(storage_of(self).device);
  Py_CLEAR(storage_of(self).watch);
  Py_CLEAR(storage_of(self).ledger_id);
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
  Py_TRASHCAN_END
}

PyObject* create_storage(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"size_bytes", "device", "pinned", nullptr};
  long long size_bytes = 0;
  PyObject* device = nullptr;
  int pinned = 0;
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "LO|$p", const_cast<char**>(names), &size_bytes, &device, &pinned) == 0) {
    return nullptr;
  }
  return new_tracked_storage(size_bytes, device, pinned != 0).release().ptr();
}

PyObject* get_chain(PyObject* self, void*) {
  return Py_XNewRef(chain_of(self));
}

int set_chain(PyObject* self, PyObject* value, void*) {
  Py_XSETREF(storage_of(self).chain, Py_XNewRef(value));
  return 0;
}

PyObject* move_aliases(PyObject* self, PyObject* tensor) {
  HANDLE_TH_ERRORS
  for (auto* saved = storage_of(self).first; saved != nullptr; saved = saved->next) {
    const auto device = saved->alias.device();
    auto none = [&] { return c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, device), nullptr, false); };
    saved->alias.unsafeGetTensorImpl()->set_storage_keep_dtype(tensor == Py_None ? none() : THPVariable_Unpack(tensor).storage());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* find_alias(PyObject* self, PyObject*) {
  const auto& storage = storage_of(self);
  return storage.first == nullptr || storage.address == 0 ? Py_NewRef(Py_None) : THPVariable_Wrap(storage.first->alias);
}

template <typename Field>
PyMemberDef describe(const char* name, int kind, Field TrackedStorage::* field) {
  const TrackedStorage example{};
  const auto offset = reinterpret_cast<const char*>(&(example.*field)) - reinterpret_cast<const char*>(&example);
  return {name, kind, offset, 0, nullptr};
}

} // namespace

py::object new_tracked_storage(int64_t size_bytes, py::handle device, bool pinned) {
  auto made = steal(storage_type->tp_alloc(storage_type, 0));
  auto& storage = storage_of(made);
  storage.size_bytes = size_bytes;
  storage.device = Py_NewRef(device.ptr());
  storage.pinned = pinned;
  storage.last_read = -1;
  return made;
}

PyObject* chain_of(py::handle storage) {
  auto*& chain = storage_of(storage).chain;
  return chain != nullptr ? chain : chain = PyList_New(0);
}

extern "C" {

// Returns the type of storages, with the methods of a Python class.
PyObject* eager_storage_type(PyObject* methods) {
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr},
      describe("size_bytes", T_LONGLONG, &TrackedStorage::size_bytes),
      describe("version", T_LONGLONG, &TrackedStorage::version),
      describe("address", T_LONGLONG, &TrackedStorage::address),
      describe("saved", T_LONGLONG, &TrackedStorage::saved),
      describe("last_read", T_LONGLONG, &TrackedStorage::last_read),
      describe("checked", T_LONGLONG, &TrackedStorage::checked),
      describe("step", T_LONGLONG, &TrackedStorage::step),
      describe("number", T_LONGLONG, &TrackedStorage::number),
      describe("touched_s", T_DOUBLE, &TrackedStorage::touched_s),
      describe("pinned", T_BOOL, &TrackedStorage::pinned),
      describe("barred", T_BOOL, &TrackedStorage::barred),
      describe("evicted", T_BOOL, &TrackedStorage::evicted),
      describe("device", T_OBJECT, &TrackedStorage::device),
      describe("watch", T_OBJECT, &TrackedStorage::watch),
      describe("base", T_OBJECT, &TrackedStorage::base),
      describe("snapshots", T_OBJECT, &TrackedStorage::snapshots),
      describe("ledger_id", T_OBJECT, &TrackedStorage::ledger_id),
      {}};
  static PyGetSetDef made[] = {{"chain", &get_chain, &set_chain, nullptr, nullptr}, {}};
  static PyMethodDef functions[] = {
      {"move_aliases", &move_aliases, METH_O, nullptr}, {"find_alias", &find_alias, METH_NOARGS, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&drop_storage)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&visit_fields)},
                                {Py_tp_clear, reinterpret_cast<void*>(&clear_fields)},
                                {Py_tp_new, reinterpret_cast<void*>(&create_storage)},
                                {Py_tp_getset, made},
                                {Py_tp_members, members},
                                {Py_tp_methods, functions},
                                {0, nullptr}};
  static PyType_Spec spec = {"planner.native.TrackedStorage", sizeof(TrackedStorage), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  if (storage_type == nullptr) {
    storage_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpecWithBases(&spec, methods));
  }
  return Py_XNewRef(reinterpret_cast<PyObject*>(storage_type));
}

} // extern "C"
