// The budgeted memory: which storages are in it, and what is evicted to make room.
//
// What may be evicted follows from one condition, that the runtime alone owns the storage. Before, each event (saved, released,
// computed) told the ledger so by a method of its own. Whether a storage is in use is asked of its reference count when it is to be
// evicted, and not tracked: other C++ code may hold tensors.
//
// The ledger is created and filled when memory first runs out: until then the only bookkeeping of an op is its record.

#include "memory.h"

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

namespace py = pybind11;

namespace {

using namespace python_objects;

// Storages in use are pinned in the ledger; before each search for a victim a few of them are checked again.
constexpr int kAskedAgain = 4;

std::pair<int64_t, int64_t> count_holders(const Watch& watch) {
  const auto object = steal(THPStorage_Wrap(c10::Storage(watch.memory.lock())));
  return {static_cast<int64_t>(watch.memory.use_count()), static_cast<int64_t>(Py_REFCNT(object.ptr()))};
}

// PyTorch's own counts, which differ between its versions.
std::pair<int64_t, int64_t> count_unheld() {
  const at::Tensor tensor = at::empty({0});
  const auto [uses, references] = count_holders({{}, tensor.storage().getWeakStorageImpl(), nullptr, 0, 0});
  return {uses - 1, references};
}

std::set<Memory*>& memories() {
  static auto& all = *new std::set<Memory*>; // never destroyed
  return all;
}

int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl());
}

} // namespace

Memory::Memory(int64_t budget, py::object sizes, py::object new_ledger)
    : budget_bytes(budget), sizes_(std::move(sizes)), new_ledger_(std::move(new_ledger)),
      device_(reinterpret_cast<THPDevice*>(sizes_.attr("device").ptr())->device), unheld_(count_unheld()) {
  memories().insert(this);
}

Memory::~Memory() {
  for (const auto& storage : list_storages()) {
    storage->drop_records();
    end_holding(*storage);
  }
  memories().erase(this);
  for (const auto* asked : {&young_, &old_}) {
    for (auto [memory, watch] : *asked) {
      if (watch->storage != nullptr) {
        watch->storage->watch = nullptr;
      }
      delete watch;
    }
  }
}

double Memory::now() const {
  return clock.is_none() ? std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count()
                         : to_double(clock());
}

TrackedStorage* Memory::find(const at::Tensor& tensor) const {
  const auto found = resident_.find(address_of(tensor));
  return found == resident_.end() ? nullptr : found->second.get();
}

StoragePtr Memory::add(const at::Tensor& tensor, StoragePtr object, bool visible, bool pinned) {
  if (!object) {
    const auto size_bytes = count_bytes(static_cast<int64_t>(tensor.storage().nbytes()), tensor.device());
    object = c10::make_intrusive<TrackedStorage>(size_bytes, pinned, all_);
    object->touched_s = clock_s;
    object->checked = overwrites;
  }
  auto& storage = *object;
  storage.address = address_of(tensor);
  storage.watch = new Watch{{}, tensor.storage().getWeakStorageImpl(), &storage, storage.size_bytes, visible ? 0 : storage.size_bytes};
  if (!storage.is_owned() || !visible) {
    ask(storage.watch, young_);
  }
  live_bytes += storage.size_bytes;
  if (visible) {
    resident_[storage.address] = object;
  } else {
    extra_bytes += storage.size_bytes;
  }
  if (live_bytes > peak_bytes || (visible && live_bytes + evicted_bytes - extra_bytes > eager_peak_bytes)) {
    settle(old_);
    peak_bytes = std::max(peak_bytes, live_bytes);
    eager_peak_bytes = visible ? std::max(eager_peak_bytes, live_bytes + evicted_bytes - extra_bytes) : eager_peak_bytes;
  }
  return object;
}

int64_t Memory::count_bytes(int64_t held_bytes, c10::Device device) const {
  return device.is_cpu() && device_.is_cpu() ? held_bytes
                                             : to_int(count_bytes_.call(sizes_, number(held_bytes), steal(THPDevice_New(device))));
}

int64_t Memory::update_size(TrackedStorage& storage) {
  const auto held = storage.watch == nullptr ? nullptr : storage.watch->memory.lock();
  if (!held) { // its tensor was given another storage
    return 0;
  }
  const auto size_bytes = count_bytes(static_cast<int64_t>(held->nbytes()), held->device());
  const auto grown_bytes = size_bytes - storage.size_bytes;
  live_bytes += grown_bytes;
  storage.size_bytes = storage.watch->size_bytes = size_bytes;
  peak_bytes = std::max(peak_bytes, live_bytes);
  return grown_bytes > 0 ? size_bytes : 0;
}

void Memory::touch(TrackedStorage& storage, double now_s) {
  storage.touched_s = now_s;
  if (const auto id = id_of(storage); id >= 0) {
    ledger_->touch({id}, now_s);
  }
}

// The runtime keeps the tensor.
void Memory::record_computed(TrackedStorage& storage, const at::Tensor& tensor) {
  if (std::exchange(storage.evicted, false)) {
    evicted_bytes -= storage.size_bytes;
  }
  storage.base = make_alias(tensor);
  storage.move_aliases(tensor);
  add(tensor, StoragePtr::reclaim_copy(&storage), storage.saved > 0);
  if (const auto id = id_of(storage); id >= 0) {
    ledger_->note_computed(id);
    allow(storage);
  }
}

// Updates in the ledger if a storage may be evicted: the runtime must own it, and it must not be `in_use`.
void Memory::allow(TrackedStorage& storage, bool in_use) {
  const bool evictable = storage.is_owned() && !in_use;
  if (const auto id = id_of(storage); id >= 0 && storage.barred == evictable) {
    storage.barred = !evictable;
    evictable ? ledger_->unpin(id) : ledger_->pin(id);
  }
}

std::vector<StoragePtr> Memory::list_storages() const {
  std::vector<StoragePtr> found;
  std::transform(all_->begin(), all_->end(), std::back_inserter(found), &StoragePtr::reclaim_copy);
  return found;
}

int64_t Memory::count_resident() {
  settle_all();
  return static_cast<int64_t>(resident_.size());
}

// Pins all storages, and drops the records to recompute them, which no saved tensor needs any more, and which refer to each other where
// storages were written with each other's contents.
void Memory::forget() {
  for (const auto& storage : list_storages()) {
    storage->drop_records();
    storage->last_read = -1;
    drop_base(*storage);
  }
  settle_all();
  ledger_object_ = {};
  ledger_ = nullptr;
  ids_.reset();
  evicted_bytes = 0;
  pending = std::make_shared<Pending>();
  recorded = 0;
  in_use_.clear();
}

void Memory::ask(Watch* watch, Watches& asked) {
  watch->asked = &asked;
  watch->place = asked.size();
  asked.emplace_back(watch->memory._unsafe_get_target(), watch);
}

void Memory::stop_asking(Watch* watch) {
  auto& asked = *std::exchange(watch->asked, nullptr);
  asked[watch->place] = asked.back();
  asked[watch->place].second->place = watch->place;
  asked.pop_back();
}

void Memory::begin_holding(TrackedStorage& storage) {
  if (storage.watch != nullptr && storage.watch->asked != nullptr && storage.watch->extra_bytes == 0) {
    stop_asking(storage.watch);
  }
}

void Memory::end_holding(TrackedStorage& storage) {
  if (storage.watch != nullptr && storage.watch->asked == nullptr) {
    ask(storage.watch, young_);
  }
}

void Memory::begin_step() {
  for (auto [memory, watch] : std::exchange(young_, {})) {
    ask(watch, old_);
  }
}

void Memory::settle() {
  settle(young_);
  if (ids_ && !ids_->dropped.empty()) {
    for (const auto id : std::exchange(ids_->dropped, {})) {
      in_use_.erase(std::remove(in_use_.begin(), in_use_.end(), id), in_use_.end());
      ledger_->drop(id);
    }
  }
}

void Memory::settle_all() {
  settle(old_);
  settle();
}

void Memory::settle(Watches& asked) {
  for (size_t i = 0; i < asked.size();) {
    if (const auto [memory, watch] = asked[i]; c10::raw::weak_intrusive_ptr::use_count(memory) == 0) {
      stop_asking(watch);
      note_freed(watch);
    } else {
      ++i;
    }
  }
}

void Memory::note_freed(Watch* watch) {
  live_bytes -= watch->size_bytes;
  extra_bytes -= watch->extra_bytes;
  if (auto* storage = watch->storage; storage != nullptr && storage->watch == watch) {
    const auto kept = StoragePtr::reclaim_copy(storage);
    if (const auto found = resident_.find(storage->address); found != resident_.end() && found->second == kept) {
      resident_.erase(found);
    }
    storage->address = 0;
    storage->watch = nullptr;
    if (storage->saved == 0) {
      log_release(*storage, false);
    }
    if (const auto id = id_of(*storage); id >= 0) {
      in_use_.erase(std::remove(in_use_.begin(), in_use_.end(), id), in_use_.end());
      ledger_->note_evicted(id);
    }
  }
  delete watch;
}

// Evicts until an amount fits. `at_last`: if nothing can be evicted, what only records and reference cycles hold is freed too, which
// takes long. Throws BudgetError if all storages are in use.
void Memory::make_room(int64_t size_bytes, py::handle purpose, bool at_last) {
  if (!try_to_make_room(size_bytes, at_last)) {
    raise_too_small_.call(borrow(recorder), number(size_bytes), borrow(purpose.ptr()));
  }
}

bool Memory::try_to_make_room(int64_t size_bytes, bool at_last) {
  if (live_bytes + size_bytes > budget_bytes) {
    settle_all();
  }
  while (live_bytes + size_bytes > budget_bytes) {
    if (!evict_planned() && !evict_one() && !(at_last && free_by_collection())) {
      return false;
    }
  }
  return true;
}

bool Memory::free_by_collection() {
  const auto before_bytes = live_bytes;
  for (const auto* free : {&forget_unneeded_, &collect_}) {
    free->call(borrow(recorder));
    settle_all();
    if (live_bytes < before_bytes) {
      return true;
    }
  }
  return false;
}

// Evicts the storage that the heuristic chooses; returns false if all are in use.
bool Memory::evict_one() {
  settle();
  enter_pending();
  for (auto asked = std::min<size_t>(in_use_.size(), kAskedAgain); asked > 0; --asked) {
    ask_again(in_use_.front());
  }
  for (const bool is_last : {false, true}) {
    while (const auto chosen = ledger_->choose_victim(clock_s)) {
      auto& storage = *ids_->storages[static_cast<size_t>(*chosen)];
      if (evict(storage)) {
        return true;
      }
      allow(storage, true);
      in_use_.push_back(*chosen);
    }
    for (auto asked = is_last ? 0 : in_use_.size(); asked > 0; --asked) {
      ask_again(in_use_.front());
    }
  }
  return false;
}

// Evicts as many bytes as the allocator lacked; returns whether anything was evicted.
bool Memory::evict_bytes(int64_t size_bytes) {
  settle_all();
  const auto enough_bytes = live_bytes - size_bytes;
  bool evicted = false;
  while (live_bytes > enough_bytes && evict_one()) {
    evicted = true;
  }
  return evicted;
}

std::optional<bool> Memory::evict_logged(size_t number) {
  const auto storage = number < log->references.size() ? log->references[number].lock() : nullptr;
  return !storage || !storage->is_owned() ? std::nullopt : std::optional(evict(*storage));
}

// Returns false if the storage is in use or not in memory.
bool Memory::evict(TrackedStorage& storage) {
  if (storage.address == 0 || !storage.is_owned() || is_held_elsewhere(storage)) {
    return false;
  }
  const auto kept = StoragePtr::reclaim_copy(&storage);
  if (storage.saved > 0) {
    storage.evicted = true;
    evicted_bytes += storage.size_bytes;
  }
  storage.move_aliases({});
  ++evictions;
  TORCH_INTERNAL_ASSERT(drop_base(storage), "an evicted storage is still in memory");
  settle();
  if (log) {
    log->evicted.push_back(storage.step == step_ ? storage.number : -1);
  }
  return true;
}

bool Memory::drop_base(TrackedStorage& storage) {
  storage.base.reset();
  auto* watch = storage.watch;
  if (watch == nullptr) {
    return true;
  }
  if (watch->memory.use_count() > 0) {
    if (!storage.is_owned()) {
      end_holding(storage);
    }
    return false;
  }
  if (watch->asked != nullptr) {
    stop_asking(watch);
  }
  note_freed(watch);
  return true;
}

bool Memory::is_held_elsewhere(const TrackedStorage& storage) const {
  const auto own = storage.saved + storage.base.defined();
  if (static_cast<int64_t>(storage.watch->memory.use_count()) <= own) {
    return false;
  }
  const auto [uses, references] = count_holders(*storage.watch); // one may be that of a Python object that nothing holds
  return uses > unheld_.first + own || references > unheld_.second;
}

void Memory::ask_again(int64_t id) {
  in_use_.pop_front();
  auto* storage = ids_->storages[static_cast<size_t>(id)];
  if (storage == nullptr || !storage->is_owned()) {
    return;
  }
  if (storage->address == 0 || is_held_elsewhere(*storage)) {
    in_use_.push_back(id);
  } else {
    allow(*storage);
  }
}

// The log of a step.

void Memory::begin_log(std::shared_ptr<StepLog> begun) {
  if (log) {
    log->references.clear();
  }
  log = std::move(begun);
  ++step_;
}

int64_t Memory::number_of(TrackedStorage& storage) {
  if (storage.step != step_) {
    storage.step = step_;
    storage.number = log->add_storage(storage.size_bytes);
    log->references.emplace_back(StoragePtr::reclaim_copy(&storage));
  }
  return storage.number;
}

void Memory::log_release(const TrackedStorage& storage, bool only_saved) {
  if (log && storage.step == step_) {
    log->note_released(storage.number, only_saved);
  }
}

// The ledger.

void Memory::note_recomputed(const RecordedOp& op) {
  if (ids_ && op.ids == ids_) {
    ledger_->note_recomputed(op.ledger_id);
  }
}

void Memory::enter_pending() {
  if (ledger_ == nullptr) {
    ledger_object_ = new_ledger_();
    ledger_ = find_ledger(ledger_object_.ptr());
    keeps_random_ = ledger_object_.attr("heuristic").attr("keeps_random").cast<bool>();
    ids_ = std::make_shared<LedgerIds>();
  }
  const auto entered = std::exchange(pending, std::make_shared<Pending>());
  for (auto*& op : *entered) {
    if (op != nullptr) {
      enter_op(*op);
    }
  }
}

void Memory::enter_op(RecordedOp& op) {
  c10::SmallVector<TrackedStorage*, 8> storages;
  std::vector<int64_t> read, made;
  int64_t moved_bytes = 0;
  for (const auto& input : op.reads) {
    auto* storage = input.storage.get();
    if (storage != nullptr && std::find(storages.begin(), storages.end(), storage) == storages.end()) {
      storages.push_back(storage);
      read.push_back(enter(*storage, std::nullopt));
      moved_bytes += storage->size_bytes;
    }
  }
  int64_t place = 0;
  for (const auto& [position, reference] : op.made) {
    const std::pair<int64_t, int64_t> origin(op.number, place++);
    if (const auto storage = reference.lock()) {
      made.push_back(enter(*storage, origin));
      moved_bytes += storage->size_bytes;
    }
  }
  if (op.draws.has_value() && keeps_random_) {
    std::for_each(made.begin(), made.end(), [&](int64_t id) { ledger_->pin(id); });
  }
  if (op.in_place) {
    read.insert(read.end(), made.begin(), made.end());
  }
  op.ids = ids_;
  op.ledger_id = ledger_->add_op(read, made, ledger_->estimate_s(op.seconds, moved_bytes));
}

// Returns the ledger's id of a storage, and enters it if it is new: with its `origin`, if an op has made it.
int64_t Memory::enter(TrackedStorage& storage, std::optional<std::pair<int64_t, int64_t>> origin) {
  if (storage.ids == ids_) {
    return storage.ledger_id;
  }
  const auto id = ledger_->add_storage(storage.size_bytes, origin);
  storage.ids = ids_;
  storage.ledger_id = id;
  ids_->storages.resize(std::max(ids_->storages.size(), static_cast<size_t>(id) + 1));
  ids_->storages[static_cast<size_t>(id)] = &storage;
  ledger_->touch({id}, storage.touched_s);
  if (storage.address == 0) {
    ledger_->note_evicted(id);
  }
  storage.barred = !storage.is_owned();
  if (storage.barred) {
    ledger_->pin(id);
  }
  return id;
}

// Python.

py::object memory_type() {
  static auto* known = new py::object(py::class_<KnownOp, std::shared_ptr<KnownOp>>(py::handle(), "KnownOp", py::module_local())
                                          .def_readwrite("out_bytes", &KnownOp::out_bytes)
                                          .def_readwrite("seconds", &KnownOp::seconds)
                                          .def_readonly("number", &KnownOp::number)
                                          .def_readwrite("workspace_bytes", &KnownOp::workspace_bytes)
                                          .def_readwrite("guessed", &KnownOp::guessed)
                                          .def_readwrite("needs_block", &KnownOp::needs_block)
                                          .def_readwrite("measurements", &KnownOp::measurements));
  static_cast<void>(known);
  static py::object* type = new py::object(
      py::class_<Memory>(py::handle(), "Memory", py::module_local())
          .def(py::init<int64_t, py::object, py::object>())
          .def_readwrite("budget_bytes", &Memory::budget_bytes)
          .def_property(
              "live_bytes", [](Memory& memory) { memory.settle_all(); return memory.live_bytes; },
              [](Memory& memory, int64_t live_bytes) { memory.live_bytes = live_bytes; })
          .def_readonly("peak_bytes", &Memory::peak_bytes)
          .def_readonly("eager_peak_bytes", &Memory::eager_peak_bytes)
          .def_readonly("evictions", &Memory::evictions)
          .def_readwrite("retries", &Memory::retries)
          .def_readonly("ops", &Memory::ops)
          .def_readonly("recorded", &Memory::recorded)
          .def_readonly("kept_ops", &Memory::kept_ops)
          .def_readonly("host_reads", &Memory::host_reads)
          .def_readonly("packs", &Memory::packs)
          .def_readonly("between_peak_bytes", &Memory::between_peak_bytes)
          .def_readonly("clock_s", &Memory::clock_s)
          .def_readwrite("clock", &Memory::clock)
          .def_property("log", [](const Memory& memory) { return memory.log; }, &Memory::begin_log)
          .def_property_readonly("pending", [](const Memory& memory) { return memory.pending->size(); })
          .def_property_readonly("resident", &Memory::count_resident)
          .def("find_bytes", [](const Memory& memory, py::handle tensor) {
            auto* found = memory.find(THPVariable_Unpack(tensor.ptr()));
            return found == nullptr ? std::nullopt : std::optional(found->size_bytes);
          })
          .def("add", [](Memory& memory, py::handle tensor) { memory.add(THPVariable_Unpack(tensor.ptr()), nullptr, true); })
          .def_static("list_aliases", [] { // of the tensors that autograd has saved in all blocks
            py::list found;
            for (const auto* memory : memories()) {
              for (const auto& storage : memory->list_storages()) {
                if (storage->first != nullptr && storage->address != 0) {
                  found.append(steal(THPVariable_Wrap(storage->first->alias)));
                }
              }
            }
            return found;
          })
          .def("evict_logged", &Memory::evict_logged)
          .def("forget", &Memory::forget)
          .def("settle", &Memory::settle_all)
          .def("make_room", [](Memory& memory, int64_t size_bytes, py::handle purpose) { memory.make_room(size_bytes, purpose); })
          .def("evict_one", &Memory::evict_one)
          .def("evict_bytes", &Memory::evict_bytes));
  return *type;
}
