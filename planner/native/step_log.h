// A step of an eager loop: `StepLog` of planner.train.eager.step_log describes it. Logs were lists of Python's: a third of the time that
// recording took near the budget.

#pragma once

#include "python_objects.h"
#include "tracked_storage.h"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// Returns a hash of numbers and of one more.
inline uint64_t mix(uint64_t mixed, uint64_t number) {
  mixed = (mixed ^ number) * 0x9E3779B97F4A7C15;
  return mixed ^ mixed >> 32;
}

using StorageNumbers = c10::SmallVector<int64_t, 3>; // in a step

struct [[gnu::visibility("hidden")]] LoggedOp {
  pybind11::object target;
  StorageNumbers inputs, made, written;
  double time_s = 0;
  bool recomputable = false, random = false, backward = false;
  int64_t node = -1, workspace_bytes = 0;
  pybind11::object module;
};

struct [[gnu::visibility("hidden")]] StepLog {
  int64_t add_storage(int64_t size_bytes);
  void count_op(int64_t target, uint64_t shapes); // the last one; `shapes`: 0 if they follow from the sizes of what it makes
  void note_released(int64_t storage, bool is_only_saved);
  bool is_begun_as(const StepLog& log) const;

  struct Total { // of the ops up to one
    uint64_t chain = 0, structure = 0;
    int64_t made_bytes = 0;
  };

  int64_t held_bytes;
  std::vector<LoggedOp> ops{};
  std::vector<Total> totals{1}; // before each op, and after the last
  std::vector<int64_t> sizes_bytes{}, only_saved{}, evicted{};
  std::vector<bool> is_released{};
  std::vector<std::pair<int64_t, size_t>> unpacked{}, released{};
  std::vector<WeakStoragePtr> references{};
  std::shared_ptr<StepLog> followed{};
};

pybind11::object step_log_type();
