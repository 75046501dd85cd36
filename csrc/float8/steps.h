#pragma once

// The steps, with names for their results.

#include "float8/operators.h"

#include <utility>

namespace fused::float8 {

struct Cast {
  Tensor rows, columns, inverse;  // [M, N], [N, M] or [0], []
};

// A cast that the backward can compute again by its scale.
struct HiddenCast {
  Cast cast;
  Tensor scale;
};

struct GradientCast {
  Cast cast;
  Tensor sum;  // over all rows, or [0]
};

inline Cast cast(const Tensor& values, bool columns) {
  auto [rows, transposed, inverse, sum] =
      CastStep::call(values, /*gradient=*/false, /*sum=*/false, columns);
  return {std::move(rows), std::move(transposed), std::move(inverse)};
}

inline GradientCast cast_gradient(const Tensor& grad, bool sums, bool columns) {
  auto [rows, transposed, inverse, sum] = CastStep::call(grad, /*gradient=*/true, sums, columns);
  return {{std::move(rows), std::move(transposed), std::move(inverse)}, std::move(sum)};
}

inline HiddenCast activation(const Tensor& z, Activation activation, bool columns) {
  auto [rows, transposed, inverse, scale] = ActivationStep::call(z, number(activation), columns);
  return {{std::move(rows), std::move(transposed), std::move(inverse)}, std::move(scale)};
}

// With a scale, the second result holds the columns of act(z).
inline std::pair<GradientCast, Tensor> activation_backward(const Tensor& grad, const Tensor& z,
                                                           Activation activation, bool sums,
                                                           const OptionalTensor& scale = {}) {
  auto [rows, columns, inverse, sum, hidden] =
      ActivationBackwardStep::call(grad, z, number(activation), sums, scale);
  return {{{std::move(rows), std::move(columns), std::move(inverse)}, std::move(sum)},
          std::move(hidden)};
}

inline HiddenCast gating(const Tensor& gate, const Tensor& up, Activation activation,
                         bool columns) {
  auto [rows, transposed, inverse, scale] = GatingStep::call(gate, up, number(activation), columns);
  return {{std::move(rows), std::move(transposed), std::move(inverse)}, std::move(scale)};
}

struct GatingGradients {
  GradientCast gate, up;  // together, of both in the first
  Tensor hidden;          // the columns of act(gate) ⊙ up, where a scale was given
};

inline GatingGradients gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                       Activation activation, bool together, bool sums,
                                       const OptionalTensor& scale) {
  auto [gate_rows, gate_columns, gate_inverse, gate_sum, up_rows, up_columns, up_inverse, up_sum,
        hidden] =
      GatingBackwardStep::call(grad, gate, up, number(activation), together, sums, scale);
  return {{{gate_rows, gate_columns, gate_inverse}, gate_sum},
          {{up_rows, up_columns, up_inverse}, up_sum},
          hidden};
}

// Calls no operator if the dtype is right, because no operator below autograd may return its
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
