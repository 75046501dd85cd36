#pragma once

// Gated layers on whatever device.

#include "core/gated.h"
#include "core/memory.h"

namespace fused::dispatch {

struct GatedForward {
  // Undefined are those that are not kept; without up_z gate_z is both, [*, 2 hidden].
  Tensor hidden, gate_z, up_z;
};

// The layer with its pre-activations, if they are kept, as two tensors or, where the weights are
// one piece of memory and it may, as one.
GatedForward gated_forward(const gated::Layer& layer, Activation activation, bool keeps,
                           bool may_join);

// The same by steps of its own, where no kernel does it whole.
GatedForward products_and_glu(const gated::Layer& layer, Activation activation, bool keeps);

// Where nobody wants a gradient: the layer and, where there is one, that after it.
struct GatedWithoutGradient {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory);
};

}  // namespace fused::dispatch
