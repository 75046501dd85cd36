#pragma once

// The steps in ATen, which are their definition: the casts are torchao's, bit for bit.

#include "float8/operators.h"

namespace fused::float8 {

struct Reference {
  static Quadruple cast(const Tensor& input, bool gradient, bool sum);
  static Triple activation(const Tensor& z, Activation activation);
  static Quadruple activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                       bool sum);
  static Triple gating(const Tensor& gate, const Tensor& up, Activation activation);
  static Octuple gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                 Activation activation, bool together, bool sum);
  static Tensor product(const Tensor& a, const Tensor& b, const Tensor& inverse_a,
                        const Tensor& inverse_b, const OptionalTensor& bias,
                        const OptionalTensor& add, at::ScalarType dtype, bool fast);
};

}  // namespace fused::float8
