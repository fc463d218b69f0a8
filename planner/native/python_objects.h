// Python's objects, without the calls that pybind11 makes of attributes and numbers.

#pragma once

#include <Python.h>

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

namespace python_objects {

namespace py = pybind11;

inline py::object steal(PyObject* made) {
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(made);
}

inline py::object borrow(PyObject* object) {
  return py::reinterpret_borrow<py::object>(object);
}

inline void check(int failed) {
  if (failed < 0) {
    throw py::error_already_set();
  }
}

inline py::object number(int64_t value) {
  return steal(PyLong_FromLongLong(value));
}

// Drops an object, with the interpreter lock. Statics may hold it until Python has ended: then it is leaked.
inline void drop_object(py::object& object) {
  if (Py_IsInitialized() == 0) {
    object.release();
    return;
  }
  const py::gil_scoped_acquire held;
  object = py::object();
}

inline int64_t to_int(py::handle value) {
  const auto found = PyLong_AsLongLong(value.ptr());
  check(found == -1 && PyErr_Occurred() != nullptr ? -1 : 0);
  return found;
}

inline double to_double(py::handle value) {
  const auto found = PyFloat_AsDouble(value.ptr());
  check(found == -1 && PyErr_Occurred() != nullptr ? -1 : 0);
  return found;
}

// The name of an attribute.
class [[gnu::visibility("hidden")]] Name {
 public:
  explicit Name(const char* name) : name_(steal(PyUnicode_InternFromString(name))) {}

  py::object of(py::handle object) const {
    return steal(PyObject_GetAttr(object.ptr(), name_.ptr()));
  }

  template <typename... Arguments>
  py::object call(py::handle object, const Arguments&... arguments) const {
    return steal(PyObject_CallMethodObjArgs(object.ptr(), name_.ptr(), arguments.ptr()..., nullptr));
  }

 private:
  const py::object name_;
};

// Holds a lock of Python's.
class [[gnu::visibility("hidden")]] Locked {
 public:
  explicit Locked(const py::object& lock) : lock_(lock) {
    static const auto& acquire = *new Name("acquire");
    acquire.call(lock_);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  ~Locked() {
    static const auto& release = *new Name("release");
    const py::error_scope kept;
    release.call(lock_);
  }

 private:
  const py::object& lock_;
};

} // namespace python_objects
