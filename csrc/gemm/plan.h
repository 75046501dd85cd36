#pragma once

// problem -> the algorithm that runs it. Found once, remembered for the process.

#include "gemm/cublaslt.h"

#include <functional>
#include <mutex>
#include <optional>
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
  // The same without a search: nothing where the problem has not been met.
  std::optional<std::vector<Algorithm>> lookup(const Problem& problem) const;
  // Forgets an algorithm that turned out not to run.
  void drop(const Problem& problem, const Algorithm& algorithm);
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

// What a candidate must pass before it is used.
using Trial = std::function<bool(Descriptors&, const Algorithm&)>;

// This thread's plan for the problem, which may be nullptr: there is none. Nothing at all where the
// thread has not met the problem yet. This is all that a call does once everything is known.
std::optional<Plan*> known_plan(const Problem& problem);

// Makes this thread's plan for the problem, or nullptr where the library has none that passes the
// trial. Without may_search (while a stream captures) only algorithms already known are used.
Plan* make_plan(cublasLtHandle_t handle, const Problem& problem, const Operands& operands,
                bool may_search, const Trial& trial);

// The plan's algorithm does not run after all: forget it. The next make_plan gives the next best.
void reject_plan(const Problem& problem, const Algorithm& algorithm);

}  // namespace fused::gemm
