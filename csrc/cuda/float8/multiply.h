#pragma once

// Products of FP8 matrices by the fastest of cuBLASLt's algorithms.

#include "core/check.h"

#include <optional>

namespace fused::cuda::float8 {

// (a bᵀ) · inverse_a · inverse_b + bias + add, as the operator _float8_product.
struct Call {
  const Tensor &a, &b, &inverse_a, &inverse_b;
  const OptionalTensor &bias, &add;
  at::ScalarType dtype;
  bool fast;
};

// Returns nullopt if the library has no algorithm for it.
std::optional<Tensor> multiply(const Call& call);

}  // namespace fused::cuda::float8
