#pragma once

// What the passes of gated layers do beside their products.

#include "cuda/kernels/gated.h"
#include "cuda/runtime/gemm_call.h"

namespace fused::cuda {

// Pre-activations that nobody keeps have to be somewhere between two steps: how much they take, or
// 0 where none are needed, and the call with them.
int64_t missing_preactivations(const PassCall& call, const Strategy& strategy);
PassCall with_preactivations(const PassCall& call, void* memory, int64_t bytes);

// h of the pre-activations, in call.aux and call.up.
void own_glu(const PassCall& call);
void aten_glu(const PassCall& call);

// The gradients of gate and up, and h again, in place of the gradient of h.
void own_gating(const PassCall& call);
void aten_gating(const PassCall& call);

// Results may take the gradient's place.
void gating_pass(kernels::GatingBackward args);

}  // namespace fused::cuda
