// The budgeted memory of the eager runtime, and the recomputation of what is evicted: memory.cpp and recomputation.cpp describe them.

#pragma once

#include "op_records.h"
#include "python_objects.h"
#include "recorded_op.h"
#include "step_log.h"
#include "tracked_storage.h"

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <deque>
#include <functional>
#include <optional>
#include <vector>

// The bytes in memory, and the storages that take them. Python's attributes have the same names: `Memory` of
// planner.train.eager.storages describes them.
class [[gnu::visibility("hidden")]] Memory {
 public:
  Memory(int64_t budget_bytes, pybind11::object sizes, pybind11::object new_ledger);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  double now() const;

  // The tracked storage at the memory of a tensor; null if it is not known.
  TrackedStorage* find(const at::Tensor& tensor) const;

  // Notes that the memory of a tensor is that of a storage, or of a new one; `visible`: ops outside of the runtime may read it.
  StoragePtr add(const at::Tensor& tensor, StoragePtr storage, bool visible, bool pinned = true);

  int64_t count_bytes(int64_t held_bytes, c10::Device device) const;
  int64_t update_size(TrackedStorage& storage); // after it may have been resized; returns the size if it has grown, else 0
  void touch(TrackedStorage& storage, double now_s);
  void record_computed(TrackedStorage& storage, const at::Tensor& tensor);
  void note_recomputed(const RecordedOp& op);
  void allow(TrackedStorage& storage, bool in_use = false);
  void forget();

  void begin_holding(TrackedStorage& storage); // for saved tensors: it need not be asked whether it was freed
  void end_holding(TrackedStorage& storage);
  void begin_step(); // what is in memory now is asked less often
  void settle(); // notes what was freed of the tensors that were made in this step
  void settle_all();

  void begin_log(std::shared_ptr<StepLog> begun); // null to log nothing
  int64_t number_of(TrackedStorage& storage); // in the log
  void log_release(const TrackedStorage& storage, bool only_saved); // by the program, or of what `only_saved` tensors held

  void make_room(int64_t size_bytes, pybind11::handle purpose, bool at_last = true);
  bool try_to_make_room(int64_t size_bytes, bool at_last);
  bool evict_one();
  bool evict(TrackedStorage& storage);
  std::optional<bool> evict_logged(size_t storage); // by its number; none if it can no longer be evicted
  bool evict_bytes(int64_t size_bytes);
  bool drop_base(TrackedStorage& storage); // returns whether its memory was freed

  int64_t id_of(const TrackedStorage& storage) const { // in the ledger; -1 if it is not there
    return ids_ && storage.ids == ids_ ? storage.ledger_id : -1;
  }

  std::vector<StoragePtr> list_storages() const; // in memory or not
  int64_t count_resident();

  int64_t budget_bytes, live_bytes = 0, peak_bytes = 0, eager_peak_bytes = 0, evicted_bytes = 0, extra_bytes = 0;
  int64_t evictions = 0, retries = 0, overwrites = 0;
  int64_t ops = 0, recorded = 0, kept_ops = 0, host_reads = 0, packs = 0, between_peak_bytes = 0;
  double clock_s = 0, read_s = 0;
  pybind11::object clock = pybind11::none(); // in place of the real one
  using Pending = std::vector<RecordedOp*>;
  std::shared_ptr<Pending> pending = std::make_shared<Pending>(); // ops that are not in the ledger yet; null where they were dropped
  std::shared_ptr<StepLog> log; // of the step; null if it is not logged
  PyObject* recorder = nullptr; // borrowed: `Recorder` of planner.train.eager.recording
  std::function<bool()> evict_planned = [] { return false; }; // evicts what a plan evicts; returns whether there was something

 private:
  void enter_pending();
  void enter_op(RecordedOp& op);
  int64_t enter(TrackedStorage& storage, std::optional<std::pair<int64_t, int64_t>> origin);
  void ask(Watch* watch, Watches& asked);
  void stop_asking(Watch* watch);
  void settle(Watches& asked);
  void note_freed(Watch* watch);
  bool free_by_collection();
  bool is_held_elsewhere(const TrackedStorage& storage) const;
  void ask_again(int64_t id);

  const pybind11::object sizes_, new_ledger_;
  const c10::Device device_;
  const std::pair<int64_t, int64_t> unheld_; // reference counts of a storage that is not in use, and of its Python object
  const std::shared_ptr<std::vector<TrackedStorage*>> all_ = std::make_shared<std::vector<TrackedStorage*>>();
  ska::flat_hash_map<int64_t, StoragePtr> resident_; // by address
  Watches young_, old_; // memory that the runtime does not hold; of this step, and of before
  pybind11::object ledger_object_;
  EvictionLedger* ledger_ = nullptr;
  bool keeps_random_ = false;
  std::shared_ptr<LedgerIds> ids_;
  int64_t step_ = 0; // of the log
  std::deque<int64_t> in_use_; // ids of storages that are pinned because something uses them
  const python_objects::Name count_bytes_{"count_bytes"}, forget_unneeded_{"forget_unneeded"},
      raise_too_small_{"raise_too_small"}, collect_{"collect_garbage"};
};

pybind11::object memory_type();
