// The storage of a tensor and its views, in memory or not.
//
// An in-place write makes another version of the contents. The chain has the op that made each version, so that the contents can be
// recomputed: all versions from the first one on, in the same memory.

#pragma once

#include "pooled.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <iterator>
#include <memory>
#include <utility>
#include <vector>

struct RecordedOp;
struct TrackedStorage;
struct Watch;
using StoragePtr = c10::intrusive_ptr<TrackedStorage>;
using WeakStoragePtr = c10::weak_intrusive_ptr<TrackedStorage>;
using Chain = c10::SmallVector<c10::intrusive_ptr<RecordedOp>, 1>;
using Watches = std::vector<std::pair<c10::StorageImpl*, Watch*>>; // with their memory, whose count is read without the watch

// Notes when memory is freed. PyTorch's weak references tell that if they are asked. A Python object for each storage would tell it
// by itself, but counts as a user: then autograd adds up gradients in new memory, which takes longer, and other memory.
struct Watch final : Pooled<Watch> {
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

struct [[gnu::visibility("hidden")]] TrackedStorage final : c10::intrusive_ptr_target, Pooled<TrackedStorage> {
  int64_t size_bytes; // 0 on devices whose memory is not budgeted
  int64_t version = 0; // number of in-place writes since the first contents
  int64_t address = 0; // in memory; 0 if it is not there
  int64_t saved = 0; // number of saved tensors, of which each has an alias that keeps the storage in memory
  size_t saved_place = 0; // in `Sources::saved`
  int64_t last_read = -1; // the last version that a recorded op has read
  int64_t checked = 0; // `Memory::overwrites` when it was last checked that its contents can be recomputed
  int64_t step = 0, number = 0; // in the log
  double touched_s = 0;
  bool pinned; // the current contents cannot be recomputed, and are kept
  bool barred = false, evicted = false;
  std::vector<std::pair<int64_t, at::Tensor>> snapshots; // earlier contents, by version, of a pinned storage
  Chain chain;
  Watch* watch = nullptr; // null if it is not in memory
  struct SavedTensor* first = nullptr; // of a list
  int64_t ledger_id = -1;
  std::shared_ptr<LedgerIds> ids; // of the ledger in which it has that id; null before it is entered
  at::Tensor base; // keeps recomputed contents in memory
  std::shared_ptr<std::vector<TrackedStorage*>> all; // of its memory
  size_t place; // among them

  TrackedStorage(int64_t bytes, bool is_pinned, std::shared_ptr<std::vector<TrackedStorage*>> of);
  ~TrackedStorage() override;

  void release_resources() override;

  // Returns whether the runtime keeps it in memory, and may free it if nothing else holds it.
  bool is_owned() const {
    return !pinned && (base.defined() || (saved > 0 && address != 0));
  }

  // Returns whether the contents of a version can be recomputed by the chain.
  bool is_recomputable(int64_t of_version) const {
    return of_version < std::ssize(chain);
  }

  // Pins it, and drops the records and copies to recompute it.
  void drop_records();

  // Moves the aliases of saved tensors to the storage of a tensor, or to none: then they keep their geometry only.
  void move_aliases(const at::Tensor& tensor);
};

// Returns the copy of the contents of a version; an undefined tensor if there is none.
at::Tensor find_snapshot(const TrackedStorage& storage, int64_t version);
