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

Triple cast_to(const Tensor& input, at::ScalarType dtype) {
  const double most = largest(dtype);
  const auto maximum = input.abs().max().to(at::kDouble);
  // In fp64, as torch divides a number by a tensor.
  const auto scale = at::reciprocal(maximum.clamp_min(least_maximum)).mul(most).to(at::kFloat);
  const auto rows = input.to(at::kFloat).mul(scale).clamp(-most, most).to(dtype).contiguous();
  return {rows, rows.t().contiguous(), scale.reciprocal()};
}

Triple e4m3(const Tensor& values) { return cast_to(values, at::kFloat8_e4m3fn); }

Quadruple gradient_and_sum(const Tensor& gradient, bool sum) {
  auto [rows, columns, inverse] = cast_to(gradient, at::kFloat8_e5m2);
  return {std::move(rows), std::move(columns), std::move(inverse), sum_of(gradient, sum)};
}

}  // namespace

Quadruple Reference::cast(const Tensor& input, bool gradient, bool sum) {
  explain::append(in_aten);
  if (gradient) return gradient_and_sum(input, sum);
  auto [rows, columns, inverse] = e4m3(input);
  return {std::move(rows), std::move(columns), std::move(inverse), sum_of(input, sum)};
}

Triple Reference::activation(const Tensor& z, Activation activation) {
  explain::append(in_aten);
  return e4m3(activate(z, activation));
}

Quadruple Reference::activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                         bool sum) {
  explain::append(in_aten);
  const auto dz =
      reference::gradient_from_saved(reference::dense(grad), reference::dense(z), activation);
  return gradient_and_sum(dz, sum);
}

Triple Reference::gating(const Tensor& gate, const Tensor& up, Activation activation) {
  explain::append(in_aten);
  return e4m3(activate(gate, activation) * up);
}

Octuple Reference::gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                   Activation activation, bool together, bool sum) {
  explain::append(in_aten);
  const auto grad_gate = activation_gradient(grad * up, gate, activation);
  const auto grad_up = grad * activate(gate, activation);
  if (together) {
    const auto none = [&] { return reference::unwanted(gate); };
    return std::tuple_cat(gradient_and_sum(at::cat({grad_gate, grad_up}, 1), sum),
                          Quadruple(none(), none(), none(), none()));
  }
  return std::tuple_cat(gradient_and_sum(grad_gate, sum), gradient_and_sum(grad_up, sum));
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
