#pragma once

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace fused::cpu {

// Splits rows into blocks, each for one thread, so that the next step finds a block in the cache.
struct Blocks {
  int64_t rows, each, count;

  Blocks(int64_t rows, int64_t each) : rows(rows), each(each), count(at::ceil_div(rows, each)) {}

  // Calls fn(block, its first row, its rows), on all threads.
  template <typename Fn>
  void run(const Fn& fn) const {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;  // not inherited by threads
      for (int64_t i = begin; i < end; ++i) fn(i, i * each, std::min(each, rows - i * each));
    });
  }
};

}  // namespace fused::cpu
