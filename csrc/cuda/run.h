#pragma once

// A pass of a layer on a GPU: planned, and run.

#include "cuda/kernels/small_product.h"
#include "cuda/runtime/gemm_call.h"

namespace fused::cuda {

// Runs the pass on the current stream of the current device. False, with nothing done, only for a
// forward that writes aux where neither the library nor ATen can: a mask, or padded rows. What is
// left in `waiting` (see execute) the caller launches.
bool run(const PassCall& call, kernels::SmallGradients* waiting = nullptr);

// Whether the pass is planned to be a kernel's for small networks.
bool is_small(const PassCall& call);

}  // namespace fused::cuda
