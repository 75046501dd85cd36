#pragma once

#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"

#include <optional>
#include <vector>

namespace fused::cuda::tune {

// Lists the library's algorithms for the product, best guess first, or the orders of our own
// product. A strategy with nothing to choose gets one empty algorithm.
std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy, int most);

// Lists other configurations of an algorithm (tile, cluster), the most similar first.
std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                         const Algorithm& algorithm, size_t most);

// Makes a plan for this call without launching a kernel, because a stream may capture. Returns
// nullopt if the strategy or the algorithm cannot do the call.
std::optional<Plan> plan_for(const PassCall& call, const Strategy& strategy,
                             const Algorithm& algorithm);

}  // namespace fused::cuda::tune
