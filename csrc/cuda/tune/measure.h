#pragma once

// Which strategy and algorithm is the fastest for a pass, on this very device: timed on the call's
// own operands, and judged on synthetic ones.

#include "cuda/runtime/gemm_call.h"
#include "cuda/tune/trial.h"
#include "plans/decisions.h"

#include <optional>

namespace fused::cuda::tune {

// The winner, remembered under `bucket`; nothing where it could not be found out now (too little
// memory), and the step then goes on by rule. The call's results are written over; for the rest
// nothing but time passes for the caller: random numbers, the allocator's statistics and the order
// of the stream are as if it had not been called.
std::optional<plans::Decision> measure(const PassCall& call, const PassProblem& bucket,
                                       const std::optional<plans::Decision>& by_rule, Trial& trial);

}  // namespace fused::cuda::tune
