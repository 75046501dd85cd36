#pragma once

// What every backend's kernels share: the dispatcher's signatures, the checks, the parsing of
// strings. A backend supplies six functions, those over an activation taking it as a value:
// forward, forward_aux, relu_mask, activation_backward, linear_backward, linear_backward_across
// (see Composite for their meaning).

#include "core/activation.h"
#include "core/check.h"
#include "reference/linear.h"
#include "core/explain.h"
#include "gemm/epilogue.h"
#include "core/memory.h"
#include "core/policy.h"

#include <torch/library.h>

#include <array>
#include <string_view>
#include <tuple>

namespace fused {

inline void check_saved(const char* op, const Tensor& grad_output, const Tensor& saved,
                        Activation activation) {
  if (activation == Activation::none) return;
  TORCH_CHECK(saved.device() == grad_output.device(), op,
              ": saved must be on the device of grad_output, ", grad_output.device(), ", got ",
              saved.device());
  const auto features = grad_output.sym_size(-1);
  if (activation == Activation::relu && saved.scalar_type() == at::kByte) {
    check_rows(op, "the ReLU mask", saved, grad_output, gemm::mask_bits(features) / 8);
  } else {
    check_dtype_and_device(op, "saved", saved, grad_output);
    check_rows(op, "saved", saved, grad_output, features);
  }
}

inline void check_linear_backward(const char* op, const Tensor& grad_output, const Tensor& input,
                                  const Tensor& weight, const OptionalTensor& saved,
                                  Activation activation) {
  check_linear(op, input, weight, {});
  check_dtype_and_device(op, "grad_output", grad_output, input);
  check_rows(op, "grad_output", grad_output, input, weight.sym_size(0));
  if (activation == Activation::none) return;
  TORCH_CHECK_VALUE(has_value(saved), op, ": activation '", name(activation),
                    "' needs saved, the output or the pre-activation, got None");
  check_saved(op, grad_output, *saved, activation);
}

template <class Backend>
struct Kernels {
  template <typename Fn>
  static auto way(const Fn& fn) {
    return under_policy<Backend, Reference>(fn);
  }

  static Tensor forward(const char* op, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, Activation activation) {
    check_linear(op, input, weight, bias);
    const explain::Row row(op, input, weight);
    return way([&](auto w) { return decltype(w)::forward(input, weight, bias, activation); });
  }

  static Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
    return forward("linear", input, weight, bias, Activation::none);
  }

  // What is kept for a backward is Autograd's affair: here the memory is only checked.
  static Tensor linear_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view memory) {
    parse_memory("linear_relu", memory);
    return forward("linear_relu", input, weight, bias, Activation::relu);
  }

  static Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view approximate, std::string_view memory) {
    parse_memory("linear_gelu", memory);
    const auto activation = parse_approximate("linear_gelu", approximate);
    return forward("linear_gelu", input, weight, bias, activation);
  }

  static std::tuple<Tensor, Tensor> relu_aux(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias) {
    check_linear("_linear_relu_aux", input, weight, bias);
    const explain::Row row("_linear_relu_aux", input, weight);
    return way(
        [&](auto w) { return decltype(w)::forward_aux(input, weight, bias, Activation::relu); });
  }

  static std::tuple<Tensor, Tensor> gelu_aux(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias,
                                             std::string_view approximate) {
    const auto activation = parse_approximate("_linear_gelu_aux", approximate);
    check_linear("_linear_gelu_aux", input, weight, bias);
    const explain::Row row("_linear_gelu_aux", input, weight);
    return way([&](auto w) { return decltype(w)::forward_aux(input, weight, bias, activation); });
  }

  static Tensor relu_mask(const Tensor& output) {
    constexpr auto op = "_relu_mask";
    TORCH_CHECK_VALUE(output.dim() >= 1, op,
                      ": output must have shape [..., features], got a 0-dimensional tensor");
    check_floating(op, output, "output");
    const explain::Row row(op, output, {});
    return way([&](auto w) { return decltype(w)::relu_mask(output); });
  }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, std::string_view text,
                                                        bool bias_grad) {
    constexpr auto op = "_activation_backward";
    const auto activation = parse_activation(op, text);
    TORCH_CHECK_VALUE(grad_output.dim() >= 1, op,
                      ": grad_output must have shape [..., features], got a 0-dimensional tensor");
    check_floating(op, grad_output);
    check_saved(op, grad_output, saved, activation);
    const explain::Row row(op, grad_output, {});
    return way([&](auto w) {
      return decltype(w)::activation_backward(grad_output, saved, activation, bias_grad);
    });
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, std::string_view text, std::array<bool, 3> output_mask) {
    constexpr auto op = "_linear_backward";
    const auto activation = parse_activation(op, text);
    check_linear_backward(op, grad_output, input, weight, saved, activation);
    const explain::Row row(op, input, weight);
    return way([&](auto w) {
      return decltype(w)::linear_backward(grad_output, input, weight, saved, activation,
                                          output_mask);
    });
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, std::string_view text, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, std::string_view previous_text, bool previous_bias_grad) {
    constexpr auto op = "_linear_backward_across";
    const auto activation = parse_activation(op, text);
    const auto previous = parse_hidden_activation(op, "previous_activation", previous_text);
    check_linear_backward(op, grad_output, input, weight, saved, activation);
    check_saved(op, input, previous_saved, previous);
    const explain::Row row(op, input, weight);
    return way([&](auto w) {
      return decltype(w)::linear_backward_across(grad_output, input, weight, saved, activation,
                                                 output_mask, previous_saved, previous,
                                                 previous_bias_grad);
    });
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, std::string_view text,
                    std::string_view memory) {
    parse_memory("mlp", memory);
    const auto activation = parse_hidden_activation("mlp", "activation", text);
    check_mlp(input, weights, biases);
    auto hidden = input;
    for (size_t i = 0; i < weights.size(); ++i) {
      const explain::Row row("mlp", hidden, weights[i]);
      const bool last = i + 1 == weights.size();
      hidden = way([&](auto w) {
        return decltype(w)::forward(hidden, weights[i], biases.get(i),
                                    last ? Activation::none : activation);
      });
    }
    return hidden;
  }
};

template <class Backend>
void register_kernels(torch::Library& m) {
  using K = Kernels<Backend>;
  m.impl("linear", K::linear);
  m.impl("linear_relu", K::linear_relu);
  m.impl("linear_gelu", K::linear_gelu);
  m.impl("mlp", K::mlp);
  m.impl("_linear_relu_aux", K::relu_aux);
  m.impl("_linear_gelu_aux", K::gelu_aux);
  m.impl("_relu_mask", K::relu_mask);
  m.impl("_activation_backward", K::activation_backward);
  m.impl("_linear_backward", K::linear_backward);
  m.impl("_linear_backward_across", K::linear_backward_across);
}

}  // namespace fused
