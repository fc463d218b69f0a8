// A CPU allocator that serves the requests of recorded steps from a slab, at addresses that were planned for them.
//
// The requests of a step come in the same order each time. While a recording is active in a thread, the allocator notes the
// size of each request there and when it is freed. While a slab is active, the requests are matched with those of the recording,
// and each is given its planned address, unless a tensor that is alive overlaps it: memory in use is never given away, whatever
// callers hold. So several steps may have addresses in one slab. All other requests, and those of other threads, go to the
// allocator that was there before.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kAhead = 16; // requests that may be skipped where one does not come

struct Recording {
  std::vector<int64_t> sizes, ends; // ends: requests that came before it was freed; -1 if it was not
  std::vector<void*> pointers;
};

struct Slab {
  char* base;
  int64_t size_bytes;
  int64_t live = 0; // blocks in use
  bool owned = true;
};

struct Addresses {
  int64_t least_bytes;
  std::vector<int64_t> sizes, offsets; // of each request; an offset of -1 is outside of the slab
};

struct Block {
  char* end;
  Slab* slab;
};

// The slab or recording that serves a thread.
struct Active {
  Recording* recording = nullptr;
  Slab* slab = nullptr;
  Addresses* addresses = nullptr;
  int64_t next = 0, end = 0; // requests of the pass
  int64_t unmatched_bytes = 0, occupied_bytes = 0;
};

thread_local Active active;
// Never destroyed: tensors may be freed after everything else, when the process ends.
std::mutex& mutex = *new std::mutex;
std::map<char*, Block>& blocks = *new std::map<char*, Block>; // in use, of all slabs
auto& recorded = *new std::unordered_map<void*, std::pair<Recording*, int64_t>>;
c10::Allocator* before = nullptr;

void unmap_unused(Slab* slab) {
  if (!slab->owned && slab->live == 0) {
    munmap(slab->base, slab->size_bytes);
    delete slab;
  }
}

// Gives the whole pages from `begin` to `end` back to the system.
void give_back(char* begin, char* end) {
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) / kPage * kPage;
  const uintptr_t behind = reinterpret_cast<uintptr_t>(end) / kPage * kPage;
  if (first < behind) {
    madvise(reinterpret_cast<void*>(first), behind - first, MADV_DONTNEED);
  }
}

void release(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto block = blocks.find(static_cast<char*>(pointer));
    if (block != blocks.end()) {
      Slab* slab = block->second.slab;
      blocks.erase(block);
      --slab->live;
      unmap_unused(slab);
      return;
    }
    auto known = recorded.find(pointer);
    if (known != recorded.end()) {
      auto [recording, index] = known->second;
      recording->ends[index] = static_cast<int64_t>(recording->sizes.size());
      recorded.erase(known);
    }
  }
  before->raw_deleter()(pointer);
}

// Returns false if an overlapping block is in use.
bool take(Slab* slab, char* begin, int64_t size_bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  char* end = begin + size_bytes;
  auto following = blocks.lower_bound(begin);
  if (following != blocks.end() && following->first < end) {
    return false;
  }
  if (following != blocks.begin() && std::prev(following)->second.end > begin) {
    return false;
  }
  blocks.emplace_hint(following, begin, Block{end, slab});
  ++slab->live;
  return true;
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const auto size_bytes = static_cast<int64_t>(n);
    if (active.slab != nullptr && size_bytes >= active.addresses->least_bytes) {
      if (char* pointer = placed(size_bytes)) {
        return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
      }
    } else if (active.recording != nullptr && n != 0) {
      return noted(n);
    }
    return before->allocate(n);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static char* placed(int64_t size_bytes) {
    Active& now = active;
    Addresses* addresses = now.addresses;
    for (int64_t i = now.next; i < now.end && i < now.next + kAhead; ++i) {
      if (addresses->sizes[i] != size_bytes) {
        continue;
      }
      now.next = i + 1;
      if (addresses->offsets[i] < 0) {
        return nullptr;
      }
      char* begin = now.slab->base + addresses->offsets[i];
      if (take(now.slab, begin, size_bytes)) {
        return begin;
      }
      now.occupied_bytes += size_bytes;
      return nullptr;
    }
    now.unmatched_bytes += size_bytes;
    return nullptr;
  }

  static c10::DataPtr noted(size_t n) {
    c10::DataPtr data = before->allocate(n);
    void* pointer = data.release_context();
    Recording* recording = active.recording;
    std::lock_guard<std::mutex> guard(mutex);
    recorded[pointer] = {recording, static_cast<int64_t>(recording->sizes.size())};
    recording->sizes.push_back(static_cast<int64_t>(n));
    recording->ends.push_back(-1);
    recording->pointers.push_back(pointer);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
};

} // namespace

extern "C" {

// Puts the allocator in place, once. Returns false if the one before is of a kind that cannot be behind it.
bool arena_install() {
  std::lock_guard<std::mutex> guard(mutex);
  if (before == nullptr) {
    c10::Allocator* found = c10::GetCPUAllocator();
    if (found->raw_deleter() == nullptr) {
      return false;
    }
    before = found;
    c10::SetCPUAllocator(new ArenaAllocator, UINT8_MAX);
  }
  return true;
}

Recording* arena_new_recording() {
  return new Recording;
}

void arena_drop_recording(Recording* recording) {
  std::lock_guard<std::mutex> guard(mutex);
  for (auto known = recorded.begin(); known != recorded.end();) {
    known = known->second.first == recording ? recorded.erase(known) : std::next(known);
  }
  delete recording;
}

int64_t arena_requests(Recording* recording) {
  std::lock_guard<std::mutex> guard(mutex);
  return static_cast<int64_t>(recording->sizes.size());
}

// Writes size, end and address of each request.
void arena_read(Recording* recording, int64_t* sizes, int64_t* ends, int64_t* addresses) {
  std::lock_guard<std::mutex> guard(mutex);
  for (size_t i = 0; i < recording->sizes.size(); ++i) {
    sizes[i] = recording->sizes[i];
    ends[i] = recording->ends[i];
    addresses[i] = reinterpret_cast<int64_t>(recording->pointers[i]);
  }
}

void arena_record(Recording* recording) {
  active.recording = recording;
}

// Returns null if there is no memory.
Slab* arena_new_slab(int64_t size_bytes) {
  void* base = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return nullptr;
  }
  madvise(base, size_bytes, MADV_HUGEPAGE);
  return new Slab{static_cast<char*>(base), size_bytes};
}

void arena_drop_slab(Slab* slab) {
  std::lock_guard<std::mutex> guard(mutex);
  slab->owned = false;
  unmap_unused(slab);
}

// Gives the pages from `end_bytes` on back to the system, except those that blocks in use reach into.
void arena_trim(Slab* slab, int64_t end_bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  char* const end = slab->base + slab->size_bytes;
  char* unused = slab->base + end_bytes;
  for (auto block = blocks.lower_bound(slab->base); block != blocks.end() && block->first < end; ++block) {
    give_back(unused, block->first);
    unused = std::max(unused, block->second.end);
  }
  give_back(unused, end);
}

int64_t arena_base(Slab* slab) {
  return reinterpret_cast<int64_t>(slab->base);
}

Addresses* arena_new_addresses(int64_t least_bytes, int64_t count, const int64_t* sizes, const int64_t* offsets) {
  return new Addresses{least_bytes, {sizes, sizes + count}, {offsets, offsets + count}};
}

void arena_drop_addresses(Addresses* addresses) {
  delete addresses;
}

// Serves requests of this thread at `addresses` in `slab`, from the one with the number `first` to the one before `end`.
void arena_serve(Slab* slab, Addresses* addresses, int64_t first, int64_t end) {
  active.slab = slab;
  active.addresses = addresses;
  active.next = first;
  active.end = end;
  active.unmatched_bytes = active.occupied_bytes = 0;
}

// Ends recording or serving in this thread; writes the bytes that were to be in the slab and are not, as no request like it was
// recorded there, or as the place was occupied.
void arena_stop(int64_t* missed) {
  missed[0] = active.unmatched_bytes;
  missed[1] = active.occupied_bytes;
  active = Active{};
}

} // extern "C"
