// The node of a planned step in the graph of autograd.
//
// A step has an edge to the node of each parameter, which accumulates its gradient: autograd.grad, hooks and other graphs need them.
// torch.autograd.Function also unpacks each of its inputs, notes its sizes and looks it up among the results: for a U-Net of small
// kernels that was a tenth of the instructions around the passes.
// The engine validates, counts and queues gradients one by one, and calls the dispatcher for each. Here the node gives them to the
// parameters in a row, and loses its edges. Whatever could see a difference keeps the engine's way: hooks, gradients of chosen
// inputs, graphs that stay, and other graphs of the same parameters.

#include <Python.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python_objects.h"

namespace {

namespace py = pybind11;
using python_objects::Name;
using python_objects::steal;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Whether the engine would do no more than to call `sum` with `gradient`: nobody else knows that node, neither another graph nor
// another node of this one, and nothing listens to it.
bool is_plain(AccumulateGrad& sum, size_t users, const at::Tensor& gradient, const std::optional<c10::Stream>& stream) {
  const at::Tensor& variable = sum.variable;
  if (!variable.requires_grad() || !variable.is_leaf()) {
    return false;
  }
  const bool has_hooks = !sum.tensor_pre_hooks().empty() || !sum.pre_hooks().empty() || !sum.post_hooks().empty() ||
      !sum.retains_grad_hooks().empty() || sum.tensor_post_acc_grad_hooks() != nullptr;
  const bool fits = gradient.sizes() == variable.sizes() && gradient.dtype() == variable.dtype() &&
      gradient.device() == variable.device() && gradient.layout() == variable.layout();
  const bool is_on_stream = (variable.is_cpu() ? std::nullopt : sum.stream()) == stream;
  return users == 1 && fits && !has_hooks && is_on_stream && !gradient.key_set().has(c10::DispatchKey::Python);
}

// Replace an item of a list by None, which frees what was there.
void take(PyObject* list, size_t item) {
  python_objects::check(PyList_SetItem(list, static_cast<Py_ssize_t>(item), Py_NewRef(Py_None)));
}

// Call `sum` with an item of a list, which is taken from it. A first gradient that only the list holds becomes the parameter's
// own, as there, without the dispatcher, which takes most of the time of such a call; one that is a view is detached, as there.
void add(AccumulateGrad& sum, PyObject* list, size_t item) {
  PyObject* object = PyList_GET_ITEM(list, item);
  const at::Tensor& gradient = THPVariable_Unpack(object);
  const bool has_other_users = Py_REFCNT(object) > 1 || gradient.use_count() > 1;
  if (!has_other_users && !sum.variable.grad().defined() && gradient.layout() == c10::kStrided &&
      torch::autograd::utils::obeys_layout_contract(gradient, sum.variable)) {
    gradient.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false);
    sum.variable.mutable_grad() = gradient.is_view() ? gradient.detach() : gradient;
    take(list, item);
    return;
  }
  at::Tensor added = gradient;
  take(list, item);
  const py::gil_scoped_release unlocked;
  sum({std::move(added)});
}

// The node of a step, which calls methods of planner.runtime.executor._Step.
struct StepNode final : Node {
  py::object step;
  std::vector<torch::autograd::SavedVariable> saved;

  ~StepNode() override {
    python_objects::drop_object(step);
  }

  std::string name() const override {
    return "PlannedStepBackward";
  }

  void release_variables() override {
    saved.clear();
  }

  variable_list apply(variable_list&& tangents) override {
    static const auto& run_backward = *new Name("run_backward");
    const py::gil_scoped_acquire held;
    const auto unpacked = steal(PyTuple_New(static_cast<Py_ssize_t>(saved.size())));
    for (size_t i = 0; i < saved.size(); i++) {
      PyTuple_SET_ITEM(unpacked.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(saved[i].unpack(getptr())));
    }
    const auto tangent = steal(THPVariable_Wrap(std::move(tangents[0]))); // None if it is undefined
    const py::object gradients = run_backward.call(step, unpacked, tangent);
    variable_list left;
    if (!accumulate(gradients.ptr())) {
      for (size_t i = 0; i < next_edges().size(); i++) {
        PyObject* gradient = PyList_GET_ITEM(gradients.ptr(), i);
        left.push_back(gradient == Py_None ? at::Tensor() : THPVariable_Unpack(gradient));
        take(gradients.ptr(), i);
      }
    }
    return left;
  }

 private:
  // Add a list of gradients to those of the inputs, and return true; do nothing where that is left to the engine.
  bool accumulate(PyObject* gradients) {
    if (torch::autograd::AnomalyMode::is_enabled() || torch::autograd::get_current_graph_task_keep_graph() ||
        !torch::autograd::get_current_graph_task_exec_info()->empty() || !post_hooks().empty() ||
        c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      return false;
    }
    const auto own_stream = stream();
    std::vector<AccumulateGrad*> sums;
    for (const auto& edge : next_edges()) {
      auto* sum = dynamic_cast<AccumulateGrad*>(edge.function.get());
      PyObject* gradient = PyList_GET_ITEM(gradients, sums.size());
      if (sum == nullptr || !THPVariable_Check(gradient) ||
          !is_plain(*sum, edge.function.use_count(), THPVariable_Unpack(gradient), own_stream)) {
        return false;
      }
      sums.push_back(sum);
    }
    for (size_t i = 0; i < sums.size(); i++) {
      add(*sums[i], gradients, i);
    }
    set_next_edges({});
    return true;
  }
};

// Nodes have another kind of pointer up to some release of PyTorch.
using NodePointer = std::decay_t<decltype(torch::autograd::Edge::function)>;

template <typename Pointer, typename Made>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<Made>();
  } else {
    return c10::make_intrusive<Made>();
  }
}

} // namespace

extern "C" {

// Run the forward pass of a step, and return the list of its results: the loss, which gives gradients to the list of the tensors
// that are trained, and others, which have no gradients.
PyObject* step_node_run(PyObject* step, PyObject* trained) {
  HANDLE_TH_ERRORS
  static const auto& run_forward = *new Name("run_forward");
  const auto made = make_node<NodePointer, StepNode>();
  auto& node = static_cast<StepNode&>(*made);
  node.step = python_objects::borrow(step);
  torch::autograd::edge_list edges;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(trained); i++) {
    edges.push_back(torch::autograd::impl::gradient_edge(THPVariable_Unpack(PyList_GET_ITEM(trained, i))));
  }
  node.set_next_edges(std::move(edges));
  const py::tuple returned = [&] {
    const torch::autograd::AutoGradMode without_graph(false);
    return run_forward.call(node.step);
  }();
  for (py::handle each : py::tuple(returned[1])) {
    node.saved.emplace_back(THPVariable_Unpack(each.ptr()), false);
  }
  py::list results(returned[0]);
  for (size_t i = 0; i < results.size(); i++) {
    const at::Tensor& result = THPVariable_Unpack(PyList_GET_ITEM(results.ptr(), i));
    if (result.requires_grad() || result.is_view()) { // an input, or a view with a history of its own
      results[i] = steal(THPVariable_Wrap(result.detach()));
    }
  }
  torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(THPVariable_Unpack(PyList_GET_ITEM(results.ptr(), 0))), made);
  return results.release().ptr();
  END_HANDLE_TH_ERRORS
}

} // extern "C"
