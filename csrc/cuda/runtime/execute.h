#pragma once

#include "cuda/kernels/activation.h"
#include "cuda/kernels/gating.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"
#include "cuda/small/kernels/small_product.h"

#include <cuda_runtime_api.h>

namespace fused::cuda {

// Runs the steps of `plan`; false where the product does not run, and nothing after it has then.
// Leaves a gradient for our small kernels in `deferred`, if given, to share a launch with the
// layer's other.
bool execute(const PassCall& call, Plan& plan, void* workspace, cudaStream_t stream,
             kernels::SmallGradients* deferred = nullptr);

kernels::SmallProduct small_product(const PassCall& call);

kernels::Gating gating_of(Activation activation, gemm::Type type, const Matrix& gate,
                          const Matrix& up);

// Computes act'(saved) · grad and its column sums; of no activation the sums alone. Either of dz
// and sums may be null; dz, contiguous rows, may be grad itself.
void one_pass(const Matrix& grad, const Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, const kernels::Sums& sums);

// Computes the gradients of a gated layer's pass; results may take the gradient's place.
void gating_pass(kernels::GatingBackward args);

}  // namespace fused::cuda
