#pragma once

// What a kernel gets, and which kernels there are.

#include "core/activation.h"
#include "gemm/hopper.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::hopper {

// Column-major, as in gemm/problem.h: features run along m, tokens along n.
struct Product {
  int m, n, k;
  const void* a;
  const void* b;
  void* d;
  int64_t lda, ldb, ldd;
  void* aux;         // forward: written, if at all; backward: read
  int64_t ld_aux;    // of bits, if it holds bits
  const void* bias;  // forward: or nullptr
  float* partials;   // backward: or nullptr
  gemm::hopper::Order order;
  int processors;  // of the device
  cudaStream_t stream;
  gemm::Gating gating;
  gemm::Up up;
};

// saving_forward also writes what is kept for the backward: the pre-activation, or ReLU's bits.
enum class Kind { forward, saving_forward, backward, gating, glu };

using Launch = cudaError_t (*)(const Product&);

// `transposed`: operand A, the weight, is read along k, as problem.transpose_a says. Nothing
// without an activation; ReLU as a gate is left to other kernels.
template <Kind kind, gemm::Type type, bool transposed>
Launch kernel_of(Activation activation);

}  // namespace fused::cuda::hopper
