#pragma once

// Passes under the policy "batch_invariant". They follow gemm/invariant.h, and use no plans.

#include "cuda/runtime/gemm_call.h"

namespace fused::cuda::invariant {

// Says why rows of this dtype cannot have the same bits in every batch on this device; nullptr if
// they can.
const char* objection(const Tensor& like);

// Returns whether one kernel does a gated layer's products and the rest. The call must be complete.
bool is_whole(const PassCall& call);

// Runs a pass so that each row of the result has the same bits in every batch. Throws
// (NotImplementedError) if no kernel can.
void run(const PassCall& given);

}  // namespace fused::cuda::invariant
