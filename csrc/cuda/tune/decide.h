#pragma once

// Plans a pass of a layer on a GPU, by what has been measured or else the rule, and runs it.

#include "cuda/runtime/gemm_call.h"
#include "cuda/small/kernels/small_product.h"

namespace fused::cuda::tune {

// False where neither the library nor ATen can, as for a forward that writes a mask or padded rows:
// its results hold nothing then. The caller launches what is left in `deferred`.
bool run(const PassCall& call, kernels::SmallGradients* deferred = nullptr);

bool is_small(const PassCall& call);

}  // namespace fused::cuda::tune
