// The Python type of records: recorded_op.h describes it.

#include "recorded_op.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>

#include <new>

namespace {

namespace py = pybind11;
using namespace python_objects;

struct OpObject {
  PyObject_HEAD
  PyObject* weak_references;
  OpFields fields;
};

OpFields& fields_of(PyObject* self) {
  return reinterpret_cast<OpObject*>(self)->fields;
}

int visit_fields(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (const auto& read : fields_of(self).reads) {
    Py_VISIT(read.storage.ptr());
  }
  Py_VISIT(fields_of(self).references.ptr());
  return 0;
}

int clear_fields(PyObject* self) {
  const auto reads = std::exchange(fields_of(self).reads, {});
  const auto references = std::exchange(fields_of(self).references, {});
  return 0;
}

void drop_op(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_TRASHCAN_BEGIN(self, drop_op)
  PyObject_ClearWeakRefs(self);
  fields_of(self).~OpFields();
  auto* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
  Py_TRASHCAN_END
}

// Returns the list of an op's inputs, with the geometry that its pattern has of them.
py::object list_references(OpFields& fields) {
  if (!fields.references) {
    const py::list shared = fields.pattern.attr("inputs");
    py::list made;
    for (size_t i = 0; i < fields.reads.size(); ++i) {
      const auto& read = fields.reads[i];
      const py::object geometry = shared[i];
      const auto field = [&](Py_ssize_t place) { return borrow(PyTuple_GET_ITEM(geometry.ptr(), place)); };
      made.append(new_tuple<8>(py::type::handle_of(geometry), {read.storage, number(read.version), field(2), field(3), number(read.offset),
                                                               field(5), boolean(read.conjugated), boolean(read.negated)}));
    }
    fields.references = std::move(made);
  }
  return fields.references;
}

py::object list_outputs(const OpFields& fields) {
  py::list made;
  for (const auto& [position, storage] : fields.made) {
    made.append(py::make_tuple(position, storage));
  }
  return made;
}

py::object list_kept(const OpFields& fields) {
  py::tuple made(fields.kept.size());
  for (size_t i = 0; i < fields.kept.size(); ++i) {
    made[i] = steal(THPStorage_Wrap(fields.kept[i]));
  }
  return made;
}

// Returns a value, or Python's error.
template <typename Made>
PyObject* return_made(Made make) {
  try {
    return py::object(make()).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

template <py::object OpFields::* field>
PyObject* get_object(PyObject* self, void*) {
  return Py_NewRef((fields_of(self).*field).ptr());
}

template <int64_t OpFields::* field>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(fields_of(self).*field);
}

template <bool OpFields::* field>
PyObject* get_flag(PyObject* self, void*) {
  return PyBool_FromLong(fields_of(self).*field);
}

PyObject* get_of_pattern(PyObject* self, void* name) {
  return PyObject_GetAttrString(fields_of(self).pattern.ptr(), static_cast<const char*>(name));
}

int set_recordable(PyObject* self, PyObject* value, void*) {
  fields_of(self).recordable = value == Py_True;
  return 0;
}

int set_ledger_id(PyObject* self, PyObject* value, void*) {
  fields_of(self).ledger_id = borrow(value);
  return 0;
}

int set_kept(PyObject* self, PyObject* value, void*) {
  c10::SmallVector<c10::Storage, 2> kept;
  for (auto storage : borrow(value).cast<py::tuple>()) {
    kept.push_back(THPStorage_Unpack(storage.ptr()));
  }
  std::swap(fields_of(self).kept, kept);
  return 0;
}

template <auto make>
PyObject* get_made(PyObject* self, void*) {
  return return_made([&] { return make(fields_of(self)); });
}

PyGetSetDef* attributes() {
  const auto shared = [](const char* name) { return PyGetSetDef{name, &get_of_pattern, nullptr, nullptr, const_cast<char*>(name)}; };
  static PyGetSetDef found[] = {
      shared("operator"),
      shared("function"),
      shared("args"),
      shared("kwargs"),
      shared("grad_enabled"),
      shared("settings"),
      {"inputs", &get_made<list_references>, nullptr, nullptr, nullptr},
      {"kept", &get_made<list_kept>, &set_kept, nullptr, nullptr},
      {"known", &get_object<&OpFields::known>, nullptr, nullptr, nullptr},
      {"recordable", &get_flag<&OpFields::recordable>, &set_recordable, nullptr, nullptr},
      {"outputs", &get_made<list_outputs>, nullptr, nullptr, nullptr},
      {"in_place", &get_flag<&OpFields::in_place>, nullptr, nullptr, nullptr},
      {"room_bytes", &get_number<&OpFields::room_bytes>, nullptr, nullptr, nullptr},
      {"seconds", &get_object<&OpFields::seconds>, nullptr, nullptr, nullptr},
      {"draws", &get_object<&OpFields::draws>, nullptr, nullptr, nullptr},
      {"ledger_id", &get_object<&OpFields::ledger_id>, &set_ledger_id, nullptr, nullptr},
      {"module", &get_object<&OpFields::module>, nullptr, nullptr, nullptr},
      {"number", &get_number<&OpFields::number>, nullptr, nullptr, nullptr},
      {}};
  return found;
}

PyTypeObject* op_type() {
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, sizeof(PyObject), READONLY, nullptr}, {}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&drop_op)}, {Py_tp_traverse, reinterpret_cast<void*>(&visit_fields)},
      {Py_tp_clear, reinterpret_cast<void*>(&clear_fields)}, {Py_tp_getset, attributes()}, {Py_tp_members, members}, {0, nullptr}};
  static PyType_Spec spec = {"planner.native.RecordedOp", sizeof(OpObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(steal(PyType_FromSpec(&spec)).release().ptr());
  return type;
}

} // namespace

py::object copy_recorded_op(const OpFields& fields) {
  auto* type = op_type();
  auto made = steal(type->tp_alloc(type, 0));
  new (&fields_of(made.ptr())) OpFields(fields);
  return made;
}

OpFields& fields_of_op(py::handle record) {
  return fields_of(record.ptr());
}
