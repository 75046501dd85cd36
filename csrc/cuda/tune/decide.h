#pragma once

// From a call to a plan: what has been measured, or else the rule.

#include "cuda/runtime/gemm_call.h"

#include <optional>
#include <vector>

namespace fused {

// Makes and remembers this thread's plan, or one for this call only in `spare`; nullptr where there
// is no way. While a stream captures nothing may be searched for.
gemm::Plan* make_plan(const StageCall& call, std::optional<gemm::Plan>& spare);

// The last resort: eager's own sequence, and why for explain.
std::optional<gemm::Plan> aten_plan(const gemm::StageProblem& problem, const char* why);

// What the library offers for the strategy's product, best guess first, at most so many; those that
// swallow NaN are left out, and after `enough` good ones no more are tried. The stream is waited
// for where a trial is needed.
std::vector<gemm::Algorithm> algorithms_for(const StageCall& call, const gemm::Strategy& strategy,
                                            int most, size_t enough);

// Other configurations of an algorithm (tile, cluster), the most similar first.
std::vector<gemm::Algorithm> algorithms_around(const StageCall& call,
                                               const gemm::Strategy& strategy,
                                               const gemm::Algorithm& algorithm, size_t most);

}  // namespace fused
