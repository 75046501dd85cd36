#pragma once

// Low memory: an input that is kept by nobody, as the layer before keeps what it can be computed
// from, bit for bit.

#include "core/activation.h"
#include "core/check.h"

#include <array>

namespace fused::autograd {

// What a node keeps to have its input in the backward.
struct KeptInput {
  struct Form {
    Activation activation = Activation::none;  // none: the input itself is kept
    bool is_gated = false;
  };

  Form form;
  std::array<Tensor, 2> tensors;  // the second: up's pre-activation, where gate's is apart
};

KeptInput input_to_keep(const Tensor& input);

// The input itself.
Tensor recompute(const KeptInput& kept);

// Whether a layer may lend what its output is computed from to whoever comes after. Hooks on saved
// tensors may keep them in another place and may be asked for each of them only once.
bool can_lend_output();

// The activation of a pre-activation, by the same way at both times, for the same bits.
enum class Time { first, again };
Tensor activated(const Tensor& preactivation, Activation activation, Time time = Time::again);

}  // namespace fused::autograd
