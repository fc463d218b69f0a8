// The contents that saved tensors are computed from: sources.cpp describes them.

#pragma once

#include "memory.h"
#include "recomputation.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <map>
#include <utility>
#include <vector>

using Written = c10::SmallVector<StoragePtr, 1>; // storages, without duplicates

// The saved tensors of autograd, and what they can be recomputed from. `Sources` of planner.train.eager.storages describes what Python
// sees of them.
class [[gnu::visibility("hidden")]] Sources {
 public:
  Sources(pybind11::object memory, pybind11::object recomputation);

  // Notes that a storage has its first saved tensor, or none any more.
  void add_saved(TrackedStorage& storage);
  void remove_saved(TrackedStorage& storage);

  bool has_saved() const {
    return !saved.empty();
  }

  // Copies pinned storages that are about to be written, if saved tensors may have to be recomputed from them. Pins those saved tensors
  // instead, if they are smaller. Other tensors computed from them are pinned when they are read.
  void copy_before_writes(const pybind11::object& operator_, const Written& written);

  // Pins a resident storage and returns true if contents that it is computed from were lost; else returns false. Sources that were pinned
  // after an op had read them are kept by that op from now on.
  bool pin_if_lost(TrackedStorage& storage);

  // Keeps a resident storage, because its contents can no longer be recomputed.
  void pin(TrackedStorage& storage);

  // Begins again, because no tensor is saved.
  void forget();

  // Drops the records of storages that no saved tensor is computed from, and pins these storages. A record keeps the inputs that
  // cannot be recomputed, as the batches from which a gradient was accumulated.
  void forget_unneeded();

  std::vector<TrackedStorage*> saved;
  int64_t pinned = 0, copies = 0;

 private:
  using Contents = std::pair<const TrackedStorage*, int64_t>; // a pinned storage and the version, an unpinned one and -1
  using Readers = std::map<Contents, std::vector<const TrackedStorage*>>;

  const Readers& find_readers();
  std::vector<StoragePtr> find_saved_readers(const TrackedStorage& storage);
  bool pin_instead(std::vector<StoragePtr> readers, int64_t size_bytes);

  const pybind11::object memory_object_, recomputation_object_;
  Memory& memory_;
  Recomputation& recomputation_;
  int64_t copied_bytes_ = 0; // in this step
  Readers readers_;
  int64_t readers_packs_ = -1; // `Memory::packs` when they were found
  const python_objects::Name function_{"function"};
};

pybind11::object sources_type();
