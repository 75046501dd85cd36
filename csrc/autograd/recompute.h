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

// Whether what a node saves now is what it will read: no hooks on saved tensors are set, which may
// act on them, keep them elsewhere, or make them again (checkpoint) by a forward that finds other
// facts. Both the layer that lends and the one that borrows ask.
bool are_kept_as_they_are();

// The activation of a pre-activation, by the same way at both times, for the same bits.
enum class Time { first, again };
Tensor activated(const Tensor& preactivation, Activation activation, Time time = Time::again);

}  // namespace fused::autograd
