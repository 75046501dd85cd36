#pragma once

// Kernels of gated layers: act(gate) · up, and its backward in one sweep over memory.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

struct Gating {
  Activation activation = Activation::silu;
  gemm::Type type = gemm::Type::f32;
  int64_t rows = 0, cols = 0;
  const void *gate = nullptr, *up = nullptr;  // pre-activations
  int64_t ld_gate = 0, ld_up = 0;             // elements
  void* hidden = nullptr;                     // contiguous
};

void gating_forward(const Gating& args, cudaStream_t stream);

// Computes the gradients of gate and up, their column sums, and hidden again, in one sweep over
// memory. Sums run as in activation_backward. A result that is not wanted is null.
struct GatingBackward : Gating {
  int processors = 1;          // the device's multiprocessors
  const void* grad = nullptr;  // hidden's gradient
  int64_t ld_grad = 0;
  void *grad_gate = nullptr, *grad_up = nullptr;
  int64_t ld_result = 0;                          // of both gradients
  void *gate_sums = nullptr, *up_sums = nullptr;  // [cols]
};

int64_t scratch_bytes(const GatingBackward& args);

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
