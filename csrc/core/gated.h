#pragma once

// The arguments of a gated layer, act(x gateᵀ + bg) ⊙ (x upᵀ + bu), and of the block with a layer
// after it. Without `up` the weight `gate` is both, [2 hidden, in], gate's rows first.

#include "core/check.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include <string>

namespace fused::gated {

struct Layer {
  const Tensor& input;
  const Tensor& gate;
  const OptionalTensor& up;
  const OptionalTensor& gate_bias;
  const OptionalTensor& up_bias;

  bool is_stacked() const { return !has_value(up); }
};

struct Down {
  Tensor weight;  // undefined where there is none
  OptionalTensor bias;

  bool exists() const { return weight.defined(); }
};

// Checks arguments that none of torch's functions would refuse.
inline void check(const char* op, const Layer& layer) {
  if (!layer.is_stacked()) return;
  TORCH_CHECK_VALUE(!has_value(layer.up_bias), op,
                    ": up_bias must be None without up: gate_bias is both, got ",
                    describe(layer.up_bias));
  TORCH_CHECK_VALUE(layer.gate.dim() == 2 && layer.gate.sym_size(0) % 2 == 0, op,
                    ": without up, gate must have shape [2 * hidden, in], gate's rows first, got ",
                    layer.gate.sym_sizes());
}

inline c10::SymInt hidden_features(const Layer& layer) {
  const auto rows = layer.gate.sym_size(0);
  return layer.is_stacked() ? rows / 2 : rows;
}

// Why no kernel of ours takes them, or nullptr.
inline const char* objection(const Layer& layer, const Down& down) {
  if (const char* why = fused::objection(layer.input, layer.gate, layer.gate_bias)) return why;
  if (!layer.is_stacked()) {
    if (const char* why = fused::objection(layer.input, *layer.up, layer.up_bias)) return why;
    if (layer.up->sym_size(0) != layer.gate.sym_size(0)) return "(no kernel: shape of up)";
  }
  if (!down.exists()) return nullptr;
  return fused::objection(layer.input, hidden_features(layer), down.weight, down.bias);
}

inline void check_devices(const char* op, const Layer& layer, const Down& down) {
  fused::check_devices(op, layer.input, layer.gate, layer.gate_bias);
  if (!layer.is_stacked()) fused::check_devices(op, layer.input, *layer.up, layer.up_bias);
  if (down.exists()) fused::check_devices(op, layer.input, down.weight, down.bias);
}

inline std::string describe(const char* op, const Layer& layer, const Down& down) {
  auto text = std::string(op) +
              ": expected input [*, in], gate and up [hidden, in] (or gate alone, [2 * hidden, "
              "in]), biases [hidden] or None, of one dtype and device, got input " +
              fused::describe(layer.input) + ", gate " + fused::describe(layer.gate) + ", up " +
              fused::describe(layer.up) + ", gate_bias " + fused::describe(layer.gate_bias) +
              ", up_bias " + fused::describe(layer.up_bias);
  if (down.exists()) {
    text += ", down " + fused::describe(down.weight) + ", down_bias " + fused::describe(down.bias);
  }
  return text;
}

// [*, 2 features] -> its halves, views.
inline std::pair<Tensor, Tensor> halves(const Tensor& both) {
  const auto features = both.sym_size(-1) / 2;
  return {both.narrow_symint(-1, 0, features), both.narrow_symint(-1, features, features)};
}

// Joins weights that are neighbours in memory, not while a graph is traced: it may get others.
inline Tensor joined(const Tensor& gate, const Tensor& up) {
  if (!gate.defined() || !up.defined() || at::areAnyTensorSubclassLike({gate, up})) return {};
  const bool neighbours = gate.is_contiguous() && up.is_contiguous() && gate.is_alias_of(up) &&
                          gate.sizes() == up.sizes() && gate.is_neg() == up.is_neg() &&
                          up.storage_offset() == gate.storage_offset() + gate.numel();
  if (!neighbours) return {};
  return gate.as_strided({2 * gate.size(0), gate.size(1)}, gate.strides());
}

// Pre-activations -> act(gate) ⊙ up. Checks of the steps.
inline void check_halves(const char* op, const Tensor& gate, const OptionalTensor& up) {
  TORCH_CHECK(gate.dim() >= 1, op,
              ": gate must have shape [..., features], got a 0-dimensional tensor");
  check_floating(op, gate, "gate");
  if (has_value(up)) {
    check_dtype_and_device(op, "up", *up, gate);
    check_rows(op, "up", *up, gate, gate.sym_size(-1));
  } else {
    TORCH_CHECK(gate.sym_size(-1) % 2 == 0, op, ": without up, gate must have an even number of ",
                "features, got ", gate.sym_sizes());
  }
}

inline void check_glu_backward(const char* op, const steps::GluBackward& s) {
  check_halves(op, s.gate, s.up);
  check_dtype_and_device(op, "grad_output", s.grad_output, s.gate);
  auto features = s.gate.sym_size(-1);
  if (!has_value(s.up)) features = features / 2;
  if (has_value(s.down)) {
    check_dtype_and_device(op, "down", *s.down, s.gate);
    TORCH_CHECK_VALUE(s.down->dim() == 2 && s.down->sym_size(1) == features, op,
                      ": down must have shape [out, ", features, "], got ", s.down->sym_sizes());
    features = s.down->sym_size(0);
  }
  check_rows(op, "grad_output", s.grad_output, s.gate, features);
}

}  // namespace fused::gated
