#include "float8/reference.h"

#include "core/aten_activation.h"
#include "core/explain.h"
#include "reference/linear.h"

namespace fused::float8 {
namespace {

// torchao's EPS: the least maximum, so that a tensor of zeros has a scale.
constexpr double least_maximum = 1e-12;

constexpr const char* in_aten = "ATen";

double largest(at::ScalarType dtype) { return dtype == at::kFloat8_e5m2 ? 57344. : 448.; }

Tensor sum_of(const Tensor& input, bool wanted) {
  return wanted ? at::sum(input, {0}) : reference::unwanted(input);
}

Tensor empty_float8(const Tensor& like, at::ScalarType dtype) {
  return at::empty({0}, like.options().dtype(dtype));
}

// [M, N] by a scale
Tensor rows_of(const Tensor& input, const Tensor& scale, at::ScalarType dtype) {
  const double most = largest(dtype);
  return input.to(at::kFloat).mul(scale).clamp(-most, most).to(dtype).contiguous();
}

// Rows, columns, the scale's reciprocal, and the scale.
Quadruple cast_to(const Tensor& input, at::ScalarType dtype, bool columns) {
  const auto maximum = input.abs().max().to(at::kDouble);
  // In fp64, as torch divides a number by a tensor.
  const auto scale =
      at::reciprocal(maximum.clamp_min(least_maximum)).mul(largest(dtype)).to(at::kFloat);
  const auto rows = rows_of(input, scale, dtype);
  return {rows, columns ? rows.t().contiguous() : empty_float8(input, dtype), scale.reciprocal(),
          scale};
}

Quadruple e4m3(const Tensor& values, bool columns) {
  return cast_to(values, at::kFloat8_e4m3fn, columns);
}

Quadruple gradient_and_sum(const Tensor& gradient, bool sum, bool columns = true) {
  auto [rows, transposed, inverse, scale] = cast_to(gradient, at::kFloat8_e5m2, columns);
  return {std::move(rows), std::move(transposed), std::move(inverse), sum_of(gradient, sum)};
}

// `hidden` gives the tensor.
template <typename Fn>
Tensor columns_again(const Tensor& like, const OptionalTensor& scale, const Fn& hidden) {
  if (!has_value(scale)) return empty_float8(like, at::kFloat8_e4m3fn);
  return rows_of(hidden(), *scale, at::kFloat8_e4m3fn).t().contiguous();
}

}  // namespace

Quadruple Reference::cast(const Tensor& input, bool gradient, bool sum, bool columns) {
  explain::append(in_aten);
  if (gradient) return gradient_and_sum(input, sum, columns);
  auto [rows, transposed, inverse, scale] = e4m3(input, columns);
  return {std::move(rows), std::move(transposed), std::move(inverse), sum_of(input, sum)};
}

Quadruple Reference::activation(const Tensor& z, Activation activation, bool columns) {
  explain::append(in_aten);
  return e4m3(activate(z, activation), columns);
}

Quintuple Reference::activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                         bool sum, const OptionalTensor& scale) {
  explain::append(in_aten);
  const auto dz =
      reference::gradient_from_saved(reference::dense(grad), reference::dense(z), activation);
  return std::tuple_cat(
      gradient_and_sum(dz, sum),
      std::tuple(columns_again(grad, scale, [&] { return activate(z, activation); })));
}

Quadruple Reference::gating(const Tensor& gate, const Tensor& up, Activation activation,
                            bool columns) {
  explain::append(in_aten);
  return e4m3(activate(gate, activation) * up, columns);
}

Nonuple Reference::gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                   Activation activation, bool together, bool sum,
                                   const OptionalTensor& scale) {
  explain::append(in_aten);
  const auto activated = activate(gate, activation);
  const auto grad_gate = activation_gradient(grad * up, gate, activation);
  const auto grad_up = grad * activated;
  const std::tuple hidden(columns_again(grad, scale, [&] { return activated * up; }));
  if (together) {
    const auto none = [&] { return reference::unwanted(gate); };
    return std::tuple_cat(gradient_and_sum(at::cat({grad_gate, grad_up}, 1), sum),
                          Quadruple(none(), none(), none(), none()), hidden);
  }
  return std::tuple_cat(gradient_and_sum(grad_gate, sum), gradient_and_sum(grad_up, sum), hidden);
}

Tensor Reference::product(const Tensor& a, const Tensor& b, const Tensor& inverse_a,
                          const Tensor& inverse_b, const OptionalTensor& bias,
                          const OptionalTensor& add, at::ScalarType dtype, bool) {
  explain::append(in_aten);
  auto sum = at::mm(a.to(at::kFloat).mul_(inverse_a), b.to(at::kFloat).mul_(inverse_b).t());
  if (has_value(bias)) sum.add_(*bias);
  if (has_value(add)) sum.add_(*add);
  return sum.to(dtype);
}

}  // namespace fused::float8
