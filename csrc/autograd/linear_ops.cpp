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

struct LinearAutograd {
  static Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
    return forward("linear", input, weight, bias, Activation::none);
  }

  template <class Op, typename... Options>
  static Tensor layer(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      Options... options) {
    const auto [activation, memory] = Op::parse(options...);
    return forward(Op::name, input, weight, bias, activation, memory);
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, std::string_view activation,
                    std::string_view memory);
};

Tensor LinearAutograd::mlp(const Tensor& input, at::TensorList weights,
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

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  dispatch::put<dispatch::LinearOperators, LinearAutograd>(m);
  put_steps<dispatch::LinearSteps, dispatch::LinearKernels<reference::LinearFormula>>(m);
}

}  // namespace fused::autograd
