#pragma once

// Asynchronous copies, each as late as it may be: when it is waited for.

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

struct AsyncCopy {
  void* to;
  const void* from;
  size_t size, zeros;
};
// A thread's batches, of which the last is not committed yet.
inline thread_local std::deque<std::vector<AsyncCopy>> async_batches(1);

inline void __pipeline_memcpy_async(void* to, const void* from, size_t size, size_t zeros = 0) {
  assert(reinterpret_cast<uintptr_t>(to) % size == 0 &&
         reinterpret_cast<uintptr_t>(from) % size == 0);
  async_batches.back().push_back({to, from, size, zeros});
}

inline void __pipeline_commit() { async_batches.emplace_back(); }

inline void __pipeline_wait_prior(size_t batches) {
  for (; async_batches.size() > batches + 1; async_batches.pop_front()) {
    for (const auto& copy : async_batches.front()) {
      const size_t size = copy.size - copy.zeros;
      std::memcpy(copy.to, copy.from, size);
      std::memset(static_cast<char*>(copy.to) + size, 0, copy.zeros);
    }
  }
}
