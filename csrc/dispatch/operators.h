#pragma once

// The operators as the dispatcher has them, a row each: typed calls, autocast, what tensors of
// Python classes get and calls from eager Python are made of these rows. And functions over structs
// in that form.

#include "core/activation.h"
#include "fused_linear.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace fused::dispatch {

using OptionalTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;
using Quadruple = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Quintuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// One operator: its name and signature, and how it is called through the dispatcher.
template <size_t size>
struct Name {
  char text[size];
  constexpr Name(const char (&given)[size]) { std::copy_n(given, size, text); }  // NOLINT
};

template <Name full, typename>
struct Operator;

template <Name full, typename Result, typename... Args>
struct Operator<full, Result(Args...)> {
  using Signature = Result(Args...);
  static constexpr const char* name = full.text;

  static Result call(Args... args) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
    return op.call(args...);
  }
};

// What users call.
using Linear = Operator<"fused::linear", decltype(fused::linear)>;
using LinearRelu = Operator<"fused::linear_relu", decltype(fused::linear_relu)>;
using LinearGelu = Operator<"fused::linear_gelu", decltype(fused::linear_gelu)>;
using LinearSilu = Operator<"fused::linear_silu", decltype(fused::linear_silu)>;
using Mlp = Operator<"fused::mlp", decltype(fused::mlp)>;
using LinearGlu = Operator<"fused::linear_glu", decltype(fused::linear_glu)>;
using GatedMlp = Operator<"fused::gated_mlp", decltype(fused::gated_mlp)>;
using Conv2dRelu = Operator<"fused::conv2d_relu", decltype(fused::conv2d_relu_symint)>;
using Public =
    std::tuple<Linear, LinearRelu, LinearGelu, LinearSilu, Mlp, LinearGlu, GatedMlp, Conv2dRelu>;

// What nodes call.
using LinearReluAux = Operator<"fused::_linear_relu_aux", decltype(steps::linear_relu_aux)>;
using LinearGeluAux = Operator<"fused::_linear_gelu_aux", decltype(steps::linear_gelu_aux)>;
using LinearSiluAux = Operator<"fused::_linear_silu_aux", decltype(steps::linear_silu_aux)>;
using ReluMask = Operator<"fused::_relu_mask", decltype(steps::relu_mask)>;
using LinearReluBits = Operator<"fused::_linear_relu_bits", decltype(steps::linear_relu_bits)>;
using ActivationBackward = Operator<"fused::_activation_backward",
                                    Pair(const Tensor&, const Tensor&, std::string_view, bool)>;
using ChannelsReluBackward =
    Operator<"fused::_channels_relu_backward", decltype(steps::channels_relu_backward)>;
using Conv2dBackward =
    Operator<"fused::_conv2d_backward",
             Triple(const Tensor&, const Tensor&, const Tensor&, c10::SymIntArrayRef,
                    c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt, std::array<bool, 3>)>;
using LinearBackward =
    Operator<"fused::_linear_backward",
             Triple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                    std::string_view, std::array<bool, 3>)>;
using LinearBackwardAcross =
    Operator<"fused::_linear_backward_across",
             Quadruple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                       std::string_view, std::array<bool, 3>, const Tensor&, std::string_view,
                       bool)>;
using LinearGluAux =
    Operator<"fused::_linear_glu_aux",
             Triple(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                    const OptionalTensor&, std::string_view, bool)>;
using Glu = Operator<"fused::_glu", Tensor(const Tensor&, const OptionalTensor&, std::string_view)>;
using GluBackward =
    Operator<"fused::_glu_backward",
             Quintuple(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                       std::array<bool, 5>, const OptionalTensor&)>;

// `fn` takes the activation as a value, and structs for what belongs together.
template <auto fn>
Pair flat_activation_backward(const Tensor& grad_output, const Tensor& saved,
                              std::string_view activation, bool bias_grad) {
  return fn(grad_output, saved, parse_activation("_activation_backward", activation), bias_grad);
}

template <auto fn>
Triple flat_linear_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                            const OptionalTensor& saved, std::string_view activation,
                            std::array<bool, 3> wanted) {
  return fn({grad_output, input, weight, saved, parse_activation("_linear_backward", activation),
             wanted});
}

template <auto fn>
Quadruple flat_linear_backward_across(const Tensor& grad_output, const Tensor& input,
                                      const Tensor& weight, const OptionalTensor& saved,
                                      std::string_view activation, std::array<bool, 3> wanted,
                                      const Tensor& previous_saved,
                                      std::string_view previous_activation,
                                      bool previous_bias_grad) {
  constexpr auto op = "_linear_backward_across";
  return fn(
      {grad_output, input, weight, saved, parse_activation(op, activation), wanted},
      {previous_saved, parse_hidden_activation(op, "previous_activation", previous_activation),
       previous_bias_grad});
}

template <auto fn>
Tensor flat_glu(const Tensor& gate, const OptionalTensor& up, std::string_view activation) {
  return fn(gate, up, parse_hidden_activation("_glu", "activation", activation));
}

template <auto fn>
Triple flat_linear_glu_aux(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                           std::string_view activation, bool keeps) {
  return fn(input, gate, up, gate_bias, up_bias,
            parse_hidden_activation("_linear_glu_aux", "activation", activation), keeps);
}

template <auto fn>
Quintuple flat_glu_backward(const Tensor& grad_output, const Tensor& gate, const OptionalTensor& up,
                            std::string_view activation, std::array<bool, 5> wanted,
                            const OptionalTensor& down) {
  return fn({grad_output, gate, up,
             parse_hidden_activation("_glu_backward", "activation", activation), wanted, down});
}

}  // namespace fused::dispatch
