#pragma once

// A stage made ready to run, per thread. This is all that a call needs once everything is decided:
// one lookup, no lock.

#include "cuda/runtime/cublaslt.h"
#include "gemm/strategy.h"

#include <optional>
#include <string>

namespace fused::gemm {

struct Plan {
  const Strategy* strategy;
  std::string remark;  // why it is not the strategy that the rule names, for explain
  // Of the strategy's product, if it has one. Descriptors carry pointers while they run, so every
  // thread has its own.
  Problem product;
  std::optional<Descriptors> descriptors;
  Algorithm algorithm;
};

// This thread's plan, or nullptr.
Plan* known_plan(const StageProblem& problem);
// Nothing is remembered, and nullptr given, where all plans were to be forgotten since
// `generation`.
Plan* remember_plan(const StageProblem& problem, Plan& plan, uint64_t generation);
uint64_t plan_generation();

// All threads' plans are to be made anew, because what they were made from has changed.
void forget_all_plans();

}  // namespace fused::gemm
