#pragma once

// What a kernel gets. One function a kernel; kernels.cu instantiates each.

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

template <gemm::Type type, Activation activation>
cudaError_t forward(const Product& product);

// With what is kept for the backward: the pre-activation, or ReLU's bits.
template <gemm::Type type, Activation activation>
cudaError_t saving_forward(const Product& product);

template <gemm::Type type, Activation activation>
cudaError_t backward(const Product& product);

template <gemm::Type type, Activation activation>
cudaError_t gating(const Product& product);

template <gemm::Type type, Activation activation>
cudaError_t glu(const Product& product);

}  // namespace fused::cuda::hopper
