// The Autograd kernels of gated layers: which way a call goes.

#include "autograd/arguments.h"
#include "autograd/gated_node.h"
#include "dispatch/gated_kernels.h"
#include "fused_linear.h"
#include "reference/gated.h"

namespace fused::autograd {
namespace {

struct GatedAutograd {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory memory) {
    const auto& [input, gate, up, gate_bias, up_bias] = layer;
    const bool formula = wants_formula(input, gate, up, gate_bias, up_bias, down.weight, down.bias);
    if (!formula && !wants_gradient(input, gate, up, gate_bias, up_bias, down.weight, down.bias)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return down.exists()
                 ? fused::gated_mlp(input, gate, up, down.weight, gate_bias, up_bias, down.bias,
                                    name(activation))
                 : fused::linear_glu(input, gate, up, gate_bias, up_bias, name(activation));
    }
    gated::check(op, layer);
    const char* why = gated::objection(layer, down);
    if (formula || why) return reference::gated_as_torch_does(op, why, layer, down, activation);
    gated::check_devices(op, layer, down);
    return gated_with_gradient(layer, down, activation, memory);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  dispatch::put<dispatch::GatedOperators, GatedAutograd>(m);
  put_steps<dispatch::GatedSteps, dispatch::GatedKernels<reference::GluFormula>>(m);
}

}  // namespace fused::autograd
