#pragma once

// Which strategy and algorithm is the fastest for a pass, on this very device: tried on the call's
// own operands, with scratch memory for all that is written.

#include "cuda/runtime/gemm_call.h"
#include "plans/decisions.h"

#include <optional>

namespace fused::cuda::tune {

// The winner, remembered under `bucket`; nothing where it could not be found out now (too little
// memory), and the step then goes on by rule. Nothing but time passes for the caller: results,
// random numbers, the allocator and the order of the stream are as if it had not been called.
std::optional<plans::Decision> measure(const PassCall& call, const PassProblem& bucket,
                                       const std::optional<plans::Decision>& by_rule);

}  // namespace fused::cuda::tune
