#pragma once

#include "core/activation.h"
#include "gemm/hopper.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::hopper {

// Column-major, as in gemm/problem.h: features run along m, tokens along n.
struct Product : gemm::Operands {
  int m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldd = 0;
  int64_t ld_aux = 0;         // of bits, if it holds bits
  float* partials = nullptr;  // backward: or nothing
  gemm::hopper::Order order = {};
  int processors = 0;  // of the device
  cudaStream_t stream = nullptr;
};

// saving_forward also writes the pre-activation, or ReLU's bits.
enum class Kind { forward, narrow_forward, saving_forward, backward, gating, glu };

using Launch = cudaError_t (*)(const Product&);

// `transposed`: operand A, the weight, is read along k, as problem.transpose_a says. Without an
// activation there is the plain forward alone, and none is for ReLU as a gate.
template <Kind kind, gemm::Type type, bool transposed>
Launch kernel_of(Activation activation);

}  // namespace fused::cuda::hopper
