// What undoes a step that fails: copies of the tensors that its forward pass writes over, and their versions.
//
// They are taken in every step. Through the dispatcher and Python, those of the 159 running statistics of a ResNet-50 took 2% of
// a step of eager PyTorch whose kernels are short.

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

#include "python_objects.h"

extern "C" {

// Copy a list of tensors to another list, of contiguous tensors of the same sizes and types on the CPU.
PyObject* undo_copy(PyObject* tensors, PyObject* copies) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard without_graph;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    const at::Tensor& copy = THPVariable_Unpack(PyList_GET_ITEM(copies, i));
    const bool is_plain = tensor.layout() == c10::kStrided && tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() &&
        !tensor.is_neg() && !tensor.key_set().has(c10::DispatchKey::Python);
    if (is_plain && tensor.nbytes() > 0) { // an empty tensor may have no address, which memcpy must not be given
      std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
    } else {
      copy.copy_(tensor);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Return the versions of a list of tensors; 0 of inference tensors, which have none.
PyObject* undo_list_versions(PyObject* tensors) {
  HANDLE_TH_ERRORS
  auto versions = python_objects::steal(PyList_New(PyList_GET_SIZE(tensors)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    const int64_t version = tensor.is_inference() ? 0 : tensor._version();
    PyList_SET_ITEM(versions.ptr(), i, python_objects::number(version).release().ptr());
  }
  return versions.release().ptr();
  END_HANDLE_TH_ERRORS
}

} // extern "C"
