#pragma once

// A pass of a layer on a GPU: planned, by what has been measured or else the rule, and run.

#include "cuda/kernels/small_product.h"
#include "cuda/runtime/gemm_call.h"

namespace fused::cuda::tune {

// Runs the pass on the current stream of the current device. False only for a forward that writes
// aux where neither the library nor ATen can, a mask or padded rows: its results hold nothing then.
// What is left in `deferred` (see execute) the caller launches.
bool run(const PassCall& call, kernels::SmallGradients* deferred = nullptr);

// Whether the pass is planned to be a kernel's for small networks.
bool is_small(const PassCall& call);

}  // namespace fused::cuda::tune
