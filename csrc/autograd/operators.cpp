// The Autograd kernels of linear and gated layers: which way a call goes. Thin, symbolic,
// dispatcher calls only.

#include "autograd/arguments.h"
#include "autograd/nodes.h"
#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"
#include "fused_linear.h"

#include <algorithm>
#include <vector>

namespace fused::autograd {
namespace {

struct LinearAutograd {
  static Tensor layer(const char* op, const Tensor& input, const Tensor& weight,
                      const OptionalTensor& bias, Activation activation, Memory memory) {
    const bool formula = wants_formula(input, weight, bias);
    if (!formula && !wants_gradient(input, weight, bias)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return forward_for_inference(input, weight, bias, activation);
    }
    // Here and not only in the kernels below, whose names the user has not called.
    const char* why = objection(input, weight, bias);
    if (formula || why) {
      return reference::as_torch_does(op, why, input, weight, bias, activation);
    }
    check_devices(op, input, weight, bias);
    return linear_with_gradient(input, weight, bias, activation, memory);
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, Activation activation, Memory memory) {
    std::vector<Tensor> all{input};
    all.insert(all.end(), weights.begin(), weights.end());
    for (const OptionalTensor& bias : biases) {
      if (has_value(bias)) all.push_back(*bias);
    }
    const auto any = [&](const auto& condition) { return std::ranges::any_of(all, condition); };
    const bool formula = any([](const Tensor& t) { return wants_formula(t); });
    if (!formula && !any([](const Tensor& t) { return wants_gradient(t); })) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return fused::mlp(input, weights, biases, name(activation));
    }
    check_mlp("mlp", weights, biases);
    const char* why = objection(input, weights, biases);
    if (formula || why) {
      return reference::mlp_as_torch_does(why, input, weights, biases, activation);
    }
    check_devices("mlp", input, weights, biases);
    return mlp_with_gradient(input, weights, biases, activation, memory);
  }
};

struct GatedAutograd {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory memory) {
    const auto& [input, gate, up, gate_bias, up_bias] = layer;
    const bool formula = wants_formula(input, gate, up, gate_bias, up_bias, down.weight, down.bias);
    if (!formula && !wants_gradient(input, gate, up, gate_bias, up_bias, down.weight, down.bias)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return down.exists()
                 ? fused::gated_mlp(input, gate, up, down.weight, gate_bias, up_bias, down.bias,
                                    name(activation))
                 : fused::linear_glu(input, gate, up, gate_bias, up_bias, name(activation));
    }
    gated::check(op, layer);
    const char* why = gated::objection(layer, down);
    if (formula || why) return reference::gated_as_torch_does(op, why, layer, down, activation);
    gated::check_devices(op, layer, down);
    return gated_with_gradient(layer, down, activation, memory);
  }
};

Pair ensemble_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     int64_t number) {
  const auto activation = activation_of(dispatch::EnsembleLinear::name, number);
  if (wants_formula(input, weight, bias)) {
    return reference::LinearFormula::ensemble(input, weight, bias, activation);
  }
  if (wants_gradient(input, weight, bias)) {
    auto output = linear_with_gradient(input, weight, bias, activation, Memory::standard);
    return {output, reference::unwanted(output)};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return dispatch::EnsembleLinear::call(input, weight, bias, number);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  m.impl(dispatch::EnsembleLinear::name, ensemble_linear);
  dispatch::put<dispatch::LinearOperators, LinearAutograd>(m);
  dispatch::put<dispatch::GatedOperators, GatedAutograd>(m);
  put_steps<dispatch::LinearSteps, dispatch::LinearKernels<reference::LinearFormula>>(m);
  put_steps<dispatch::GatedSteps, dispatch::GatedKernels<reference::GluFormula>>(m);
}

}  // namespace fused::autograd
