#pragma once

// cuBLASLt's algorithms that may serve a strategy: offered by its heuristic, or around a good one.

#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"

#include <vector>

namespace fused::cuda::tune {

// What is offered for the strategy's product, best guess first, by the library at most so many. An
// empty algorithm stands for those that leave nothing to choose.
std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy, int most);

// Other configurations of an algorithm (tile, cluster), the most similar first.
std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                         const Algorithm& algorithm, size_t most);

// A plan ready for this very call; nothing where the strategy or the algorithm cannot serve it.
// Launches nothing and may be called while a stream captures.
std::optional<Plan> plan_for(const PassCall& call, const Strategy& strategy,
                             const Algorithm& algorithm);

}  // namespace fused::cuda::tune
