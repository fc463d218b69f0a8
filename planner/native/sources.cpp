// The contents that saved tensors are computed from: copied or pinned before they are lost.
//
// Known weakness: a constant that is overwritten while saved tensors may have to be recomputed from it is copied, or these tensors are
// pinned if they are smaller. Both take memory that the program did not ask for; copies alone had doubled all parameters where a graph
// stays alive while the optimizer steps.

#include "sources.h"

#include <ATen/ops/clone.h>

#include <algorithm>
#include <set>

namespace py = pybind11;

using namespace python_objects;

namespace {

// Keeps the contents of a pinned storage that an op has read; returns false if they are not resident.
bool keep(const TrackedStorage& source, int64_t version, RecordedOp& op) {
  if (version != source.version) {
    return find_snapshot(source, version).defined();
  }
  return op.keep(source);
}

} // namespace

Sources::Sources(py::object memory, py::object recomputation)
    : memory_object_(std::move(memory)), recomputation_object_(std::move(recomputation)), memory_(memory_object_.cast<Memory&>()),
      recomputation_(recomputation_object_.cast<Recomputation&>()) {}

void Sources::add_saved(TrackedStorage& storage) {
  storage.saved_place = saved.size();
  saved.push_back(&storage);
}

void Sources::remove_saved(TrackedStorage& storage) {
  saved[storage.saved_place] = saved.back();
  saved.back()->saved_place = storage.saved_place;
  saved.pop_back();
}

void Sources::copy_before_writes(const py::object& operator_, const Written& written) {
  for (const auto& object : written) {
    auto& storage = *object;
    if (!storage.pinned || storage.last_read != storage.version) {
      continue;
    }
    const auto readers = has_saved() ? find_saved_readers(storage) : std::vector<StoragePtr>();
    if (readers.empty() || pin_instead(readers, storage.size_bytes)) {
      ++memory_.overwrites;
      continue;
    }
    memory_.make_room(storage.size_bytes, py::str("a copy of the tensor that {} writes").format(function_.of(operator_)));
    const auto copy = view_whole(c10::Storage(storage.watch->memory.lock())).clone();
    memory_.add(copy, nullptr, false);
    storage.snapshots.emplace_back(storage.version, copy);
    ++copies;
    copied_bytes_ += storage.size_bytes;
  }
}

bool Sources::pin_if_lost(TrackedStorage& storage) {
  std::vector<TrackedStorage*> checked{&storage};
  storage.checked = memory_.overwrites;
  for (size_t i = 0; i < checked.size(); ++i) {
    for (const auto& object : checked[i]->chain) {
      auto& op = *object;
      for (const auto& read : op.reads) {
        if (!read.storage) {
          continue;
        }
        auto& source = *read.storage;
        if (source.pinned && keep(source, read.version, op)) {
          continue;
        }
        if (!source.is_recomputable(read.version)) {
          std::for_each(checked.begin(), checked.end(), [](TrackedStorage* passed) { passed->checked = -1; });
          pin(storage);
          return true;
        }
        if (source.checked != memory_.overwrites) {
          source.checked = memory_.overwrites;
          checked.push_back(&source);
        }
      }
    }
  }
  return false;
}

void Sources::pin(TrackedStorage& storage) {
  if (!storage.pinned) {
    ++pinned;
    storage.pinned = true;
    memory_.allow(storage);
    readers_packs_ = -1;
  }
}

void Sources::forget() {
  copied_bytes_ = 0;
  readers_packs_ = -1;
}

void Sources::forget_unneeded() {
  const auto& readers = find_readers();
  for (const auto& storage : memory_.list_storages()) {
    if (!storage->pinned && storage->saved == 0 && readers.count({storage.get(), -1}) == 0) {
      storage->drop_records();
      memory_.allow(*storage);
    }
  }
  readers_packs_ = -1;
}

// Returns the storages of saved tensors that may have to be recomputed from the current contents of a pinned storage.
std::vector<StoragePtr> Sources::find_saved_readers(const TrackedStorage& storage) {
  const auto& readers = find_readers();
  std::set<const TrackedStorage*> found;
  std::vector<Contents> stack{{&storage, storage.version}};
  while (!stack.empty()) {
    const auto read = readers.find(stack.back());
    stack.pop_back();
    if (read == readers.end()) {
      continue;
    }
    for (const auto* reader : read->second) {
      if (found.insert(reader).second) {
        stack.emplace_back(reader, -1);
      }
    }
  }
  std::vector<StoragePtr> kept;
  for (auto* one : saved) {
    if (found.count(one) != 0) {
      kept.push_back(StoragePtr::reclaim_copy(one));
    }
  }
  return kept;
}

// Returns the contents that saved tensors are computed from, each with the storages computed from them.
const Sources::Readers& Sources::find_readers() {
  if (readers_packs_ == memory_.packs) {
    return readers_;
  }
  readers_.clear();
  std::set<const TrackedStorage*> seen(saved.begin(), saved.end());
  std::vector<const TrackedStorage*> stack;
  std::copy_if(saved.begin(), saved.end(), std::back_inserter(stack), [](const TrackedStorage* one) { return !one->pinned; });
  while (!stack.empty()) {
    const auto* reader = stack.back();
    stack.pop_back();
    for (const auto& op : reader->chain) {
      for (const auto& read : op->reads) {
        if (!read.storage) {
          continue;
        }
        const auto& storage = *read.storage;
        if (storage.pinned) {
          readers_[{&storage, read.version}].push_back(reader);
        }
        if (!storage.pinned || storage.is_recomputable(read.version)) {
          readers_[{&storage, -1}].push_back(reader);
          if (seen.insert(&storage).second) {
            stack.push_back(&storage);
          }
        }
      }
    }
  }
  readers_packs_ = memory_.packs;
  return readers_;
}

// Pins storages, resident ones first; returns false if they are larger than an amount and the copies of the step so far.
bool Sources::pin_instead(std::vector<StoragePtr> readers, int64_t size_bytes) {
  int64_t pinned_bytes = 0;
  for (const auto& reader : readers) {
    pinned_bytes += reader->size_bytes;
  }
  if (pinned_bytes > size_bytes + copied_bytes_) {
    return false;
  }
  std::stable_partition(readers.begin(), readers.end(), [](const StoragePtr& reader) { return reader->address != 0; });
  for (const auto& reader : readers) {
    if (reader->address == 0) {
      recomputation_.recompute(reader);
    }
    pin(*reader);
  }
  return true;
}

py::object sources_type() {
  static py::object* type = new py::object(py::class_<Sources>(py::handle(), "Sources", py::module_local())
                                               .def(py::init<py::object, py::object>())
                                               .def_property_readonly("saved", [](const Sources& self) { return self.saved.size(); })
                                               .def_readonly("pinned", &Sources::pinned)
                                               .def_readonly("copies", &Sources::copies)
                                               .def("forget", &Sources::forget)
                                               .def("forget_unneeded", &Sources::forget_unneeded));
  return *type;
}
