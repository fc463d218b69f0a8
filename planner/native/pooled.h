// Memory of small objects that every op makes. What one step frees, the next one takes: the C library, which keeps few freed blocks
// of a size at hand, took a sixth of the instructions that recording adds to small ops.

#pragma once

#include <cstddef>
#include <new>
#include <utility>

// The base of a final class whose freed objects' memory is kept, per thread.
template <typename T>
class Pooled {
 public:
  static void* operator new(size_t size) {
    auto& kept = blocks();
    if (kept.first == nullptr) {
      return ::operator new(size);
    }
    --kept.count;
    return std::exchange(kept.first, kept.first->next);
  }

  static void operator delete(void* memory) noexcept {
    auto& kept = blocks();
    if (kept.count >= kMostKept) {
      return ::operator delete(memory);
    }
    ++kept.count;
    kept.first = new (memory) Block{kept.first};
  }

 private:
  struct Block {
    Block* next;
  };

  struct Blocks {
    Block* first = nullptr;
    size_t count = 0;

    ~Blocks() { // what is freed later in this thread is not kept
      count = kMostKept;
      while (first != nullptr) {
        ::operator delete(std::exchange(first, first->next));
      }
    }
  };

  static Blocks& blocks() {
    static thread_local Blocks found;
    return found;
  }

#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kMostKept = 0; // it watches freed memory
#else
  static constexpr size_t kMostKept = 1 << 14;
#endif
};
