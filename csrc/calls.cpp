// The C++ API: typed calls through the dispatcher.

#include "dispatch/signatures.h"
#include "fused_linear.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace fused {
namespace {

using dispatch::Pair, dispatch::Triple, dispatch::Quadruple, dispatch::Quintuple;

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = find<dispatch::Linear>("fused::linear");
  return op.call(input, weight, bias);
}

Tensor linear_relu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   std::string_view memory) {
  static const auto op = find<dispatch::LinearRelu>("fused::linear_relu");
  return op.call(input, weight, bias, memory);
}

Tensor linear_gelu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   std::string_view approximate, std::string_view memory) {
  static const auto op = find<dispatch::LinearGelu>("fused::linear_gelu");
  return op.call(input, weight, bias, approximate, memory);
}

Tensor linear_silu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   std::string_view memory) {
  static const auto op = find<dispatch::LinearSilu>("fused::linear_silu");
  return op.call(input, weight, bias, memory);
}

Tensor mlp(const Tensor& input, at::TensorList weights,
           const c10::List<std::optional<Tensor>>& biases, std::string_view activation,
           std::string_view memory) {
  static const auto op = find<dispatch::Mlp>("fused::mlp");
  return op.call(input, weights, biases, activation, memory);
}

Tensor linear_glu(const Tensor& input, const Tensor& gate, const std::optional<Tensor>& up,
                  const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias,
                  std::string_view activation, std::string_view memory) {
  static const auto op = find<dispatch::LinearGlu>("fused::linear_glu");
  return op.call(input, gate, up, gate_bias, up_bias, activation, memory);
}

Tensor gated_mlp(const Tensor& input, const Tensor& gate, const std::optional<Tensor>& up,
                 const Tensor& down, const std::optional<Tensor>& gate_bias,
                 const std::optional<Tensor>& up_bias, const std::optional<Tensor>& down_bias,
                 std::string_view activation, std::string_view memory) {
  static const auto op = find<dispatch::GatedMlp>("fused::gated_mlp");
  return op.call(input, gate, up, down, gate_bias, up_bias, down_bias, activation, memory);
}

Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups) {
  return conv2d_relu_symint(input, weight, bias, c10::fromIntArrayRefSlow(stride),
                            c10::fromIntArrayRefSlow(padding), c10::fromIntArrayRefSlow(dilation),
                            groups);
}

Tensor conv2d_relu_symint(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          c10::SymInt groups) {
  static const auto op = find<dispatch::Conv2dRelu>("fused::conv2d_relu");
  return op.call(input, weight, bias, stride, padding, dilation, std::move(groups));
}

namespace steps {

Pair linear_relu_aux(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = find<dispatch::LinearReluAux>("fused::_linear_relu_aux");
  return op.call(input, weight, bias);
}

Pair linear_gelu_aux(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                     std::string_view approximate) {
  static const auto op = find<dispatch::LinearGeluAux>("fused::_linear_gelu_aux");
  return op.call(input, weight, bias, approximate);
}

Pair linear_silu_aux(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = find<dispatch::LinearSiluAux>("fused::_linear_silu_aux");
  return op.call(input, weight, bias);
}

Tensor relu_mask(const Tensor& output) {
  static const auto op = find<dispatch::ReluMask>("fused::_relu_mask");
  return op.call(output);
}

Pair linear_relu_bits(const Tensor& input, const Tensor& weight,
                      const std::optional<Tensor>& bias) {
  static const auto op = find<dispatch::LinearReluBits>("fused::_linear_relu_bits");
  return op.call(input, weight, bias);
}

Pair activation_backward(const Tensor& grad_output, const Tensor& saved, Activation activation,
                         bool bias_grad) {
  static const auto op = find<dispatch::ActivationBackward>("fused::_activation_backward");
  return op.call(grad_output, saved, name(activation), bias_grad);
}

Pair channels_relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
  static const auto op = find<dispatch::ChannelsReluBackward>("fused::_channels_relu_backward");
  return op.call(grad_output, output, bias_grad);
}

Triple linear_backward(const LinearBackward& layer) {
  static const auto op = find<dispatch::LinearBackward>("fused::_linear_backward");
  return op.call(layer.grad_output, layer.input, layer.weight, layer.saved, name(layer.activation),
                 layer.wanted);
}

Quadruple linear_backward_across(const LinearBackward& layer, const PreviousLayer& previous) {
  static const auto op = find<dispatch::LinearBackwardAcross>("fused::_linear_backward_across");
  return op.call(layer.grad_output, layer.input, layer.weight, layer.saved, name(layer.activation),
                 layer.wanted, previous.saved, name(previous.activation), previous.bias_grad);
}

Tensor glu(const Tensor& gate, const std::optional<Tensor>& up, Activation activation) {
  static const auto op = find<dispatch::Glu>("fused::_glu");
  return op.call(gate, up, name(activation));
}

Triple linear_glu_aux(const Tensor& input, const Tensor& gate, const std::optional<Tensor>& up,
                      const std::optional<Tensor>& gate_bias, const std::optional<Tensor>& up_bias,
                      Activation activation, bool keeps) {
  static const auto op = find<dispatch::LinearGluAux>("fused::_linear_glu_aux");
  return op.call(input, gate, up, gate_bias, up_bias, name(activation), keeps);
}

Quintuple glu_backward(const GluBackward& step) {
  static const auto op = find<dispatch::GluBackward>("fused::_glu_backward");
  return op.call(step.grad_output, step.gate, step.up, name(step.activation), step.wanted,
                 step.down);
}

}  // namespace steps
}  // namespace fused
