#pragma once

// What stands between the matrix product and the result. Parsed from the schema's strings once,
// printed back in error messages and reports.

#include <c10/util/Exception.h>

#include <string_view>

namespace fused {

enum class Activation { none, relu, gelu_tanh, gelu_erf };

inline const char* name(Activation activation) {
  switch (activation) {
    case Activation::none:
      return "none";
    case Activation::relu:
      return "relu";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::gelu_erf:
      return "gelu_erf";
  }
  return "?";
}

inline Activation parse_activation(const char* op, std::string_view text) {
  for (auto activation :
       {Activation::none, Activation::relu, Activation::gelu_tanh, Activation::gelu_erf}) {
    if (text == name(activation)) return activation;
  }
  TORCH_CHECK_VALUE(false, op,
                    ": activation must be 'none', 'relu', 'gelu_tanh' or 'gelu_erf', got '", text,
                    "'");
}

// Of a layer that is followed by another: there has to be one.
inline Activation parse_hidden_activation(const char* op, const char* what, std::string_view text) {
  for (auto activation : {Activation::relu, Activation::gelu_tanh, Activation::gelu_erf}) {
    if (text == name(activation)) return activation;
  }
  TORCH_CHECK_VALUE(false, op, ": ", what, " must be 'relu', 'gelu_tanh' or 'gelu_erf', got '",
                    text, "'");
}

// torch.nn.functional.gelu's argument: 'tanh' is the approximation that cuBLASLt computes, 'none'
// the exact form with erf. One is never put in the place of the other.
inline Activation parse_approximate(const char* op, std::string_view approximate) {
  if (approximate == "tanh") return Activation::gelu_tanh;
  if (approximate == "none") return Activation::gelu_erf;
  TORCH_CHECK_VALUE(false, op, ": approximate must be 'tanh' or 'none', got '", approximate, "'");
}

inline bool is_gelu(Activation activation) {
  return activation == Activation::gelu_tanh || activation == Activation::gelu_erf;
}

inline const char* approximate_of(Activation activation) {
  return activation == Activation::gelu_tanh ? "tanh" : "none";
}

}  // namespace fused
