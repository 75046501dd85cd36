#include "gemm/plan.h"

#include <cstring>
#include <memory>

namespace fused::gemm {
namespace {

constexpr int candidates_asked = 4;
constexpr size_t problems_kept = 8192;

// Never destroyed: threads may still run while the process ends.
AlgorithmCache& algorithms() {
  static auto* cache = new AlgorithmCache(problems_kept);
  return *cache;
}

using PlanMap = std::unordered_map<Problem, std::unique_ptr<Plan>, ProblemHash>;

// Descriptors carry pointers while they run, so every thread has its own; a hit takes no lock.
PlanMap& thread_plans() {
  thread_local PlanMap plans;
  return plans;
}

}  // namespace

std::vector<Algorithm> AlgorithmCache::find(const Problem& problem,
                                            const std::function<std::vector<Algorithm>()>& search) {
  {
    std::lock_guard lock(mutex_);
    if (const auto it = known_.find(problem); it != known_.end()) return it->second;
  }
  // Outside the lock: the search may load kernels. Two threads that meet a problem at once both
  // search; the first answer stays, so that both run the same algorithm from then on.
  auto found = search();
  std::lock_guard lock(mutex_);
  if (known_.size() >= capacity_) known_.clear();
  return known_.try_emplace(problem, std::move(found)).first->second;
}

std::optional<std::vector<Algorithm>> AlgorithmCache::lookup(const Problem& problem) const {
  const std::lock_guard lock(mutex_);
  const auto it = known_.find(problem);
  return it == known_.end() ? std::nullopt : std::optional(it->second);
}

void AlgorithmCache::drop(const Problem& problem, const Algorithm& algorithm) {
  const std::lock_guard lock(mutex_);
  const auto it = known_.find(problem);
  if (it == known_.end()) return;
  std::erase_if(it->second, [&](const Algorithm& a) {
    return std::memcmp(&a.algo, &algorithm.algo, sizeof(a.algo)) == 0;
  });
}

void AlgorithmCache::clear() {
  std::lock_guard lock(mutex_);
  known_.clear();
}

size_t AlgorithmCache::size() const {
  std::lock_guard lock(mutex_);
  return known_.size();
}

std::optional<Plan*> known_plan(const Problem& problem) {
  const auto& plans = thread_plans();
  const auto it = plans.find(problem);
  return it == plans.end() ? std::nullopt : std::optional(it->second.get());
}

Plan* make_plan(cublasLtHandle_t handle, const Problem& problem, const Operands& operands,
                bool may_search, const Trial& trial) {
  auto& plans = thread_plans();
  auto known = algorithms().lookup(problem);
  // Searching while a stream captures can end the capture.
  if (!known && !may_search) return nullptr;
  Descriptors descriptors(problem);
  if (!known) {
    known = algorithms().find(problem, [&] {
      auto offered = candidates(handle, problem, descriptors, operands, candidates_asked);
      std::erase_if(offered, [&](const Algorithm& a) { return !trial(descriptors, a); });
      return offered;
    });
  }
  if (plans.size() >= problems_kept) plans.clear();
  std::unique_ptr<Plan> plan;
  if (!known->empty()) plan = std::make_unique<Plan>(std::move(descriptors), known->front());
  return plans.insert_or_assign(problem, std::move(plan)).first->second.get();
}

void reject_plan(const Problem& problem, const Algorithm& algorithm) {
  algorithms().drop(problem, algorithm);
  thread_plans().erase(problem);
}

}  // namespace fused::gemm
