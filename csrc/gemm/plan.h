#pragma once

// problem -> the algorithm that runs it. Found once, remembered for the process.

#include "gemm/cublaslt.h"

#include <functional>
#include <mutex>
#include <unordered_map>

namespace fused::gemm {

// Algorithms by problem, shared between threads. Bounded: serving endless different token counts
// must not grow without end, and finding an algorithm again costs only microseconds.
class AlgorithmCache {
 public:
  explicit AlgorithmCache(size_t capacity) : capacity_(capacity) {}

  // The remembered algorithms, or what `search` finds, which is then remembered (also when it is
  // nothing: a problem that the library refuses is not asked for again).
  std::vector<Algorithm> find(const Problem& problem,
                              const std::function<std::vector<Algorithm>()>& search);
  bool contains(const Problem& problem) const;
  // Forgets an algorithm that failed to run.
  void drop_first(const Problem& problem);
  void clear();
  size_t size() const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<Problem, std::vector<Algorithm>, ProblemHash> known_;
};

// A problem made ready to run by one thread.
struct Plan {
  Descriptors descriptors;
  Algorithm algorithm;
};

// This thread's plan for the problem, or nullptr where the library has none. Without may_search
// (while a stream captures) only what is already known is used.
Plan* find_plan(cublasLtHandle_t handle, const Problem& problem, const Operands& operands,
                bool may_search);

// The plan's algorithm failed: forget it. The next find_plan gives the next best.
void reject_plan(const Problem& problem);

}  // namespace fused::gemm
