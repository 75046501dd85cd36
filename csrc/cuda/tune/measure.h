#pragma once

#include "cuda/tune/trial.h"

namespace fused::cuda::tune {

// Finds the strategy and algorithm that are the fastest for a pass on this device: timed on the
// call's own operands, judged on synthetic ones.
//
// Remembers the winner under `bucket`; nothing where memory was too short, and the rule decides.
// Only the call's results are written over: random numbers, the allocator's statistics and the
// order of the stream stay as they were.
std::optional<plans::Decision> measure(const PassCall& whole, const gemm::PassProblem& bucket,
                                       const std::optional<plans::Decision>& by_rule, Trial& trial);

}  // namespace fused::cuda::tune
