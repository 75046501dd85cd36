#include "cuda/runtime/prepared_plan.h"

#include <memory>
#include <unordered_map>

namespace fused::cuda {
namespace {

constexpr size_t plans_kept = 8192;

struct ThreadPlans {
  uint64_t generation = 0;
  std::unordered_map<PassProblem, std::unique_ptr<Plan>, gemm::PassProblemHash> plans;
};

auto& thread_plans() {
  thread_local ThreadPlans mine;
  const auto now = plans::generation();
  if (mine.generation != now) {
    mine.plans.clear();
    mine.generation = now;
  }
  return mine.plans;
}

}  // namespace

Plan* take_plan(const PassProblem& problem) {
  auto& known = thread_plans();
  const auto it = known.find(problem);
  if (it == known.end()) return nullptr;
  auto* plan = it->second.get();
  if (plan->calls_left && plan->calls_left->fetch_sub(1) <= 0) {
    known.erase(it);
    return nullptr;
  }
  return plan;
}

Plan* remember_plan(const PassProblem& problem, Plan& plan, uint64_t generation) {
  auto& known = thread_plans();
  if (generation != plans::generation()) return nullptr;
  if (known.size() >= plans_kept) known.clear();
  auto& slot = known[problem];
  slot = std::make_unique<Plan>(std::move(plan));
  return slot.get();
}

}  // namespace fused::cuda
