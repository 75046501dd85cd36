#pragma once

// Plans a pass of a layer on a GPU, by measuring or by the rule, and runs it.

#include "cuda/runtime/gemm_call.h"
#include "cuda/small/kernels/small_product.h"

namespace fused::cuda::tune {

// Returns false if neither the library nor ATen can do it, as for a forward that writes a mask or
// padded rows; the results are undefined then. The caller launches the kernels left in `deferred`.
bool run(const PassCall& call, kernels::SmallGradients* deferred = nullptr);

bool is_small(const PassCall& call);

}  // namespace fused::cuda::tune
