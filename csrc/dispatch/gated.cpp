#include "dispatch/gated.h"

#include "core/memory.h"
#include "reference/gated.h"

namespace fused::dispatch {

std::pair<Tensor, Tensor> gated_preactivations(const gated::Layer& layer) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  if (layer.is_stacked()) return {fused::linear(input, gate, gate_bias), Tensor()};
  if (has_value(gate_bias) == has_value(up_bias)) {
    if (const auto both = gated::joined(gate, *up); both.defined()) {
      OptionalTensor bias;
      if (has_value(gate_bias)) bias = at::cat({*gate_bias, *up_bias});
      return {fused::linear(input, both, bias), Tensor()};
    }
  }
  return {fused::linear(input, gate, gate_bias), fused::linear(input, *up, up_bias)};
}

namespace {

Tensor forward(const char* op, const gated::Layer& layer, const gated::Down& down,
               Activation activation) {
  gated::check(op, layer);
  if (const char* why = gated::objection(layer, down)) {
    return reference::gated_as_torch_does(op, why, layer, down, activation);
  }
  gated::check_devices(op, layer, down);
  const auto [gate, up] = gated_preactivations(layer);
  const auto hidden = steps::glu(gate, up, activation);
  return down.exists() ? fused::linear(hidden, down.weight, down.bias) : hidden;
}

}  // namespace

Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                  std::string_view activation, std::string_view memory) {
  constexpr auto op = "linear_glu";
  parse_memory(op, memory);
  return forward(op, {input, gate, up, gate_bias, up_bias}, {}, gated::parse(op, activation));
}

Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                 const Tensor& down, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                 const OptionalTensor& down_bias, std::string_view activation,
                 std::string_view memory) {
  constexpr auto op = "gated_mlp";
  parse_memory(op, memory);
  return forward(op, {input, gate, up, gate_bias, up_bias}, {down, down_bias},
                 gated::parse(op, activation));
}

}  // namespace fused::dispatch
