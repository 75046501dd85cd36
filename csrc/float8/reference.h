#pragma once

// The steps in ATen, which are their definition: the casts are torchao's, bit for bit.

#include "float8/operators.h"

namespace fused::float8 {

struct Reference {
  static Quadruple cast(const Tensor& input, bool gradient, bool sum, bool columns);
  static Quadruple activation(const Tensor& z, Activation activation, bool columns);
  static Quintuple activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                       bool sum, const OptionalTensor& scale);
  static Quadruple gating(const Tensor& gate, const Tensor& up, Activation activation,
                          bool columns);
  static Nonuple gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                 Activation activation, bool together, bool sum,
                                 const OptionalTensor& scale);
  static Tensor product(const Tensor& a, const Tensor& b, const Tensor& inverse_a,
                        const Tensor& inverse_b, const OptionalTensor& bias,
                        const OptionalTensor& add, at::ScalarType dtype, bool fast);
};

}  // namespace fused::float8
