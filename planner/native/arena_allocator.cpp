// A CPU allocator that serves the requests of recorded steps from a slab, at addresses that were planned for them.
//
// The requests of a step come in the same order each time. While a recording is active in a thread, the allocator notes the
// size of each request there and when it is freed. While a slab is active, the requests are matched with those of the recording,
// and each is given its planned address, unless a tensor that is alive overlaps it: memory in use is never given away, whatever
// callers hold. So several steps may have addresses in one slab. All other requests, and those of other threads, go to the
// allocator that was there before.
//
// Between its passes a slab is idle. Requests that go past it, and passes in other slabs, then come on top of its pages: where
// all together would exceed the largest budget of a slab, idle pages are first given back to the system. They come again when a
// pass writes to them. Until then nothing may be in them, so that they do not count for RLIMIT_DATA.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kAhead = 16; // places by which a request may come earlier or later than expected

struct Recording {
  std::vector<int64_t> sizes, ends; // ends: requests that came before it was freed; -1 if it was not
  std::vector<void*> pointers;
};

struct Slab {
  char* base;
  int64_t size_bytes;
  int64_t most_bytes; // of its addresses, at which it may grow
  int64_t live = 0; // blocks in use
  bool owned = true;
  int serving = 0; // passes under way; it is idle if there are none
  int64_t used_bytes = 0; // from its beginning; no page behind these is in memory
  int64_t resident_bytes = 0; // at most, of its pages
  bool counted = false, spent = false; // since it is idle: these are as many as there are, and none of them can be given back
  bool closed = false; // pages, since its last pass
  int64_t budget_bytes = 0; // for its pages, and what is requested beside them while it is idle
};

struct Addresses {
  int64_t height_bytes;
  std::vector<int64_t> sizes, offsets; // of each request; an offset of -1 is outside of the slab
};

// What is in use outside of slabs.
struct Outside {
  int64_t size_bytes;
  Recording* recording;
  int64_t index;
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
  int64_t first = 0, end = 0; // requests of the pass
  int64_t next = 0, ahead = 0; // the first one that may still come, and the one behind the last that has come
  std::vector<bool> came;
  int64_t unmatched_bytes = 0, occupied_bytes = 0;
};

thread_local Active active;
// Never destroyed: tensors may be freed after everything else, when the process ends.
std::mutex& mutex = *new std::mutex;
std::map<char*, Block>& blocks = *new std::map<char*, Block>; // in use, of all slabs
auto& outside = *new std::unordered_map<void*, Outside>; // smaller requests only if they are recorded
std::vector<Slab*>& slabs = *new std::vector<Slab*>; // the one that served last in the end
int64_t outside_bytes = 0;
int64_t passed_bytes = 0; // those of them when the last pass in a slab ended
int64_t least_bytes = 0; // of requests in a slab, and of those that are counted outside of it
bool pages_stay = false; // idle ones, whatever is requested
bool large_pages = false; // are asked for where memory is returned as soon as it is freed
c10::Allocator* before = nullptr;

const int64_t kPage = sysconf(_SC_PAGESIZE);
constexpr int64_t kHugePage = 1 << 21; // which a slab asks for; they are given back as a whole where possible

char* rounded_down(char* address, int64_t unit) {
  return address - reinterpret_cast<uintptr_t>(address) % unit;
}

char* rounded_up(char* address, int64_t unit) {
  return rounded_down(address + unit - 1, unit);
}

void unmap_unused(Slab* slab) {
  if (!slab->owned && slab->live == 0) {
    munmap(slab->base, slab->most_bytes);
    delete slab;
  }
}

// Returns the bytes of the pages that are in memory, between the bounds of pages `begin` and `end`.
int64_t resident(char* begin, char* end) {
  unsigned char there[512];
  int64_t pages = 0;
  while (begin < end) {
    const int64_t count = std::min<int64_t>(sizeof there, (end - begin) / kPage);
    if (mincore(begin, count * kPage, there) == 0) {
      pages += std::count_if(there, there + count, [](unsigned char page) { return page & 1; });
    }
    begin += count * kPage;
  }
  return pages * kPage;
}

// Gives whole pages between `begin` and `end` back to the system, from the end on, until these are `most_bytes` or none is left,
// and closes them.
int64_t give_back(char* begin, char* end, int64_t most_bytes) {
  begin = rounded_up(begin, kPage);
  end = rounded_down(end, kPage);
  int64_t given = 0;
  while (begin < end && given < most_bytes) {
    char* from = std::max(begin, rounded_down(end - 1, kHugePage));
    const int64_t there = resident(from, end);
    if (there > 0 && madvise(from, end - from, MADV_DONTNEED) == 0) {
      given += there;
    }
    mprotect(from, end - from, PROT_NONE);
    end = from;
  }
  return given;
}

// Gives idle pages from `begin` on back, those in the end first, until these are `most_bytes` or none is left.
int64_t give_idle_back(Slab* slab, char* begin, int64_t most_bytes) {
  char* end = slab->base + slab->size_bytes;
  int64_t given = 0;
  for (auto block = blocks.lower_bound(end); given < most_bytes && block != blocks.begin();) {
    --block;
    if (block->second.end <= begin) {
      break;
    }
    given += give_back(std::max(begin, block->second.end), end, most_bytes - given);
    end = block->first;
  }
  given += give_back(begin, end, most_bytes - given);
  slab->resident_bytes -= std::min(given, slab->resident_bytes);
  slab->closed = true;
  return given;
}

// Gives idle pages back until those of all slabs and what was requested since the last pass, with `more_bytes`, are within the
// largest budget.
void make_room(int64_t more_bytes) {
  int64_t budget_bytes = 0, taken_bytes = outside_bytes + more_bytes - passed_bytes;
  for (const Slab* slab : slabs) {
    budget_bytes = std::max(budget_bytes, slab->budget_bytes);
    taken_bytes += slab->resident_bytes;
  }
  for (Slab* slab : slabs) {
    if (taken_bytes <= budget_bytes || pages_stay) {
      return;
    }
    if (slab->serving > 0 || slab->spent) {
      continue;
    }
    taken_bytes -= slab->resident_bytes;
    if (!slab->counted) {
      slab->resident_bytes = resident(slab->base, rounded_up(slab->base + slab->size_bytes, kPage));
      slab->counted = true;
    }
    const int64_t over_bytes = taken_bytes + slab->resident_bytes - budget_bytes;
    if (over_bytes > 0) {
      slab->spent = give_idle_back(slab, slab->base, over_bytes) < over_bytes;
    }
    taken_bytes += slab->resident_bytes;
  }
}

// Asks for large pages: the system then takes an eighth of the time to give memory that was returned.
void ask_for_large_pages(char* begin, int64_t size_bytes) {
  char* first = rounded_up(begin, kHugePage);
  char* end = rounded_down(begin + size_bytes, kHugePage);
  if (first < end) {
    madvise(first, end - first, MADV_HUGEPAGE);
  }
}

// Ends the pass that is served in this thread, if any.
void end_serving() {
  if (Slab* slab = std::exchange(active.slab, nullptr)) {
    std::lock_guard<std::mutex> guard(mutex);
    --slab->serving;
    passed_bytes = outside_bytes;
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
      slab->spent = false;
      unmap_unused(slab);
      return;
    }
    auto known = outside.find(pointer);
    if (known != outside.end()) {
      const auto [size_bytes, recording, index] = known->second;
      if (recording != nullptr) {
        recording->ends[index] = static_cast<int64_t>(recording->sizes.size());
      }
      outside_bytes -= size_bytes;
      outside.erase(known);
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
    if (active.slab != nullptr && size_bytes >= least_bytes) {
      if (char* pointer = placed(size_bytes)) {
        return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
      }
    }
    if (size_bytes >= least_bytes || (active.recording != nullptr && n != 0)) {
      return noted(size_bytes);
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
    for (int64_t i = now.next; i < now.end && i < now.ahead + kAhead; ++i) {
      if (addresses->sizes[i] != size_bytes || now.came[i - now.first]) {
        continue;
      }
      now.came[i - now.first] = true;
      now.ahead = std::max(now.ahead, i + 1);
      while (now.next < now.ahead && (now.came[now.next - now.first] || now.next + kAhead < now.ahead)) {
        ++now.next;
      }
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

  static c10::DataPtr noted(int64_t size_bytes) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      make_room(size_bytes);
    }
    c10::DataPtr data = before->allocate(size_bytes);
    void* pointer = data.release_context();
    if (large_pages) {
      ask_for_large_pages(static_cast<char*>(pointer), size_bytes);
    }
    Recording* recording = active.recording;
    std::lock_guard<std::mutex> guard(mutex);
    outside_bytes += size_bytes;
    outside[pointer] = {size_bytes, recording, recording == nullptr ? 0 : static_cast<int64_t>(recording->sizes.size())};
    if (recording != nullptr) {
      recording->sizes.push_back(size_bytes);
      recording->ends.push_back(-1);
      recording->pointers.push_back(pointer);
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
};

} // namespace

extern "C" {

// Puts the allocator in place, once, for slabs with requests of `least` bytes or more. Returns false if the one before is of a
// kind that cannot be behind it.
bool arena_install(int64_t least) {
  std::lock_guard<std::mutex> guard(mutex);
  if (before == nullptr) {
    c10::Allocator* found = c10::GetCPUAllocator();
    if (found->raw_deleter() == nullptr) {
      return false;
    }
    before = found;
    least_bytes = least;
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
    c10::SetCPUAllocator(new ArenaAllocator, UINT8_MAX);
  }
  return true;
}

Recording* arena_new_recording() {
  return new Recording;
}

void arena_drop_recording(Recording* recording) {
  std::lock_guard<std::mutex> guard(mutex);
  for (auto& [pointer, request] : outside) {
    if (request.recording == recording) {
      request.recording = nullptr;
    }
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

// Returns null if there is no memory. Addresses behind `size_bytes` are reserved, and count for no limit of memory.
Slab* arena_new_slab(int64_t size_bytes, int64_t most_bytes) {
  void* base = mmap(nullptr, most_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return nullptr;
  }
  if (mprotect(base, size_bytes, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, most_bytes);
    return nullptr;
  }
  madvise(base, most_bytes, MADV_HUGEPAGE);
  std::lock_guard<std::mutex> guard(mutex);
  Slab* slab = new Slab{static_cast<char*>(base), size_bytes, most_bytes};
  slabs.push_back(slab);
  return slab;
}

// Returns false if there is no memory, or no address.
bool arena_grow_slab(Slab* slab, int64_t size_bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  char* end = rounded_down(slab->base + slab->size_bytes, kPage);
  if (size_bytes > slab->most_bytes || mprotect(end, slab->base + size_bytes - end, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  slab->size_bytes = size_bytes;
  return true;
}

// Gives the pages of a slab back, except for blocks in use, which stay until they are freed.
void arena_drop_slab(Slab* slab) {
  std::lock_guard<std::mutex> guard(mutex);
  slab->owned = false;
  slabs.erase(std::find(slabs.begin(), slabs.end(), slab));
  give_idle_back(slab, slab->base, slab->size_bytes);
  unmap_unused(slab);
}

// Sets the bytes that the pages of a slab may take, with what is requested beside them while it is idle. What has been used of it
// behind these is given back now, except for blocks in use.
void arena_set_budget(Slab* slab, int64_t budget_bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  slab->budget_bytes = budget_bytes;
  if (slab->used_bytes > budget_bytes) {
    give_idle_back(slab, slab->base + budget_bytes, slab->size_bytes);
    slab->used_bytes = budget_bytes;
  }
}

void arena_keep_pages(bool keep) {
  std::lock_guard<std::mutex> guard(mutex);
  pages_stay = keep;
}

// Asks for large pages for all that is requested outside of slabs from now on.
void arena_use_large_pages() {
  std::lock_guard<std::mutex> guard(mutex);
  large_pages = true;
}

int64_t arena_base(Slab* slab) {
  return reinterpret_cast<int64_t>(slab->base);
}

Addresses* arena_new_addresses(int64_t height_bytes, int64_t count, const int64_t* sizes, const int64_t* offsets) {
  return new Addresses{height_bytes, {sizes, sizes + count}, {offsets, offsets + count}};
}

void arena_drop_addresses(Addresses* addresses) {
  delete addresses;
}

// Serves requests of this thread at `addresses` in `slab`, from the one with the number `first` to the one before `end`. Returns
// false if there is no memory for the pages that were given back.
bool arena_serve(Slab* slab, Addresses* addresses, int64_t first, int64_t end) {
  end_serving();
  bool closed = false;
  {
    std::lock_guard<std::mutex> guard(mutex);
    closed = std::exchange(slab->closed, false);
    ++slab->serving;
    slab->used_bytes = std::max(slab->used_bytes, addresses->height_bytes);
    slab->resident_bytes = slab->used_bytes;
    slab->counted = slab->spent = false;
    std::rotate(std::find(slabs.begin(), slabs.end(), slab), slabs.end() - 1, slabs.end());
    make_room(0);
  }
#ifdef __GLIBC__
  if (closed) {
    malloc_trim(0); // else the C library keeps what was freed since, beside the pages that come again
  }
#endif
  if (closed && mprotect(slab->base, slab->size_bytes, PROT_READ | PROT_WRITE) != 0) {
    std::lock_guard<std::mutex> guard(mutex);
    --slab->serving;
    slab->closed = true;
    return false;
  }
  active.slab = slab;
  active.addresses = addresses;
  active.first = active.next = active.ahead = first;
  active.end = end;
  active.came.assign(end - first, false);
  active.unmatched_bytes = active.occupied_bytes = 0;
  return true;
}

// Ends recording or serving in this thread; writes the bytes that were to be in the slab and are not, as no request like it was
// recorded there, or as the place was occupied.
void arena_stop(int64_t* missed) {
  end_serving();
  missed[0] = active.unmatched_bytes;
  missed[1] = active.occupied_bytes;
  active = Active{};
}

} // extern "C"
