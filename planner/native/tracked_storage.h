// The storage of a tensor and its views, in memory or not, with the attributes of `TrackedStorage` of planner.train.eager.storages.
// Numbers are not objects here, and the lists are made when they are needed: each op reads and makes several.

#pragma once

#include "python_objects.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

struct TrackedStorage;
struct Watch;
using Watches = std::vector<std::pair<c10::StorageImpl*, Watch*>>; // with their memory, whose count is read without the watch

// Notes when memory is freed. PyTorch's weak references tell that if they are asked. A Python object for each storage would tell it
// by itself, but counts as a user: then autograd adds up gradients in new memory, which takes longer, and other memory.
struct Watch {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  TrackedStorage* storage; // null if it was dropped before its memory
  int64_t size_bytes, extra_bytes; // `extra_bytes`: what plain eager PyTorch does not have of it
  Watches* asked = nullptr; // the list of those that are asked, and its place there; null while the runtime holds it
  size_t place = 0;
};

// The storages of a ledger.
struct LedgerIds {
  std::vector<TrackedStorage*> storages; // by id; null if they were dropped
  std::vector<int64_t> dropped; // since the ledger was told
};

struct [[gnu::visibility("hidden")]] TrackedStorage {
  PyObject_HEAD
  PyObject* weak_references;
  long long size_bytes, version, address, saved, last_read, checked, step, number;
  double touched_s;
  bool pinned, barred, evicted;
  PyObject* snapshots; // None or null if there is none
  c10::SmallVector<pybind11::object, 1> chain; // records
  Watch* watch; // null if it is not in memory
  struct SavedTensor* first; // of a list
  int64_t ledger_id;
  std::shared_ptr<LedgerIds> ids; // of the ledger in which it has that id; null before it is entered
  at::Tensor base; // keeps recomputed contents in memory

  // Returns whether the runtime keeps it in memory, and may free it if nothing else holds it.
  bool is_owned() const {
    return !pinned && (base.defined() || (saved > 0 && address != 0));
  }

  // Pins it, and drops the records and copies to recompute it.
  void drop_records();

  // Moves the aliases of saved tensors to the storage of a tensor, or to none: then they keep their geometry only.
  void move_aliases(const at::Tensor& tensor);
};

inline TrackedStorage& storage_of(pybind11::handle object) {
  return *reinterpret_cast<TrackedStorage*>(object.ptr());
}

inline pybind11::object object_of(TrackedStorage& storage) {
  return python_objects::borrow(reinterpret_cast<PyObject*>(&storage));
}

PyTypeObject* tracked_storage_type();
pybind11::object new_tracked_storage(int64_t size_bytes, bool pinned);

// Returns the copy of the contents of a version; an undefined tensor if there is none.
at::Tensor find_snapshot(const TrackedStorage& storage, int64_t version);
