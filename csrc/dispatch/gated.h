#pragma once

// Gated layers on whatever device.

#include "core/gated.h"

namespace fused::dispatch {

// The layer and its pre-activations, undefined where they are not kept: gate's and up's, or, where
// the weights are one piece of memory and it may join them, both as gate's, [*, 2 hidden].
Triple gated_forward(const gated::Layer& layer, Activation activation, bool keeps, bool may_join);

// The same by steps of its own, where no kernel does it whole.
Triple products_and_glu(const gated::Layer& layer, Activation activation, bool keeps);

// Where nobody wants a gradient: the layer and, where there is one, that after it.
struct GatedWithoutGradient {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory);
};

}  // namespace fused::dispatch
