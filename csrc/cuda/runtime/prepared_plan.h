#pragma once

// A pass made ready to run, per thread. This is all that a call needs once everything is decided:
// one lookup, no lock.

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
  // Of the matrix product, where cuBLASLt does it. Descriptors carry pointers while they run, so
  // every thread has its own.
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

// This thread's plan for a call, of those that are left; nullptr where there is none.
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

// Nothing is remembered, and nullptr given, where another generation of plans has begun since
// (plans::generation).
inline Plan* remember_plan(const PassProblem& problem, Plan& plan, uint64_t generation) {
  constexpr size_t plans_kept = 8192;
  auto& known = thread_plans();
  if (generation != plans::generation()) return nullptr;
  if (known.size() >= plans_kept) known.clear();
  auto& slot = known[problem];
  slot = std::make_unique<Plan>(std::move(plan));
  return slot.get();
}

}  // namespace fused::cuda
