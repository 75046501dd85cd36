#pragma once

#include "core/gated.h"
#include "core/policy.h"
#include "gemm/hopper.h"
#include "reference/gated.h"

#include <ATen/core/grad_mode.h>

namespace fused::dispatch {

// Returns whether a kernel may do the whole layer. With few tokens the operator for the whole layer
// costs more than it saves. A traced call may be run with more tokens later.
inline bool may_be_whole(const Tensor& input) {
  if (at::isTensorSubclassLike(input)) return true;
  if (is_batch_invariant()) return input.is_cuda();  // the kernel rounds less often than the steps
  return input.is_cuda() && input.element_size() == 2 && input.dim() > 0 &&
         input.numel() >= gemm::hopper::least_tokens_of_glu * input.size(-1);
}

inline Triple products_and_glu(const gated::Layer& layer, Activation activation, bool keeps) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  auto gate_z = fused::linear(input, gate, gate_bias);
  OptionalTensor up_z;
  if (!layer.is_stacked()) up_z = fused::linear(input, *up, up_bias);
  auto hidden = steps::glu(gate_z, up_z, activation);
  if (!keeps) return {std::move(hidden), {}, {}};
  return {std::move(hidden), std::move(gate_z), up_z ? std::move(*up_z) : Tensor()};
}

inline Triple whole_or_in_steps(const gated::Layer& layer, Activation activation, bool keeps) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  if (!may_be_whole(input)) return products_and_glu(layer, activation, keeps);
  auto [hidden, gate_z, up_z] =
      steps::linear_glu_aux(input, gate, up, gate_bias, up_bias, activation, keeps);
  return {std::move(hidden), std::move(gate_z), layer.is_stacked() ? Tensor() : std::move(up_z)};
}

// Tensors that autograd follows are never joined: `joined` is a view of gate, so autograd, which
// may run below vmap, would send both gradients to gate.
inline bool is_followed(const OptionalTensor& tensor) {
  return has_value(tensor) &&
         ((at::GradMode::is_enabled() && tensor->requires_grad()) || has_tangent(*tensor));
}

// Computes the layer and its pre-activations, undefined if they are not kept. If the weights are
// one piece of memory and may be joined, the first one holds both pre-activations, [*, 2 hidden].
inline Triple gated_forward(const gated::Layer& layer, Activation activation, bool keeps,
                            bool may_join) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  if (may_join && !layer.is_stacked() && has_value(gate_bias) == has_value(up_bias)) {
    if (const auto both = gated::joined(gate, *up); both.defined()) {
      OptionalTensor bias;
      if (has_value(gate_bias)) bias = at::cat({*gate_bias, *up_bias});
      const OptionalTensor none;
      return whole_or_in_steps({input, both, none, bias, none}, activation, keeps);
    }
  }
  return whole_or_in_steps(layer, activation, keeps);
}

struct GatedWithoutGradient {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory) {
    gated::check(op, layer);
    if (const char* why = gated::objection(layer, down)) {
      return reference::gated_as_torch_does(op, why, layer, down, activation);
    }
    const bool may_join = !is_followed(layer.gate) && !is_followed(layer.up);
    const auto hidden = std::get<0>(gated_forward(layer, activation, /*keeps=*/false, may_join));
    return down.exists() ? fused::linear(hidden, down.weight, down.bias) : hidden;
  }
};

}  // namespace fused::dispatch
