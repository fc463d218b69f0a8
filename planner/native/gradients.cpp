// Gradients of a planned step, which its node gives to the parameters itself.
//
// A step has an edge to the node of each parameter, which accumulates its gradient. The engine validates, counts and queues these
// edges one by one, and calls the dispatcher for each. Here gradients are given to the parameters in a row, and the step's node
// loses its edges. Whatever could see a difference keeps the engine's way: hooks, gradients of chosen inputs, graphs that stay, and
// other graphs of the same parameters.

#define PY_SSIZE_T_CLEAN
#define AT_PER_OPERATOR_HEADERS
#include <Python.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>
#include <vector>

namespace {

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// Whether the engine would do no more than to call `sum` with `gradient`: nobody else knows that node, neither another graph nor
// another node of this one, and nothing listens to it.
bool is_plain(AccumulateGrad& sum, size_t users, const at::Tensor& gradient, Node& step) {
  const at::Tensor& variable = sum.variable;
  if (!variable.requires_grad() || !variable.is_leaf()) {
    return false;
  }
  const bool has_hooks = !sum.tensor_pre_hooks().empty() || !sum.pre_hooks().empty() || !sum.post_hooks().empty() ||
      !sum.retains_grad_hooks().empty() || sum.tensor_post_acc_grad_hooks() != nullptr;
  const bool fits = gradient.sizes() == variable.sizes() && gradient.dtype() == variable.dtype() &&
      gradient.device() == variable.device() && gradient.layout() == variable.layout();
  return users == 1 && fits && !has_hooks && sum.stream() == step.stream() && !gradient.key_set().has(c10::DispatchKey::Python);
}

// Replace an item of a list by None, which frees what was there.
void take(PyObject* list, size_t item) {
  Py_INCREF(Py_None);
  if (PyList_SetItem(list, static_cast<Py_ssize_t>(item), Py_None) < 0) {
    throw py::error_already_set();
  }
}

// Call `sum` with an item of a list, which is taken from it. A first gradient that only the list holds becomes the parameter's
// own, as there, without the dispatcher, which takes most of the time of such a call.
void add(AccumulateGrad& sum, PyObject* list, size_t item) {
  PyObject* object = PyList_GET_ITEM(list, item);
  const at::Tensor& gradient = THPVariable_Unpack(object);
  const bool has_other_users = Py_REFCNT(object) > 1 || gradient.use_count() > 1;
  if (!has_other_users && !sum.variable.grad().defined() && gradient.layout() == c10::kStrided &&
      torch::autograd::utils::obeys_layout_contract(gradient, sum.variable)) {
    gradient.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false);
    sum.variable.mutable_grad() = gradient;
    take(list, item);
    return;
  }
  at::Tensor added = gradient;
  take(list, item);
  const py::gil_scoped_release unlocked;
  sum({std::move(added)});
}

} // namespace

extern "C" {

// Add a list of gradients to those of the inputs of the step whose context is given, and return True; return False, and do nothing,
// where that is left to autograd, which calls this in the backward pass of the step.
PyObject* gradients_accumulate(PyObject* context, PyObject* gradients) {
  HANDLE_TH_ERRORS
  const auto step = torch::autograd::get_current_node();
  if (torch::autograd::AnomalyMode::is_enabled() || torch::autograd::get_current_graph_task_keep_graph() ||
      !torch::autograd::get_current_graph_task_exec_info()->empty() || !step->post_hooks().empty() ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    Py_RETURN_FALSE;
  }
  std::vector<AccumulateGrad*> sums;
  for (const auto& edge : step->next_edges()) {
    auto* sum = dynamic_cast<AccumulateGrad*>(edge.function.get());
    PyObject* gradient = PyList_GET_ITEM(gradients, sums.size());
    if (sum == nullptr || !THPVariable_Check(gradient) ||
        !is_plain(*sum, edge.function.use_count(), THPVariable_Unpack(gradient), *step)) {
      Py_RETURN_FALSE;
    }
    sums.push_back(sum);
  }
  for (size_t i = 0; i < sums.size(); i++) {
    add(*sums[i], gradients, i);
  }
  step->set_next_edges({});
  reinterpret_cast<THPFunction*>(context)->is_variable_input.clear(); // it returns no gradients for them
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

} // extern "C"
