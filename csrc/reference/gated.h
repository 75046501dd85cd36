#pragma once

// `GluFormula` is the definition in ATen, differentiable; `Glu` gives the same as kernels do.

#include "core/gated.h"
#include "reference/linear.h"

namespace fused::reference {

// A pass whose gradient comes through the layer after it, as ATen's product and the pass alone.
template <typename Pass>
Quintuple through_down(const steps::GluBackward& step, const Pass& pass) {
  refuse_formula("gated_mlp's backward", step.gate);
  const auto grad = at::matmul(step.grad_output, *step.down);
  return pass({grad, step.gate, step.up, step.activation, step.wanted});
}

inline std::pair<Tensor, Tensor> parts(const Tensor& gate, const OptionalTensor& up) {
  return has_value(up) ? std::pair(gate, *up) : gated::halves(gate);
}

// The derivative is read from gate, also ReLU's: that is positive where its output is.
struct GluFormula {
  static std::pair<Tensor, Tensor> parts(const Tensor& gate, const OptionalTensor& up) {
    const auto [first, second] = reference::parts(gate, up);
    return has_value(up) ? std::pair(first, second)
                         : std::pair(may_be_kept(first), may_be_kept(second));
  }

  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation) {
    const auto [first, second] = parts(gate, up);
    return activate(first, activation) * second;
  }

  static Quintuple glu_backward(const steps::GluBackward& step) {
    const auto& grad = step.grad_output;
    const auto [gate, up] = parts(step.gate, step.up);
    const auto activated = activate(gate, step.activation);
    const auto none = [&] { return unwanted(grad); };
    const auto& wanted = step.wanted;
    auto hidden = wanted[4] ? activated * up : none();
    if (!has_value(step.up)) {
      if (!wanted[0] && !wanted[2]) return {none(), none(), none(), none(), hidden};
      const auto both =
          at::cat({activation_gradient(grad * up, gate, step.activation), grad * activated}, -1);
      return {wanted[0] ? both : none(), none(), wanted[2] ? as_rows(both).sum(0) : none(), none(),
              hidden};
    }
    const auto grad_gate =
        wanted[0] || wanted[2] ? activation_gradient(grad * up, gate, step.activation) : none();
    const auto grad_up = wanted[1] || wanted[3] ? grad * activated : none();
    return {wanted[0] ? grad_gate : none(), wanted[1] ? grad_up : none(),
            wanted[2] ? as_rows(grad_gate).sum(0) : none(),
            wanted[3] ? as_rows(grad_up).sum(0) : none(), hidden};
  }

  static Tensor forward(const gated::Layer& layer, const gated::Down& down, Activation activation) {
    const auto gate = aten_linear(layer.input, layer.gate, layer.gate_bias);
    const auto hidden =
        layer.is_stacked()
            ? glu(gate, {}, activation)
            : glu(gate, aten_linear(layer.input, *layer.up, layer.up_bias), activation);
    return down.exists() ? aten_linear(hidden, down.weight, down.bias) : hidden;
  }
};

struct Glu {
  static constexpr bool obeys_policy = true;

  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation) {
    explain::append(explain::not_fused);
    return GluFormula::glu(dense(gate), dense(up), activation).contiguous();
  }

  static Quintuple glu_backward(const steps::GluBackward& step) {
    explain::append(explain::not_fused);
    auto [gate, up, gate_sums, up_sums, hidden] = GluFormula::glu_backward(
        {dense(step.grad_output), dense(step.gate), dense(step.up), step.activation, step.wanted});
    return {gate.contiguous(), up.contiguous(), gate_sums, up_sums, hidden.contiguous()};
  }
};

inline Tensor gated_as_torch_does(const char* op, const char* objection, const gated::Layer& layer,
                                  const gated::Down& down, Activation activation) {
  const explain::Row row(op, layer.input, layer.gate);
  explain::append(objection);
  explain::append(explain::not_fused);
  gated::check_devices(op, layer, down);
  refuse_formula(op, layer.input, objection);
  return in_context([&] { return GluFormula::forward(layer, down, activation); },
                    [&] { return gated::describe(op, layer, down); });
}

}  // namespace fused::reference
