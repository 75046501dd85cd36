#pragma once

// The steps with names for what they give.

#include "float8/operators.h"

#include <utility>

namespace fused::float8 {

struct Cast {
  Tensor rows, columns, inverse;  // [M, N], [N, M], []
};

struct GradientCast {
  Cast cast;
  Tensor sum;  // over all rows, or [0]
};

inline Cast cast(const Tensor& values) {
  auto [rows, columns, inverse, sum] = CastStep::call(values, /*gradient=*/false, /*sum=*/false);
  return {std::move(rows), std::move(columns), std::move(inverse)};
}

inline GradientCast cast_gradient(const Tensor& grad, bool sums) {
  auto [rows, columns, inverse, sum] = CastStep::call(grad, /*gradient=*/true, sums);
  return {{std::move(rows), std::move(columns), std::move(inverse)}, std::move(sum)};
}

inline Cast activation(const Tensor& z, Activation activation) {
  auto [rows, columns, inverse] = ActivationStep::call(z, static_cast<int64_t>(activation));
  return {std::move(rows), std::move(columns), std::move(inverse)};
}

inline GradientCast activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                        bool sums) {
  auto [rows, columns, inverse, sum] =
      ActivationBackwardStep::call(grad, z, static_cast<int64_t>(activation), sums);
  return {{std::move(rows), std::move(columns), std::move(inverse)}, std::move(sum)};
}

inline Cast gating(const Tensor& gate, const Tensor& up, Activation activation) {
  auto [rows, columns, inverse] = GatingStep::call(gate, up, static_cast<int64_t>(activation));
  return {std::move(rows), std::move(columns), std::move(inverse)};
}

// Of gate and up; together, of both in the first.
inline std::pair<GradientCast, GradientCast> gating_backward(const Tensor& grad, const Tensor& gate,
                                                             const Tensor& up,
                                                             Activation activation, bool together,
                                                             bool sums) {
  auto [gate_rows, gate_columns, gate_inverse, gate_sum, up_rows, up_columns, up_inverse, up_sum] =
      GatingBackwardStep::call(grad, gate, up, static_cast<int64_t>(activation), together, sums);
  return {{{gate_rows, gate_columns, gate_inverse}, gate_sum},
          {{up_rows, up_columns, up_inverse}, up_sum}};
}

// Nothing is called where nothing is to be done, as no operator below autograd may return its
// argument.
inline Tensor in_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}
inline OptionalTensor in_dtype(const OptionalTensor& tensor, at::ScalarType dtype) {
  return has_value(tensor) ? OptionalTensor(in_dtype(*tensor, dtype)) : std::nullopt;
}

// x Wᵀ + b
inline Tensor forward_product(const Cast& x, const Cast& w, const OptionalTensor& bias,
                              at::ScalarType dtype) {
  auto added = in_dtype(bias, dtype);
  if (has_value(added) && !added->is_contiguous()) added = added->contiguous();
  return ProductStep::call(x.rows, w.rows, x.inverse, w.inverse, added, {}, dtype,
                           /*fast=*/true);
}

// dz W, added to what the other half of a gated layer gives
inline Tensor input_gradient(const Cast& dz, const Cast& w, at::ScalarType dtype,
                             const OptionalTensor& add = {}) {
  return ProductStep::call(dz.rows, w.columns, dz.inverse, w.inverse, {}, add, dtype,
                           /*fast=*/false);
}

// dzᵀ x
inline Tensor weight_gradient(const Cast& dz, const Cast& x, at::ScalarType dtype) {
  return ProductStep::call(dz.columns, x.columns, dz.inverse, x.inverse, {}, {}, dtype,
                           /*fast=*/false);
}

}  // namespace fused::float8
