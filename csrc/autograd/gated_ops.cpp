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

struct GatedAutograd {
  static Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                           std::string_view activation, std::string_view memory) {
    const auto plain = [&] {
      return fused::linear_glu(input, gate, up, gate_bias, up_bias, activation, memory);
    };
    return forward("linear_glu", {input, gate, up, gate_bias, up_bias}, {}, activation, memory,
                   plain);
  }

  static Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                          const Tensor& down, const OptionalTensor& gate_bias,
                          const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                          std::string_view activation, std::string_view memory) {
    const auto plain = [&] {
      return fused::gated_mlp(input, gate, up, down, gate_bias, up_bias, down_bias, activation,
                              memory);
    };
    return forward("gated_mlp", {input, gate, up, gate_bias, up_bias}, {down, down_bias},
                   activation, memory, plain);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  dispatch::put<dispatch::GatedOperators, GatedAutograd>(m);
  put_steps<dispatch::GatedSteps, dispatch::GatedKernels<reference::GluFormula>>(m);
}

}  // namespace fused::autograd
