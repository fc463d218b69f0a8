// The log of a step: step_log.h describes it.

#include "step_log.h"

#include <pybind11/stl.h>

#include <iterator>

namespace py = pybind11;

using namespace python_objects;

template <>
struct pybind11::detail::type_caster<StorageNumbers> : pybind11::detail::list_caster<StorageNumbers, int64_t> {};

int64_t StepLog::add_storage(int64_t size_bytes) {
  sizes_bytes.push_back(size_bytes);
  is_released.push_back(false);
  return std::ssize(sizes_bytes) - 1;
}

void StepLog::count_op(int64_t target, uint64_t shapes) {
  const auto& op = ops.back();
  auto [chain, structure, made_bytes] = totals.back();
  structure = mix(structure, static_cast<uint64_t>(target));
  for (const auto* numbers : {&op.inputs, &op.made, &op.written}) {
    structure = mix(structure, numbers->size());
    for (const auto storage : *numbers) {
      structure = mix(structure, static_cast<uint64_t>(storage));
    }
  }
  chain = mix(mix(chain, structure), shapes);
  for (const auto storage : op.made) {
    const auto size_bytes = sizes_bytes[static_cast<size_t>(storage)];
    made_bytes += size_bytes;
    chain = shapes == 0 ? mix(chain, static_cast<uint64_t>(size_bytes)) : chain;
  }
  totals.push_back({chain, structure, made_bytes});
}

void StepLog::note_released(int64_t storage, bool is_only_saved) {
  if (const auto place = static_cast<size_t>(storage); !is_released[place]) {
    is_released[place] = true;
    released.emplace_back(storage, ops.size());
    if (is_only_saved) {
      only_saved.push_back(storage);
    }
  }
}

bool StepLog::is_begun_as(const StepLog& log) const {
  return log.ops.size() <= ops.size() && totals[log.ops.size()].chain == log.totals.back().chain;
}

py::object step_log_type() {
  static const auto* total = new py::object(py::class_<StepLog::Total>(py::handle(), "Total", py::module_local())
                                                .def_readonly("chain", &StepLog::Total::chain)
                                                .def_readonly("structure", &StepLog::Total::structure)
                                                .def_readonly("made_bytes", &StepLog::Total::made_bytes));
  static_cast<void>(total);
  static py::object* type = new py::object(
      py::class_<StepLog, std::shared_ptr<StepLog>>(py::handle(), "StepLog", py::module_local())
          .def(py::init([](int64_t held_bytes) { return StepLog{held_bytes}; }))
          .def_readonly("held_bytes", &StepLog::held_bytes)
          .def_readonly("sizes_bytes", &StepLog::sizes_bytes)
          .def_readonly("unpacked", &StepLog::unpacked)
          .def_readonly("released", &StepLog::released)
          .def_readonly("only_saved", &StepLog::only_saved)
          .def_readwrite("evicted", &StepLog::evicted)
          .def_readwrite("followed", &StepLog::followed)
          .def_property_readonly("ops", [](const StepLog& log) {
            py::list found;
            for (const auto& op : log.ops) {
              found.append(py::make_tuple(op.target, op.inputs, op.made, op.written, op.time_s, op.recomputable, op.random, op.backward,
                                          op.node, op.workspace_bytes, op.module));
            }
            return found;
          })
          .def("__len__", [](const StepLog& log) { return log.ops.size(); })
          .def("get_total", [](const StepLog& log, size_t ops) { return log.totals.at(ops); })
          .def_property_readonly("total", [](const StepLog& log) { return log.totals.back(); })
          .def("is_begun_as", &StepLog::is_begun_as)
          // For logs that are made by hand.
          .def("add_storage", &StepLog::add_storage)
          .def("add_op", [](StepLog& log, const py::tuple& op) {
            const auto numbers = [&](size_t i) { return op[i].cast<StorageNumbers>(); };
            const auto is = [&](size_t i) { return op[i].cast<bool>(); };
            log.ops.push_back({op[0], numbers(1), numbers(2), numbers(3), to_double(op[4]), is(5), is(6), is(7), to_int(op[8]),
                               to_int(op[9]), op[10]});
            log.count_op(py::hash(op[0]), 0);
          })
          .def("note_unpacked", [](StepLog& log, int64_t storage) { log.unpacked.emplace_back(storage, log.ops.size()); })
          .def("note_released", &StepLog::note_released, py::arg("storage"), py::arg("only_saved") = false));
  return *type;
}
