#pragma once

// The operators' signatures as the dispatcher has them, and functions over structs in that form.

#include "core/activation.h"
#include "fused_linear.h"

#include <ATen/core/List.h>
#include <c10/core/SymInt.h>

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

using Linear = Tensor(const Tensor&, const Tensor&, const OptionalTensor&);
using LinearRelu = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view);
using LinearGelu = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                          std::string_view);
using LinearSilu = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view);
using Mlp = Tensor(const Tensor&, at::TensorList, const c10::List<OptionalTensor>&,
                   std::string_view, std::string_view);
using LinearGlu = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                         const OptionalTensor&, std::string_view, std::string_view);
using GatedMlp = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                        std::string_view, std::string_view);
using Conv2dRelu = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, c10::SymIntArrayRef,
                          c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt);
using LinearReluAux = Pair(const Tensor&, const Tensor&, const OptionalTensor&);
using LinearGeluAux = Pair(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view);
using LinearSiluAux = Pair(const Tensor&, const Tensor&, const OptionalTensor&);
using ReluMask = Tensor(const Tensor&);
using LinearReluBits = Pair(const Tensor&, const Tensor&, const OptionalTensor&);
using ActivationBackward = Pair(const Tensor&, const Tensor&, std::string_view, bool);
using ChannelsReluBackward = Pair(const Tensor&, const Tensor&, bool);
using Conv2dBackward = Triple(const Tensor&, const Tensor&, const Tensor&, c10::SymIntArrayRef,
                              c10::SymIntArrayRef, c10::SymIntArrayRef, c10::SymInt,
                              std::array<bool, 3>);
using LinearBackward = Triple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                              std::string_view, std::array<bool, 3>);
using LinearBackwardAcross = Quadruple(const Tensor&, const Tensor&, const Tensor&,
                                       const OptionalTensor&, std::string_view, std::array<bool, 3>,
                                       const Tensor&, std::string_view, bool);

using LinearGluAux = Triple(const Tensor&, const Tensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, std::string_view, bool);
using Glu = Tensor(const Tensor&, const OptionalTensor&, std::string_view);
using GluBackward = Quintuple(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                              std::array<bool, 5>, const OptionalTensor&);

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
