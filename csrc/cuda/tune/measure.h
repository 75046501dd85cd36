#pragma once

#include "cuda/tune/trial.h"

namespace fused::cuda::tune {

// Finds the fastest strategy and algorithm for a pass on this device. It times candidates on the
// call's own operands, and judges them on synthetic ones.
//
// Stores the winner under `bucket`. Returns nullopt if memory was short, and the rule must decide.
// Only the call's results are overwritten: random numbers, the allocator's statistics and the order
// of the stream stay as they were.
std::optional<plans::Decision> measure(const PassCall& whole, const gemm::PassProblem& bucket,
                                       const std::optional<plans::Decision>& by_rule, Trial& trial);

}  // namespace fused::cuda::tune
