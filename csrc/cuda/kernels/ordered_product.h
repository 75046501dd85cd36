#pragma once

// A product that adds in the same order for every number of rows.

#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

// Computes result [rows, cols] = left [rows, inner] · right [inner, cols] + bias. Strides are any,
// in elements.
struct OrderedProduct {
  gemm::Type type = gemm::Type::f32;  // or f64
  int64_t rows = 0, cols = 0, inner = 0;
  const void* left = nullptr;
  int64_t left_row = 0, left_inner = 1;
  const void* right = nullptr;
  int64_t right_inner = 0, right_col = 1;
  const void* bias = nullptr;  // [cols], or nothing
  void* result = nullptr;      // rows of unit stride
  int64_t ld_result = 0;
};

void ordered_product(const OrderedProduct& product, cudaStream_t stream);

}  // namespace fused::cuda::kernels
