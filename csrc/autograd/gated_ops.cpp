// The Autograd kernels of gated layers: which way a call goes.

#include "autograd/arguments.h"
#include "autograd/gated_node.h"
#include "core/explain.h"
#include "core/memory.h"
#include "dispatch/gated_kernels.h"
#include "fused_linear.h"
#include "reference/gated.h"

namespace fused::autograd {
namespace {

// `plain` is the operator itself, for where autograd has nothing to do.
template <typename Plain>
Tensor forward(const char* op, const gated::Layer& layer, const gated::Down& down,
               std::string_view text, std::string_view memory, const Plain& plain) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  const bool formula = wants_formula(input, gate, up, gate_bias, up_bias, down.weight, down.bias);
  if (!formula && !wants_gradient(input, gate, up, gate_bias, up_bias, down.weight, down.bias)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return plain();
  }
  const auto activation = gated::parse(op, text);
  const auto how = parse_memory(op, memory);
  gated::check(op, layer);
  if (const char* why = gated::objection(layer, down)) {
    return reference::gated_as_torch_does(op, why, layer, down, activation);
  }
  gated::check_devices(op, layer, down);
  if (formula) {
    const explain::Row row(op, input, gate);
    explain::append("reference");
    return reference::GluFormula::forward(layer, down, activation);
  }
  return gated_with_gradient(layer, down, activation, how);
}

Tensor linear_glu_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                           std::string_view activation, std::string_view memory) {
  return forward("linear_glu", {input, gate, up, gate_bias, up_bias}, {}, activation, memory, [&] {
    return fused::linear_glu(input, gate, up, gate_bias, up_bias, activation, memory);
  });
}

Tensor gated_mlp_autograd(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                          const Tensor& down, const OptionalTensor& gate_bias,
                          const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                          std::string_view activation, std::string_view memory) {
  return forward("gated_mlp", {input, gate, up, gate_bias, up_bias}, {down, down_bias}, activation,
                 memory, [&] {
                   return fused::gated_mlp(input, gate, up, down, gate_bias, up_bias, down_bias,
                                           activation, memory);
                 });
}

using Formula = dispatch::GluKernels<reference::GluFormula>;

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  using namespace dispatch;
  m.impl("linear_glu", linear_glu_autograd);
  m.impl("gated_mlp", gated_mlp_autograd);
  m.impl("_linear_glu_aux",
         flat_linear_glu_aux<Step<&Formula::linear_glu_aux, &steps::linear_glu_aux>::call>);
  m.impl("_glu", flat_glu<Step<&Formula::glu, &steps::glu>::call>);
  m.impl("_glu_backward",
         flat_glu_backward<Step<&Formula::glu_backward, &steps::glu_backward>::call>);
}

}  // namespace fused::autograd
