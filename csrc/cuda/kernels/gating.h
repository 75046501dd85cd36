#pragma once

// Kernels of gated layers: act(gate) * up, and its backward in one pass.

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

// The gradients of gate and up, their column sums, and hidden again, read and written once. Sums
// run as in activation_backward. What is not wanted is null.
struct GatingBackward : Gating {
  int processors = 1;          // of the device: how many blocks to make
  const void* grad = nullptr;  // of hidden
  int64_t ld_grad = 0;
  void *grad_gate = nullptr, *grad_up = nullptr;
  int64_t ld_result = 0;                          // of both
  void *gate_sums = nullptr, *up_sums = nullptr;  // [cols]
};

int64_t scratch_bytes(const GatingBackward& args);

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
