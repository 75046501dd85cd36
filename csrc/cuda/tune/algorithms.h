#pragma once

#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"

#include <optional>
#include <vector>

namespace fused::cuda::tune {

// Offers the library's algorithms for the product, best guess first, and orders for our own; an
// empty one stands for nothing to choose.
std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy, int most);

// Other configurations of an algorithm (tile, cluster), the most similar first.
std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                         const Algorithm& algorithm, size_t most);

// Makes a plan for this very call, without launching, as a stream may capture; nothing where the
// strategy or the algorithm cannot serve it.
std::optional<Plan> plan_for(const PassCall& call, const Strategy& strategy,
                             const Algorithm& algorithm);

}  // namespace fused::cuda::tune
