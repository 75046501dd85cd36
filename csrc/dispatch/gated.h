#pragma once

// Gated layers on whatever device.

#include "core/gated.h"

namespace fused::dispatch {

// -> x gateᵀ + bg and x upᵀ + bu. One product where the weights are one piece of memory: then both
// are in the first, [*, 2 hidden], and the second is undefined.
std::pair<Tensor, Tensor> gated_preactivations(const gated::Layer& layer);

// Where nobody wants a gradient: the products and the pass over memory, one after the other.
Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                  std::string_view activation, std::string_view memory);
Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                 const Tensor& down, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                 const OptionalTensor& down_bias, std::string_view activation,
                 std::string_view memory);

}  // namespace fused::dispatch
