// A storage with the attributes of `TrackedStorage` of planner.train.eager.storages. Numbers are not objects here, and the lists are
// made when they are needed: each op reads and makes several.

#pragma once

#include "python_objects.h"

struct TrackedStorage {
  PyObject_HEAD
  PyObject* weak_references;
  long long size_bytes, version, address, saved, last_read, checked, step, number;
  double touched_s;
  bool pinned, barred, evicted;
  PyObject *device, *watch, *base, *snapshots, *ledger_id; // None or null if there is none
  PyObject* chain; // null if there is none
  struct SavedTensor* first; // of a list
};

inline TrackedStorage& storage_of(pybind11::handle object) {
  return *reinterpret_cast<TrackedStorage*>(object.ptr());
}

pybind11::object new_tracked_storage(int64_t size_bytes, pybind11::handle device, bool pinned);

PyObject* chain_of(pybind11::handle storage);
