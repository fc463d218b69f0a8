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
  PyObject *device, *watch, *base, *evicted_aliases, *snapshots, *ledger_id; // None or null if there is none
  PyObject *chain, *aliases; // null if there are none
};

inline TrackedStorage& storage_of(pybind11::handle object) {
  return *reinterpret_cast<TrackedStorage*>(object.ptr());
}

pybind11::object new_tracked_storage(int64_t size_bytes, pybind11::handle device, bool pinned);

// Returns the chain of a storage, and the aliases of its saved tensors.
PyObject* chain_of(pybind11::handle storage);
PyObject* aliases_of(pybind11::handle storage);
