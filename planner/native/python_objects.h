// Python's objects, without the calls that pybind11 makes of attributes and numbers.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <pybind11/pybind11.h>

#include <array>
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

inline py::object boolean(bool value) {
  return borrow(value ? Py_True : Py_False);
}

// An instance of a named tuple.
template <size_t N>
inline py::object new_tuple(py::handle type, std::array<py::object, N> values) {
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  auto made = steal(of->tp_alloc(of, N));
  for (size_t i = 0; i < N; ++i) {
    PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), values[i].release().ptr());
  }
  return made;
}

} // namespace python_objects
