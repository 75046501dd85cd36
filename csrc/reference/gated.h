#pragma once

// Gated layers and the one pass of their backward in ATen. `GluFormula` is the definition,
// differentiable; `Glu` gives the same as kernels do.

#include "core/gated.h"

#include <tuple>

namespace fused::reference {

// A pass whose gradient comes through the layer after it, as ATen's product and the pass alone.
template <typename Pass>
Quintuple through_down(const steps::GluBackward& step, const Pass& pass) {
  const auto grad = at::matmul(step.grad_output, *step.down);
  return pass({grad, step.gate, step.up, step.activation, step.wanted});
}

struct GluFormula {
  static constexpr bool obeys_policy = false;
  static constexpr bool takes_down = false;

  // act(gate) ⊙ up of pre-activations, [*, hidden]
  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation);

  // -> gradients of gate and up, their sums over all rows, and what glu gave
  static Quintuple glu_backward(const steps::GluBackward& step);

  // The layer, and after it `down` where there is one.
  static Tensor forward(const gated::Layer& layer, const gated::Down& down, Activation activation);
};

struct Glu {
  static constexpr bool obeys_policy = true;
  static constexpr bool takes_down = false;

  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation);
  static Quintuple glu_backward(const steps::GluBackward& step);
};

// By torch's own functions (reference/linear.h).
Tensor gated_as_torch_does(const char* op, const char* objection, const gated::Layer& layer,
                           const gated::Down& down, Activation activation);

}  // namespace fused::reference
