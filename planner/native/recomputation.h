// Recomputation of evicted storages: recomputation.cpp describes it.

#pragma once

#include "memory.h"

#include <unordered_map>
#include <utility>
#include <vector>

class [[gnu::visibility("hidden")]] Rebuild;

// Returns a tensor on all bytes of a storage, even if all tensors on it cover only a part.
at::Tensor view_whole(c10::Storage storage);

// Python's attributes have the same names: `Recomputation` of planner.train.eager.storages describes them.
class [[gnu::visibility("hidden")]] Recomputation {
 public:
  Recomputation(pybind11::object memory, double max_recomputation, pybind11::object costs, pybind11::object lock_of_draws);

  // Makes the current contents of a storage resident, and the storages that it needs. Throws BudgetError if it does not fit, or more
  // ops than allowed are recomputed.
  void recompute(const StoragePtr& storage);

  // Restores the current contents of a resident storage that a failed op may have written in part.
  void restore(const StoragePtr& storage);

  void begin_step();

  bool in_block = true; // else another block may record its ops
  int64_t ops = 0, step_ops = 0;
  double seconds = 0;

  struct Total {
    pybind11::object name;
    int64_t ops = 0;
    double seconds = 0;
  };
  using Totals = std::unordered_map<PyObject*, Total>;
  Totals by_operator, by_module;

 private:
  using Stack = std::vector<Rebuild>;

  at::Tensor rebuild(const StoragePtr& storage, int64_t version);
  Rebuild begin(const StoragePtr& storage, int64_t version);
  void execute(Stack& stack);
  void make_room(const RecordedOp& op, int64_t room_bytes, Stack& stack);
  bool call(const RecordedOp& op, c10::ArrayRef<at::Tensor> sources, Stack& stack, torch::jit::Stack& outputs, double& seconds);
  torch::jit::Stack draw_again(const RecordedOp& op, c10::ArrayRef<at::Tensor> sources);
  void take_outputs(Rebuild& rebuild, const RecordedOp& op, const torch::jit::Stack& outputs);
  void abandon(Rebuild& rebuild);
  void count(const RecordedOp& op, double seconds);

  const pybind11::object memory_object_, costs_, lock_of_draws_;
  Memory& memory_;
  const double max_recomputation_;
  const bool times_each_;
  int64_t ops_before_ = 0;
  const python_objects::Name allocates_first_{"allocates_first"}, check_memory_{"check_memory"}, evict_after_{"evict_after"},
      find_block_{"find_block"}, forget_failures_{"forget_failures"}, function_{"function"}, is_memory_error_{"is_memory_error"},
      raise_too_much_{"raise_too_much"};
};

pybind11::object recomputation_type();
