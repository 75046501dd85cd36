#include "gemm/plan.h"

#include <memory>

namespace fused::gemm {
namespace {

constexpr int candidates_kept = 4;
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

bool AlgorithmCache::contains(const Problem& problem) const {
  std::lock_guard lock(mutex_);
  return known_.count(problem) != 0;
}

void AlgorithmCache::drop_first(const Problem& problem) {
  std::lock_guard lock(mutex_);
  const auto it = known_.find(problem);
  if (it != known_.end() && !it->second.empty()) it->second.erase(it->second.begin());
}

void AlgorithmCache::clear() {
  std::lock_guard lock(mutex_);
  known_.clear();
}

size_t AlgorithmCache::size() const {
  std::lock_guard lock(mutex_);
  return known_.size();
}

Plan* find_plan(cublasLtHandle_t handle, const Problem& problem, const Operands& operands,
                bool may_search) {
  auto& plans = thread_plans();
  if (const auto it = plans.find(problem); it != plans.end()) return it->second.get();
  // Searching while a stream captures can end the capture.
  if (!may_search && !algorithms().contains(problem)) return nullptr;

  Descriptors descriptors(problem);
  const auto found = algorithms().find(
      problem, [&] { return candidates(handle, problem, descriptors, operands, candidates_kept); });
  if (plans.size() >= problems_kept) plans.clear();
  std::unique_ptr<Plan> plan;
  if (!found.empty()) plan = std::make_unique<Plan>(std::move(descriptors), found.front());
  return plans.insert_or_assign(problem, std::move(plan)).first->second.get();
}

void reject_plan(const Problem& problem) {
  algorithms().drop_first(problem);
  thread_plans().erase(problem);
}

}  // namespace fused::gemm
