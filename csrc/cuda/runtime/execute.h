#pragma once

#include "cuda/kernels/activation.h"
#include "cuda/kernels/gating.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"
#include "cuda/small/kernels/small_product.h"

#include <cuda_runtime_api.h>

namespace fused::cuda {

// Runs the steps of `plan`. Returns false if the product does not run, and then runs no later step.
// If `deferred` is given, a gradient that our small kernels compute is left there, so that both
// gradients of a layer share a launch.
bool execute(const PassCall& call, Plan& plan, void* workspace, cudaStream_t stream,
             kernels::SmallGradients* deferred = nullptr);

kernels::SmallProduct small_product(const PassCall& call);

kernels::Gating gating_of(Activation activation, gemm::Type type, const Matrix& gate,
                          const Matrix& up);

// Computes dz = act'(saved) · grad and its column sums; without an activation, the sums alone. dz
// or sums may be null. dz has contiguous rows, and may be grad itself.
void one_pass(const Matrix& grad, const Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, const kernels::Sums& sums);

// Computes the gradients of gate and up. Results may overwrite the gradient.
void gating_pass(kernels::GatingBackward args);

}  // namespace fused::cuda
