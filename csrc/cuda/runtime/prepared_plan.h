#pragma once

// A pass made ready to run, per thread. This is all that a call needs once everything is decided:
// one lookup, no lock.

#include "cuda/runtime/cublaslt.h"
#include "gemm/pass_problem.h"
#include "gemm/strategy.h"
#include "plans/registry.h"

#include <optional>
#include <string>

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

// This thread's plan for a call, of those that are left; nullptr where there is none.
Plan* take_plan(const PassProblem& problem);
// Nothing is remembered, and nullptr given, where another generation of plans has begun since
// (plans::generation).
Plan* remember_plan(const PassProblem& problem, Plan& plan, uint64_t generation);

}  // namespace fused::cuda
