#pragma once

// The linear operators' kernels, as the dispatcher calls them. A backend has the functions of
// reference::Linear, and forward_bits if one kernel can do forward and relu_mask.

#include "core/activation.h"
#include "core/check.h"
#include "core/explain.h"
#include "core/policy.h"
#include "dispatch/operators.h"
#include "reference/linear.h"

#include <torch/library.h>

namespace fused::dispatch {

template <class Backend>
struct LinearKernels {
  template <typename Fn>
  static auto way(const char* op, const Tensor& like, const Fn& fn) {
    return under_policy<Backend, reference::Linear>(op, like, fn);
  }

  // Autograd knows what is kept for a backward.
  static Tensor layer(const char* op, const Tensor& input, const Tensor& weight,
                      const OptionalTensor& bias, Activation activation, Memory) {
    if (const char* why = objection(input, weight, bias)) {
      return reference::as_torch_does(op, why, input, weight, bias, activation);
    }
    const explain::Row row(op, input, weight);
    return way(row.op, input, [&](auto w) { return w.forward(input, weight, bias, activation); });
  }

  static Pair ensemble_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                              int64_t number) {
    const explain::Row row(EnsembleLinear::name, input, weight);
    check_ensemble(row.op, input, weight, bias);
    const auto activation = activation_of(row.op, number);
    return way(row.op, input, [&](auto w) -> Pair {
      if constexpr (requires { &decltype(w)::ensemble; }) {
        return w.ensemble(input, weight, bias, activation);
      }
      return reference::LinearFormula::ensemble(input, weight, bias, activation);
    });
  }

  static Pair linear_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         Activation activation) {
    const explain::Row row("_linear_aux", input, weight);
    check_linear(row.op, input, weight, bias);
    return way(row.op, input,
               [&](auto w) { return w.forward_aux(input, weight, bias, activation); });
  }

  static Tensor relu_mask(const Tensor& output) {
    const explain::Row row("_relu_mask", output, {});
    TORCH_CHECK(output.dim() >= 1, row.op,
                ": output must have shape [..., features], got a 0-dimensional tensor");
    check_floating(row.op, output, "output");
    return way(row.op, output, [&](auto w) { return w.relu_mask(output); });
  }

  static Pair linear_relu_bits(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias) {
    const explain::Row row("_linear_relu_bits", input, weight);
    check_linear(row.op, input, weight, bias);
    return way(row.op, input, [&](auto w) -> Pair {
      using Way = decltype(w);
      if constexpr (requires { &Way::forward_bits; }) {
        return Way::forward_bits(input, weight, bias);
      }
      auto output = Way::forward(input, weight, bias, Activation::relu);
      auto mask = Way::relu_mask(output);
      return {std::move(output), std::move(mask)};
    });
  }

  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad) {
    const explain::Row row("_activation_backward", grad_output, {});
    TORCH_CHECK(grad_output.dim() >= 1, row.op,
                ": grad_output must have shape [..., features], got a 0-dimensional tensor");
    check_floating(row.op, grad_output);
    check_saved(row.op, grad_output, saved, activation);
    return way(row.op, grad_output, [&](auto w) {
      return w.activation_backward(grad_output, saved, activation, bias_grad);
    });
  }

  static Triple linear_backward(const steps::LinearBackward& layer) {
    const explain::Row row("_linear_backward", layer.input, layer.weight);
    if (layer.weight.dim() == 3) {
      check_ensemble_backward(row.op, layer);
      return way(row.op, layer.grad_output, [&](auto w) {
        if constexpr (requires { &decltype(w)::ensemble_backward; }) {
          return w.ensemble_backward(layer);
        }
        return reference::LinearFormula::linear_backward(layer);
      });
    }
    check_linear_backward(row.op, layer);
    return way(row.op, layer.input, [&](auto w) { return w.linear_backward(layer); });
  }

  static void weight_gradient(const Tensor& grad_output, const OptionalTensor& input,
                              const Tensor& into, bool adds) {
    const auto& rows = has_value(input) ? *input : grad_output;
    const explain::Row row("_weight_gradient", rows, into);
    check_weight_gradient(row.op, grad_output, input, into);
    way(row.op, rows, [&](auto w) { w.weight_gradient(grad_output, input, into, adds); });
  }

  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous) {
    const explain::Row row("_linear_backward_across", layer.input, layer.weight);
    check_linear_backward(row.op, layer);
    check_saved(row.op, layer.input, previous.saved, previous.activation);
    return way(row.op, layer.input,
               [&](auto w) { return w.linear_backward_across(layer, previous); });
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, Activation activation, Memory) {
    check_mlp("mlp", weights, biases);
    if (const char* why = objection(input, weights, biases)) {
      return reference::mlp_as_torch_does(why, input, weights, biases, activation);
    }
    if constexpr (requires { &Backend::mlp_in_one; }) {
      const auto all = Backend::mlp_in_one(input, weights, biases, activation, /*keeps=*/false);
      if (!all.empty()) return all[weights.size() - 1];
    }
    auto hidden = input;
    for (size_t i = 0; i < weights.size(); ++i) {
      const explain::Row row("mlp", hidden, weights[i]);
      const bool last = i + 1 == weights.size();
      hidden = way(row.op, hidden, [&](auto w) {
        return w.forward(hidden, weights[i], biases.get(i), last ? Activation::none : activation);
      });
    }
    return hidden;
  }
};

template <class Backend>
void register_linear(torch::Library& m) {
  put<LinearOperators, LinearKernels<Backend>>(m);
  put<LinearSteps, LinearKernels<Backend>>(m);
  m.impl(EnsembleLinear::name, &LinearKernels<Backend>::ensemble_linear);
}

}  // namespace fused::dispatch
