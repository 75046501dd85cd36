// Every operator of the namespace `fused`, and its C++ entry. Kernels are registered where they
// are written: autograd.cpp, autocast.cpp, composite.cpp, meta.cpp, cpu.cpp, cuda.cpp, conv*.cpp.

#include "cpu/packed_weights.h"
#include "core/explain.h"
#include "fused_linear.h"
#include "autograd/handover.h"
#include "plans/registry.h"
#include "core/policy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {

std::string get_policy() { return fused::name(fused::policy()); }
void set_policy(std::string_view text) {
  fused::set_policy(fused::parse_policy(text, "set_policy: policy"));
}

}  // namespace

TORCH_LIBRARY(fused, m) {
  // Inductor hands the arguments over in the strides they were traced with.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};

  // What users call. Nothing but the result is written where no gradient is wanted. With the memory
  // 'low' the backward computes anew what it can instead of keeping it.
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", tags);
  m.def(
      "linear_relu(Tensor input, Tensor weight, Tensor? bias=None, *, str memory='default') -> "
      "Tensor",
      tags);
  m.def(
      "linear_gelu(Tensor input, Tensor weight, Tensor? bias=None, *, str approximate='tanh', "
      "str memory='default') -> Tensor",
      tags);

  // Layers in a chain, the activation ('relu', 'gelu_tanh', 'gelu_erf') between them.
  m.def(
      "mlp(Tensor input, Tensor[] weights, Tensor?[] biases, str activation, *, "
      "str memory='default') -> Tensor",
      tags);

  // relu(conv2d(input, weight) + bias)
  m.def(
      "conv2d_relu(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      tags);

  // Forward that also gives what the backward needs: ReLU's bit mask, GELU's pre-activation.
  m.def(
      "_linear_relu_aux(Tensor input, Tensor weight, Tensor? bias=None) -> "
      "(Tensor output, Tensor mask)",
      tags);
  m.def(
      "_linear_gelu_aux(Tensor input, Tensor weight, Tensor? bias=None, *, "
      "str approximate='tanh') -> (Tensor output, Tensor preactivation)",
      tags);

  // What low memory keeps of ReLU's output: a bit for each element, 0 where output <= 0.
  m.def("_relu_mask(Tensor output) -> Tensor", tags);

  // act'(saved) · grad_output and its column sums, in one pass over memory.
  m.def(
      "_activation_backward(Tensor grad_output, Tensor saved, str activation, bool bias_grad) -> "
      "(Tensor grad_preactivation, Tensor grad_bias)",
      tags);

  // The same for ReLU's output of a convolution, summed for each channel.
  m.def(
      "_channels_relu_backward(Tensor grad_output, Tensor output, bool bias_grad) -> "
      "(Tensor grad_preactivation, Tensor grad_bias)",
      tags);

  // The whole backward of one layer; gradients not wanted are tensors of no elements.
  m.def(
      "_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? saved, "
      "str activation, bool[3] output_mask) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);

  // The same, and on along the edge to the layer before, whose activation's derivative is applied
  // to grad_input and whose bias gradient is summed on the way.
  m.def(
      "_linear_backward_across(Tensor grad_output, Tensor input, Tensor weight, Tensor? saved, "
      "str activation, bool[3] output_mask, Tensor previous_saved, str previous_activation, "
      "bool previous_bias_grad) -> (Tensor grad_previous_preactivation, Tensor grad_weight, "
      "Tensor grad_bias, Tensor grad_previous_bias)",
      tags);

  // Process-wide choice of how the work is done: 'auto', 'cublaslt' or 'eager'.
  m.def("_policy() -> str", get_policy);
  m.def("_set_policy(str policy) -> ()", set_policy);

  // Whether separate layers hand gradients over to each other.
  m.def("_handover() -> bool", fused::handover::enabled);
  m.def("_set_handover(bool enabled) -> ()", fused::handover::set_enabled);

  // Whether weights that stay as they are are kept packed, on a CPU.
  m.def("_pack_weights() -> bool", fused::packed::enabled);
  m.def("_set_pack_weights(bool enabled) -> ()", fused::packed::set_enabled);

  // Plans: how long a problem may be measured, what has been decided, files of it.
  m.def("_plans_budget() -> float", fused::plans::budget);
  m.def("_plans_set_budget(float milliseconds) -> ()", fused::plans::set_budget);
  m.def("_plans_verbosity() -> int", fused::plans::verbosity);
  m.def("_plans_set_verbosity(int level) -> ()", fused::plans::set_verbosity);
  m.def("_plans_save(str path) -> ()", fused::plans::save);
  m.def("_plans_load(str path) -> int", fused::plans::load);
  m.def("_plans_clear() -> ()", fused::plans::clear);
  m.def("_plans_show() -> str[]", fused::plans::show);
  m.def("_plans_from_environment() -> ()", fused::plans::from_environment);

  // A report of what ran: the rows between the two calls.
  m.def("_explain_start() -> ()", fused::explain::start);
  m.def("_explain_stop() -> str[]", fused::explain::stop);
}

namespace fused {
namespace {

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Forward = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&);
using ForwardRelu = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                           std::string_view);
using ForwardGelu = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                           std::string_view, std::string_view);
using Mlp = Tensor(const Tensor&, at::TensorList, const c10::List<std::optional<Tensor>>&,
                   std::string_view, std::string_view);
using Conv = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, c10::SymIntArrayRef,
                    c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt);
using Pair = std::tuple<Tensor, Tensor>;
using ForwardAux = Pair(const Tensor&, const Tensor&, const std::optional<Tensor>&);
using ForwardGeluAux = Pair(const Tensor&, const Tensor&, const std::optional<Tensor>&,
                            std::string_view);
using ReluMask = Tensor(const Tensor&);
using ActivationBackward = Pair(const Tensor&, const Tensor&, std::string_view, bool);
using ChannelsReluBackward = Pair(const Tensor&, const Tensor&, bool);
using LinearBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                          const Tensor&,
                                                          const std::optional<Tensor>&,
                                                          std::string_view, std::array<bool, 3>);
using Quadruple = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using LinearBackwardAcross = Quadruple(const Tensor&, const Tensor&, const Tensor&,
                                       const std::optional<Tensor>&, std::string_view,
                                       std::array<bool, 3>, const Tensor&, std::string_view, bool);

}  // namespace

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = find<Forward>("fused::linear");
  return op.call(input, weight, bias);
}

Tensor linear_relu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   std::string_view memory) {
  static const auto op = find<ForwardRelu>("fused::linear_relu");
  return op.call(input, weight, bias, memory);
}

Tensor linear_gelu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   std::string_view approximate, std::string_view memory) {
  static const auto op = find<ForwardGelu>("fused::linear_gelu");
  return op.call(input, weight, bias, approximate, memory);
}

Tensor mlp(const Tensor& input, at::TensorList weights,
           const c10::List<std::optional<Tensor>>& biases, std::string_view activation,
           std::string_view memory) {
  static const auto op = find<Mlp>("fused::mlp");
  return op.call(input, weights, biases, activation, memory);
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
  static const auto op = find<Conv>("fused::conv2d_relu");
  return op.call(input, weight, bias, stride, padding, dilation, std::move(groups));
}

namespace steps {

Pair linear_relu_aux(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = find<ForwardAux>("fused::_linear_relu_aux");
  return op.call(input, weight, bias);
}

Pair linear_gelu_aux(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                     std::string_view approximate) {
  static const auto op = find<ForwardGeluAux>("fused::_linear_gelu_aux");
  return op.call(input, weight, bias, approximate);
}

Tensor relu_mask(const Tensor& output) {
  static const auto op = find<ReluMask>("fused::_relu_mask");
  return op.call(output);
}

Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                         std::string_view activation, bool bias_grad) {
  static const auto op = find<ActivationBackward>("fused::_activation_backward");
  return op.call(grad_output, saved, activation, bias_grad);
}

Pair channels_relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
  static const auto op = find<ChannelsReluBackward>("fused::_channels_relu_backward");
  return op.call(grad_output, output, bias_grad);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_output, const Tensor& input,
                                                   const Tensor& weight,
                                                   const std::optional<Tensor>& saved,
                                                   std::string_view activation,
                                                   std::array<bool, 3> output_mask) {
  static const auto op = find<LinearBackward>("fused::_linear_backward");
  return op.call(grad_output, input, weight, saved, activation, output_mask);
}

Quadruple linear_backward_across(const Tensor& grad_output, const Tensor& input,
                                 const Tensor& weight, const std::optional<Tensor>& saved,
                                 std::string_view activation, std::array<bool, 3> output_mask,
                                 const Tensor& previous_saved, std::string_view previous_activation,
                                 bool previous_bias_grad) {
  static const auto op = find<LinearBackwardAcross>("fused::_linear_backward_across");
  return op.call(grad_output, input, weight, saved, activation, output_mask, previous_saved,
                 previous_activation, previous_bias_grad);
}

}  // namespace steps
}  // namespace fused
