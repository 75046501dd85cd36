#pragma once

// The passes over memory of gated layers, act(gate) ⊙ up. No tensors here.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

// hidden = act(gate) ⊙ up; everything [rows, cols]
struct Gating {
  Activation activation = Activation::silu;
  gemm::Type type = gemm::Type::f32;
  int64_t rows = 0, cols = 0;
  const void *gate = nullptr, *up = nullptr;  // pre-activations
  int64_t ld_gate = 0, ld_up = 0;             // elements
  void* hidden = nullptr;                     // contiguous
};

void gating_forward(const Gating& args, cudaStream_t stream);

// The gradients of gate and up, their column sums, and hidden again, in one pass over memory: each
// of grad, gate and up is read once. What is not wanted is null. Sums run in fp32 (fp64 for fp64)
// in an order fixed by the sizes, so that the same input gives the same bits.
struct GatingBackward : Gating {
  int processors = 1;          // of the device: how many blocks to make
  const void* grad = nullptr;  // of hidden
  int64_t ld_grad = 0;
  void *grad_gate = nullptr, *grad_up = nullptr;
  int64_t ld_result = 0;                          // of both
  void *gate_sums = nullptr, *up_sums = nullptr;  // [cols]
};

// Bytes of scratch that gating_backward needs.
int64_t scratch_bytes(const GatingBackward& args);

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
