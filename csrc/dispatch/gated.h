#pragma once

// Gated layers on whatever device.

#include "core/gated.h"

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

// Where nobody wants a gradient: the products and the pass over memory, one after the other.
struct GatedForwards {
  static Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                           std::string_view activation, std::string_view memory);
  static Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                          const Tensor& down, const OptionalTensor& gate_bias,
                          const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                          std::string_view activation, std::string_view memory);
};

}  // namespace fused::dispatch
