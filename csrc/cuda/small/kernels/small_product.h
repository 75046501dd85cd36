#pragma once

// Products of small networks. One launch does a product with its activation, bias and sums, because
// launches take most of the time there.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::kernels {

// result [rows, cols] = left · right over `inner`, rows of unit stride, of any length:
//
//   fprop   act(x Wᵀ + bias), the pre-activation to aux     left x, right W as stored
//   dgrad   g W · act'(aux), its column sums to sums        left g, right W
//   wgrad   gᵀ x, the column sums of g to sums              left g, right x
struct SmallProduct {
  gemm::Pass pass = gemm::Pass::fprop;
  Activation activation = Activation::none;
  gemm::Type type = gemm::Type::bf16;
  int rows = 0, cols = 0, inner = 0;
  const void *left = nullptr, *right = nullptr;
  int64_t ld_left = 0, ld_right = 0;  // elements
  void* result = nullptr;
  int64_t ld_result = 0;
  const void* bias = nullptr;  // [cols], or nothing
  void* aux = nullptr;         // [rows, cols], or nothing
  int64_t ld_aux = 0;
  void* sums = nullptr;  // or nothing
  int cluster = 0;       // dgrad with sums: the blocks that share those of a column
  // The distance between the operands of an ensemble's members, in elements; 0 if they share one.
  int members = 1;
  struct {
    int64_t left = 0, right = 0, result = 0, bias = 0, aux = 0, sums = 0;
  } apart;
};

// A layer's gradients of weight and input, which share a launch because neither needs the other.
struct SmallGradients {
  SmallProduct of_weight, of_input;  // or rows = 0
};

// Each layer's result is the next one's left operand.
struct SmallNetwork {
  static constexpr int most_layers = 4;
  int count = 0;
  SmallProduct layers[most_layers];
};

// Returns whether the current device has these kernels, which need tensor cores for bf16.
bool have_small_products();

void small_forward(const SmallProduct& product, cudaStream_t stream);
void small_backward(const SmallGradients& gradients, cudaStream_t stream);
void small_network(const SmallNetwork& network, cudaStream_t stream);

}  // namespace fused::cuda::kernels
