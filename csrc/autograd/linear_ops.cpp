// The Autograd kernels: which way a call goes. Thin, symbolic, dispatcher calls only; the nodes are
// in linear_node.cpp and mlp.cpp.

#include "autograd/arguments.h"
#include "reference/linear.h"
#include "core/explain.h"
#include "fused_linear.h"
#include "dispatch/linear_kernels.h"
#include "autograd/linear_node.h"
#include "core/memory.h"
#include "autograd/mlp_node.h"

#include <torch/csrc/autograd/custom_function.h>
#include <algorithm>
#include <vector>

namespace fused {
namespace {

Tensor forward(const char* op, const Tensor& input, const Tensor& weight,
               const OptionalTensor& bias, Activation activation,
               Memory memory = Memory::standard) {
  const bool formula = wants_formula(input, weight, bias);
  if (!formula && !wants_gradient(input, weight, bias)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_for_inference(input, weight, bias, activation);
  }
  // Here and not only in the kernels below, whose names the user has not called.
  check_linear(op, input, weight, bias);
  if (formula) {
    const explain::Row row(op, input, weight);
    explain::step("reference");
    return Composite::forward(input, weight, bias, activation);
  }
  return LinearActivation::apply(input, weight, bias, activation, memory);
}

Tensor linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return forward("linear", input, weight, bias, Activation::none);
}

Tensor linear_relu_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view memory) {
  constexpr auto op = "linear_relu";
  return forward(op, input, weight, bias, Activation::relu, parse_memory(op, memory));
}

Tensor linear_gelu_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view approximate, std::string_view memory) {
  constexpr auto op = "linear_gelu";
  return forward(op, input, weight, bias, parse_approximate(op, approximate),
                 parse_memory(op, memory));
}

Tensor mlp_autograd(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, std::string_view text,
                    std::string_view memory_text) {
  const auto activation = parse_hidden_activation("mlp", "activation", text);
  const auto memory = parse_memory("mlp", memory_text);
  std::vector<Tensor> all{input};
  all.insert(all.end(), weights.begin(), weights.end());
  for (const OptionalTensor& bias : biases) {
    if (has_value(bias)) all.push_back(*bias);
  }
  const auto any = [&](const auto& condition) { return std::ranges::any_of(all, condition); };
  const bool formula = any([](const Tensor& t) { return wants_formula(t); });
  if (!formula && !any([](const Tensor& t) { return wants_gradient(t); })) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return fused::mlp(input, weights, biases, text);
  }
  check_mlp(input, weights, biases);
  if (formula) {
    const explain::Row row("mlp", input, weights[0]);
    explain::step("reference");
    return Composite::mlp(input, weights, biases, activation);
  }
  return mlp_with_gradient(input, weights, biases, activation, memory);
}

// The single steps, called directly: differentiable through the formula.
using Formula = Kernels<Composite>;

std::tuple<Tensor, Tensor> relu_aux_autograd(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias) {
  if (wants_gradient(input, weight, bias) || wants_formula(input, weight, bias)) {
    return Formula::relu_aux(input, weight, bias);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_relu_aux(input, weight, bias);
}

std::tuple<Tensor, Tensor> gelu_aux_autograd(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias,
                                             std::string_view approximate) {
  if (wants_gradient(input, weight, bias) || wants_formula(input, weight, bias)) {
    return Formula::gelu_aux(input, weight, bias, approximate);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_gelu_aux(input, weight, bias, approximate);
}

// Bits have no gradient.
Tensor relu_mask_autograd(const Tensor& output) {
  if (wants_formula(output)) return Formula::relu_mask(output);
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::relu_mask(output);
}

std::tuple<Tensor, Tensor> activation_backward_autograd(const Tensor& grad_output,
                                                        const Tensor& saved,
                                                        std::string_view activation,
                                                        bool bias_grad) {
  if (wants_gradient(grad_output, saved) || wants_formula(grad_output, saved)) {
    return Formula::activation_backward(grad_output, saved, activation, bias_grad);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::activation_backward(grad_output, saved, activation, bias_grad);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, std::string_view activation, std::array<bool, 3> output_mask) {
  if (wants_gradient(grad_output, input, weight, saved) ||
      wants_formula(grad_output, input, weight, saved)) {
    return Formula::linear_backward(grad_output, input, weight, saved, activation, output_mask);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_backward(grad_output, input, weight, saved, activation, output_mask);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, std::string_view activation, std::array<bool, 3> output_mask,
    const Tensor& previous_saved, std::string_view previous_activation, bool previous_bias_grad) {
  if (wants_gradient(grad_output, input, weight, saved, previous_saved) ||
      wants_formula(grad_output, input, weight, saved, previous_saved)) {
    return Formula::linear_backward_across(grad_output, input, weight, saved, activation,
                                           output_mask, previous_saved, previous_activation,
                                           previous_bias_grad);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_backward_across(grad_output, input, weight, saved, activation, output_mask,
                                       previous_saved, previous_activation, previous_bias_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  m.impl("linear", linear_autograd);
  m.impl("linear_relu", linear_relu_autograd);
  m.impl("linear_gelu", linear_gelu_autograd);
  m.impl("mlp", mlp_autograd);
  m.impl("_linear_relu_aux", relu_aux_autograd);
  m.impl("_linear_gelu_aux", gelu_aux_autograd);
  m.impl("_relu_mask", relu_mask_autograd);
  m.impl("_activation_backward", activation_backward_autograd);
  m.impl("_linear_backward", linear_backward_autograd);
  m.impl("_linear_backward_across", linear_backward_across_autograd);
}

}  // namespace fused
