// The Autograd kernels of the linear operators: which way a call goes. Thin, symbolic, dispatcher
// calls only; the nodes are in linear_node.cpp and mlp_node.cpp.

#include "autograd/arguments.h"
#include "autograd/linear_node.h"
#include "autograd/mlp_node.h"
#include "core/explain.h"
#include "core/memory.h"
#include "dispatch/linear_kernels.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <algorithm>
#include <vector>

namespace fused::autograd {
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
  if (const char* why = objection(input, weight, bias)) {
    return reference::as_torch_does(op, why, input, weight, bias, activation);
  }
  check_devices(op, input, weight, bias);
  if (formula) {
    const explain::Row row(op, input, weight);
    explain::append("reference");
    return reference::LinearFormula::forward(input, weight, bias, activation);
  }
  return linear_with_gradient(input, weight, bias, activation, memory);
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

Tensor linear_silu_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view memory) {
  constexpr auto op = "linear_silu";
  return forward(op, input, weight, bias, Activation::silu, parse_memory(op, memory));
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
  check_mlp(weights, biases);
  if (const char* why = objection(input, weights, biases)) {
    return reference::mlp_as_torch_does(why, input, weights, biases, activation);
  }
  for (size_t i = 0; i < weights.size(); ++i)
    check_devices("mlp", input, weights[i], biases.get(i));
  if (formula) {
    const explain::Row row("mlp", input, weights[0]);
    explain::append("reference");
    return reference::LinearFormula::mlp(input, weights, biases, activation);
  }
  return mlp_with_gradient(input, weights, biases, activation, memory);
}

// The single steps, called directly.
using Formula = dispatch::LinearKernels<reference::LinearFormula>;

Tensor relu_mask_autograd(const Tensor& output) {
  if (wants_formula(output)) return Formula::relu_mask(output);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // bits have no gradient
  return steps::relu_mask(output);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  using namespace dispatch;
  m.impl("linear", linear_autograd);
  m.impl("linear_relu", linear_relu_autograd);
  m.impl("linear_gelu", linear_gelu_autograd);
  m.impl("linear_silu", linear_silu_autograd);
  m.impl("mlp", mlp_autograd);
  m.impl("_linear_relu_aux", Step<&Formula::linear_relu_aux, &steps::linear_relu_aux>::call);
  m.impl("_linear_gelu_aux", Step<&Formula::linear_gelu_aux, &steps::linear_gelu_aux>::call);
  m.impl("_linear_silu_aux", Step<&Formula::linear_silu_aux, &steps::linear_silu_aux>::call);
  m.impl("_relu_mask", relu_mask_autograd);
  m.impl("_linear_relu_bits", Step<&Formula::linear_relu_bits, &steps::linear_relu_bits>::call);
  m.impl("_activation_backward",
         flat_activation_backward<
             Step<&Formula::activation_backward, &steps::activation_backward>::call>);
  m.impl("_linear_backward",
         flat_linear_backward<Step<&Formula::linear_backward, &steps::linear_backward>::call>);
  m.impl("_linear_backward_across",
         flat_linear_backward_across<
             Step<&Formula::linear_backward_across, &steps::linear_backward_across>::call>);
}

}  // namespace fused::autograd
