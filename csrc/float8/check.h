#pragma once

// Checks of the steps' arguments, symbolic as those of core/check.h.

#include "core/check.h"

namespace fused::float8 {

inline bool is_castable(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat;
}

inline bool is_float8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

// A matrix that is to be cast.
void check_matrix(const char* op, const char* what, const Tensor& tensor);
void check_like(const char* op, const char* what, const Tensor& tensor, const Tensor& like);

// z, or for ReLU the bit mask of it.
void check_preactivation(const char* op, const Tensor& grad, const Tensor& z,
                         Activation activation);

// The scale of what the backward makes again from z, or none.
void check_scale(const char* op, const OptionalTensor& scale, const Tensor& z);

struct Product {
  const Tensor& a;
  const Tensor& b;
  const Tensor& inverse_a;
  const Tensor& inverse_b;
  const OptionalTensor& bias;
  const OptionalTensor& add;
  at::ScalarType dtype;
};
void check_product(const char* op, const Product& product);

}  // namespace fused::float8
