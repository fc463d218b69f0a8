// Storages: tracked_storage.h describes them.

#include "tracked_storage.h"

#include "op_records.h"
#include "recorded_op.h"

#include <c10/core/Storage.h>

#include <algorithm>
#include <utility>

namespace {

// Drops a chain, and what only its ops hold: without recursion, because a step may be longer than the stack.
void drop(Chain chain) {
  thread_local std::vector<Chain>* waiting = nullptr;
  if (chain.empty()) {
    return;
  }
  if (waiting != nullptr) {
    waiting->push_back(std::move(chain));
    return;
  }
  std::vector<Chain> dropped;
  waiting = &dropped;
  chain.clear();
  while (!dropped.empty()) {
    const auto last = std::move(dropped.back());
    dropped.pop_back();
  }
  waiting = nullptr;
}

} // namespace

TrackedStorage::TrackedStorage(int64_t bytes, bool is_pinned, std::shared_ptr<std::vector<TrackedStorage*>> of)
    : size_bytes(bytes), pinned(is_pinned), all(std::move(of)), place(all->size()) {
  all->push_back(this);
}

TrackedStorage::~TrackedStorage() {
  release_resources();
}

void TrackedStorage::release_resources() {
  if (!all) {
    return;
  }
  (*all)[place] = all->back();
  all->back()->place = place;
  all->pop_back();
  all.reset();
  if (watch != nullptr) {
    watch->storage = nullptr;
  }
  if (ids) {
    ids->storages[static_cast<size_t>(ledger_id)] = nullptr;
    ids->dropped.push_back(ledger_id);
  }
  base.reset();
  snapshots.clear();
  drop(std::move(chain));
}

void TrackedStorage::drop_records() {
  pinned = true;
  snapshots.clear();
  drop(std::move(chain));
}

void TrackedStorage::move_aliases(const at::Tensor& tensor) {
  for (auto* saved = first; saved != nullptr; saved = saved->next) {
    const auto device = saved->alias.device();
    auto none = [&] { return c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, device), nullptr, false); };
    saved->alias.unsafeGetTensorImpl()->set_storage_keep_dtype(tensor.defined() ? tensor.storage() : none());
  }
}

at::Tensor find_snapshot(const TrackedStorage& storage, int64_t version) {
  const auto is_it = [&](const auto& snapshot) { return snapshot.first == version; };
  const auto found = std::find_if(storage.snapshots.begin(), storage.snapshots.end(), is_it);
  return found == storage.snapshots.end() ? at::Tensor() : found->second;
}
