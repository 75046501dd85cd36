#include "dispatch/operators.h"
#include "fused_linear.h"

namespace fused {

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return dispatch::Linear::call(input, weight, bias);
}

Tensor linear_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view memory) {
  return dispatch::LinearRelu::call(input, weight, bias, memory);
}

Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view approximate, std::string_view memory) {
  return dispatch::LinearGelu::call(input, weight, bias, approximate, memory);
}

Tensor linear_silu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view memory) {
  return dispatch::LinearSilu::call(input, weight, bias, memory);
}

Tensor linear_relu2(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::string_view memory) {
  return dispatch::LinearRelu2::call(input, weight, bias, memory);
}

Tensor mlp(const Tensor& input, at::TensorList weights, const c10::List<OptionalTensor>& biases,
           std::string_view activation, std::string_view memory) {
  return dispatch::Mlp::call(input, weights, biases, activation, memory);
}

Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                  std::string_view activation, std::string_view memory) {
  return dispatch::LinearGlu::call(input, gate, up, gate_bias, up_bias, activation, memory);
}

Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                 const Tensor& down, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                 const OptionalTensor& down_bias, std::string_view activation,
                 std::string_view memory) {
  return dispatch::GatedMlp::call(input, gate, up, down, gate_bias, up_bias, down_bias, activation,
                                  memory);
}

namespace steps {

Pair linear_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                Activation activation) {
  return dispatch::LinearAux::call(input, weight, bias, number(activation));
}

Tensor relu_mask(const Tensor& output) { return dispatch::ReluMask::call(output); }

Pair linear_relu_bits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return dispatch::LinearReluBits::call(input, weight, bias);
}

Pair activation_backward(const Tensor& grad_output, const Tensor& saved, Activation activation,
                         bool bias_grad) {
  return dispatch::ActivationBackward::call(grad_output, saved, number(activation), bias_grad);
}

Triple linear_backward(const LinearBackward& layer) {
  return dispatch::LinearBackward::call(layer.grad_output, layer.input, layer.weight, layer.saved,
                                        number(layer.activation), layer.wanted);
}

void weight_gradient(const Tensor& grad_output, const OptionalTensor& input, const Tensor& into,
                     bool adds) {
  dispatch::WeightGradient::call(grad_output, input, into, adds);
}

Quadruple linear_backward_across(const LinearBackward& layer, const PreviousLayer& previous) {
  return dispatch::LinearBackwardAcross::call(
      layer.grad_output, layer.input, layer.weight, layer.saved, number(layer.activation),
      layer.wanted, previous.saved, number(previous.activation), previous.bias_grad);
}

Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation) {
  return dispatch::Glu::call(gate, up, number(activation));
}

Triple linear_glu_aux(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                      const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                      Activation activation, bool keeps) {
  return dispatch::LinearGluAux::call(input, gate, up, gate_bias, up_bias, number(activation),
                                      keeps);
}

Quintuple glu_backward(const GluBackward& step) {
  return dispatch::GluBackward::call(step.grad_output, step.gate, step.up, number(step.activation),
                                     step.wanted, step.down);
}

}  // namespace steps
}  // namespace fused
