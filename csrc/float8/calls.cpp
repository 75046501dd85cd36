#include "float8/operators.h"
#include "fused_linear.h"

namespace fused {

Tensor float8_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     std::string_view activation) {
  return float8::Linear::call(input, weight, bias, activation);
}

Tensor float8_mlp(const Tensor& input, at::TensorList weights,
                  const c10::List<OptionalTensor>& biases, std::string_view activation) {
  return float8::Mlp::call(input, weights, biases, activation);
}

Tensor float8_gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                        const Tensor& down, const OptionalTensor& gate_bias,
                        const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                        std::string_view activation) {
  return float8::GatedMlp::call(input, gate, up, down, gate_bias, up_bias, down_bias, activation);
}

}  // namespace fused
