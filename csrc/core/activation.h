#pragma once

// The activations' names, what a backward reads of each, and how that lies in memory; no torch.

#include "fused_activation.h"

#include <iterator>
#include <type_traits>

namespace fused {

inline constexpr Activation activations[] = {Activation::none,      Activation::relu,
                                             Activation::gelu_tanh, Activation::gelu_erf,
                                             Activation::silu,      Activation::relu2};
inline constexpr const char* activation_names[] = {"none",     "relu", "gelu_tanh",
                                                   "gelu_erf", "silu", "relu2"};
static_assert(std::size(activation_names) == std::size(activations));
// An activation's number is its place in both tables.
static_assert([] {
  size_t place = 0;
  for (const auto activation : activations) {
    if (static_cast<size_t>(activation) != place++) return false;
  }
  return true;
}());

inline const char* name(Activation activation) {
  return activation_names[static_cast<size_t>(activation)];
}
// The activation's number, an argument of private operators; activation_of (core/check.h) reads it.
inline int64_t number(Activation activation) { return static_cast<int64_t>(activation); }

// torch.nn.functional.gelu's argument; nullptr for what is no GELU.
inline const char* approximate_of(Activation activation) {
  if (activation == Activation::gelu_tanh) return "tanh";
  return activation == Activation::gelu_erf ? "none" : nullptr;
}

inline bool is_gelu(Activation activation) { return approximate_of(activation) != nullptr; }

enum class Saved { nothing, output, preactivation };

constexpr Saved saved_for(Activation activation) {
  if (activation == Activation::none) return Saved::nothing;
  return activation == Activation::relu ? Saved::output : Saved::preactivation;
}

// cuBLASLt wants a ReLU mask's rows in multiples of 128 bits, a pre-activation's of 8 elements.
template <typename Int>  // int64_t, or torch's symbolic integer
constexpr Int mask_bits(const Int& features) {
  return (features + 127) / 128 * 128;
}

template <typename Int>
constexpr Int mask_bytes(const Int& features) {
  return mask_bits(features) / 8;
}

template <typename Int>
constexpr Int padded_features(const Int& features) {
  return (features + 7) / 8 * 8;
}

// fn(std::integral_constant<Activation, activation>()): the activation as a constant.
template <typename Fn, size_t k = 0>
constexpr auto with_activation(Activation activation, const Fn& fn) {
  constexpr std::integral_constant<Activation, activations[k]> constant;
  if constexpr (k + 1 < std::size(activations)) {
    if (activation != constant.value) return with_activation<Fn, k + 1>(activation, fn);
  }
  return fn(constant);
}

}  // namespace fused
