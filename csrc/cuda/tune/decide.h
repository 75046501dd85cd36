#pragma once

// From a call to a plan: what has been measured, or else the rule.

#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"

#include <optional>

namespace fused::cuda::tune {

// Makes and remembers this thread's plan, or makes one for this call alone; nullptr where there is
// no way. While a stream captures nothing may be searched for.
Plan* make_plan(const PassCall& call, std::optional<Plan>& for_this_call);

bool is_capturing();

// The last resort, and why for explain.
std::optional<Plan> fallback_plan(const PassProblem& problem, const char* why);

}  // namespace fused::cuda::tune
