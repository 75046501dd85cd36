#pragma once

// The plans that a thread has made ready. Finding one takes a lookup and no lock.

#include "cuda/runtime/cublaslt.h"
#include "gemm/pass_problem.h"
#include "gemm/strategy.h"
#include "plans/registry.h"

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace fused::cuda {

using gemm::PassProblem, gemm::Strategy;

struct Plan {
  const Strategy* strategy;
  std::string remark;  // for explain: why the strategy that the rule names is not taken
  // cuBLASLt's product. Descriptors hold pointers, so each thread has its own.
  Problem matmul;
  std::optional<Descriptors> descriptors;
  Algorithm algorithm;
  plans::CallsLeft calls_left;  // until the plan is made anew
};

struct ThreadPlans {
  uint64_t generation = 0;
  std::unordered_map<PassProblem, std::unique_ptr<Plan>, gemm::PassProblemHash> plans;
};

inline auto& thread_plans() {
  thread_local ThreadPlans mine;
  const auto now = plans::generation();
  if (mine.generation != now) {
    mine.plans.clear();
    mine.generation = now;
  }
  return mine.plans;
}

// Returns this thread's plan; nullptr if there is none or its calls are used up.
inline Plan* take_plan(const PassProblem& problem) {
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

// Keeps the plan for this thread, unless another generation of plans has begun since.
inline Plan* remember_plan(const PassProblem& problem, Plan& plan, uint64_t generation) {
  constexpr size_t plans_kept = 8192;
  auto& known = thread_plans();
  if (generation != plans::generation()) return nullptr;
  if (known.size() >= plans_kept) known.clear();
  return (known[problem] = std::make_unique<Plan>(std::move(plan))).get();
}

}  // namespace fused::cuda
