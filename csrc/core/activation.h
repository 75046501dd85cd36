#pragma once

// The activations: their names, and what a backward reads to differentiate each.

#include "fused_activation.h"

#include <c10/util/Exception.h>

#include <iterator>
#include <sstream>
#include <string_view>
#include <type_traits>

namespace fused {

inline constexpr Activation activations[] = {Activation::none, Activation::relu,
                                             Activation::gelu_tanh, Activation::gelu_erf,
                                             Activation::silu};

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
    case Activation::silu:
      return "silu";
  }
  TORCH_INTERNAL_ASSERT(false, "no activation");
}

// From the schema's text. A hidden activation stands between two layers and cannot be none.
inline Activation parse_activation(const char* op, std::string_view text,
                                   const char* what = "activation", bool hidden = false) {
  std::ostringstream expected;
  for (const auto activation : activations) {
    if (hidden && activation == Activation::none) continue;
    if (text == name(activation)) return activation;
    const bool first = expected.tellp() == 0, last = activation == *std::rbegin(activations);
    expected << (first ? "'" : last ? " or '" : ", '") << name(activation) << '\'';
  }
  TORCH_CHECK_VALUE(false, op, ": ", what, " must be ", expected.str(), ", got '", text, "'");
}

inline Activation parse_hidden_activation(const char* op, const char* what, std::string_view text) {
  return parse_activation(op, text, what, /*hidden=*/true);
}

// torch.nn.functional.gelu's argument.
inline Activation parse_approximate(const char* op, std::string_view approximate) {
  if (approximate == "tanh") return Activation::gelu_tanh;
  if (approximate == "none") return Activation::gelu_erf;
  TORCH_CHECK(false, op, ": approximate must be 'tanh' or 'none', got '", approximate, "'");
}

// The same back; nullptr for what is no GELU.
inline const char* approximate_of(Activation activation) {
  switch (activation) {
    case Activation::gelu_tanh:
      return "tanh";
    case Activation::gelu_erf:
      return "none";
    case Activation::none:
    case Activation::relu:
    case Activation::silu:
      return nullptr;
  }
  return nullptr;
}

inline bool is_gelu(Activation activation) { return approximate_of(activation) != nullptr; }

// What act' is read from.
enum class Saved { nothing, output, preactivation };

inline Saved saved_for(Activation activation) {
  switch (activation) {
    case Activation::none:
      return Saved::nothing;
    case Activation::relu:
      return Saved::output;
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
    case Activation::silu:
      return Saved::preactivation;
  }
  return Saved::nothing;
}

// fn(std::integral_constant<Activation, activation>()): the activation as a constant.
template <typename Fn>
auto with_activation(Activation activation, const Fn& fn) {
  switch (activation) {
    case Activation::none:
      return fn(std::integral_constant<Activation, Activation::none>());
    case Activation::relu:
      return fn(std::integral_constant<Activation, Activation::relu>());
    case Activation::gelu_tanh:
      return fn(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::gelu_erf:
      return fn(std::integral_constant<Activation, Activation::gelu_erf>());
    case Activation::silu:
      return fn(std::integral_constant<Activation, Activation::silu>());
  }
  TORCH_INTERNAL_ASSERT(false, "no activation");
}

}  // namespace fused
