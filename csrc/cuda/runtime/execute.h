#pragma once

// A pass done by a plan: the matrix product and the steps around it.

#include "cuda/kernels/passes.h"
#include "cuda/kernels/small_product.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"

#include <cuda_runtime_api.h>

namespace fused::cuda {

// Runs the steps of `plan`; false where the product does not run, and nothing after it has then.
// A gradient that our small kernels make is left in `deferred`, if there is one, to share a launch
// with the layer's other one.
bool execute(const PassCall& call, Plan& plan, void* workspace, cudaStream_t stream,
             kernels::SmallGradients* deferred = nullptr);

// The pass as our kernels for small networks have it.
kernels::SmallProduct small_product(const PassCall& call);

// matrix's column sums; act'(saved) · grad and its column sums. Either of dz and sums may be null;
// dz, contiguous rows, may be grad itself.
void one_pass(const Matrix& grad, const Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, void* sums);

// The gradients of a gated layer's pass; results may take the gradient's place.
void gating_pass(kernels::GatingBackward args);

}  // namespace fused::cuda
