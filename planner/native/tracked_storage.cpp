// The Python type of storages: tracked_storage.h describes it.

#include "tracked_storage.h"

#include "op_records.h"

#include <c10/core/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace {

namespace py = pybind11;
using namespace python_objects;

int visit_fields(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (const auto& op : storage_of(self).chain) {
    Py_VISIT(op.ptr());
  }
  return 0;
}

int clear_fields(PyObject* self) {
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
  std::destroy_at(&storage.snapshots);
  std::destroy_at(&storage.chain);
  std::destroy_at(&storage.ids);
  std::destroy_at(&storage.base);
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
  Py_TRASHCAN_END
}

PyObject* find_alias(PyObject* self, PyObject*) {
  const auto& storage = storage_of(self);
  return storage.first == nullptr || storage.address == 0 ? Py_NewRef(Py_None) : THPVariable_Wrap(storage.first->alias);
}

} // namespace

void TrackedStorage::drop_records() {
  pinned = true;
  snapshots.clear();
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
  static PyMemberDef members[] = {{"__weaklistoffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr}, {}};
  static PyMethodDef functions[] = {{"find_alias", &find_alias, METH_NOARGS, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&drop_storage)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&visit_fields)},
                                {Py_tp_clear, reinterpret_cast<void*>(&clear_fields)},
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
  std::construct_at(&storage.snapshots);
  std::construct_at(&storage.chain);
  std::construct_at(&storage.ids);
  std::construct_at(&storage.base);
  storage.size_bytes = size_bytes;
  storage.pinned = pinned;
  storage.last_read = -1;
  return made;
}

at::Tensor find_snapshot(const TrackedStorage& storage, int64_t version) {
  const auto is_it = [&](const auto& snapshot) { return snapshot.first == version; };
  const auto found = std::find_if(storage.snapshots.begin(), storage.snapshots.end(), is_it);
  return found == storage.snapshots.end() ? at::Tensor() : found->second;
}
