#include "cuda/runtime/prepared_plan.h"

#include <atomic>
#include <memory>
#include <unordered_map>

namespace fused::gemm {
namespace {

constexpr size_t plans_kept = 8192;

std::atomic<uint64_t> generation{0};

struct ThreadPlans {
  uint64_t generation = 0;
  std::unordered_map<StageProblem, std::unique_ptr<Plan>, StageProblemHash> plans;
};

auto& thread_plans() {
  thread_local ThreadPlans mine;
  const auto now = generation.load(std::memory_order_acquire);
  if (mine.generation != now) {
    mine.plans.clear();
    mine.generation = now;
  }
  return mine.plans;
}

}  // namespace

Plan* known_plan(const StageProblem& problem) {
  const auto& plans = thread_plans();
  const auto it = plans.find(problem);
  return it == plans.end() ? nullptr : it->second.get();
}

Plan* remember_plan(const StageProblem& problem, Plan& plan, uint64_t generation) {
  auto& plans = thread_plans();
  if (generation != plan_generation()) return nullptr;
  if (plans.size() >= plans_kept) plans.clear();
  auto& slot = plans[problem];
  slot = std::make_unique<Plan>(std::move(plan));
  return slot.get();
}

uint64_t plan_generation() { return generation.load(std::memory_order_acquire); }

void forget_all_plans() { generation.fetch_add(1, std::memory_order_release); }

}  // namespace fused::gemm
