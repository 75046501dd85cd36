#pragma once

// Passes under the policy "batch_invariant": by rule, never measured, no word of the plans.

#include "cuda/runtime/gemm_call.h"

namespace fused::cuda::invariant {

// Says why rows of this dtype cannot have the same bits in every batch on this device, or nullptr.
const char* objection(const Tensor& like);

// Tells whether a gated layer's products and its pass are one kernel; asked of a completed call.
bool is_whole(const PassCall& call);

// Gives each row of the result the bits that it has in any other batch. Throws
// (NotImplementedError) where no kernel does.
void run(const PassCall& given);

}  // namespace fused::cuda::invariant
