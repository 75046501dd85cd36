#pragma once

// A thread's passes ready to run: one lookup, and no lock, once everything is decided.

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
  std::string remark;  // why it is not the strategy that the rule names, for explain
  // Of cuBLASLt's product; descriptors carry pointers, so that every thread has its own.
  Problem matmul;
  std::optional<Descriptors> descriptors;
  Algorithm algorithm;
  plans::CallsLeft calls_left;  // until it is made anew
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

// Takes this thread's plan, nullptr where there is none left.
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

// Remembers nothing where another generation of plans has begun since.
inline Plan* remember_plan(const PassProblem& problem, Plan& plan, uint64_t generation) {
  constexpr size_t plans_kept = 8192;
  auto& known = thread_plans();
  if (generation != plans::generation()) return nullptr;
  if (known.size() >= plans_kept) known.clear();
  return (known[problem] = std::make_unique<Plan>(std::move(plan))).get();
}

}  // namespace fused::cuda
