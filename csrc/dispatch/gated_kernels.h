#pragma once

// The gated layers' kernels, as the dispatcher calls them. A backend has the functions of
// reference::GluFormula, and may have linear_glu, which does both products and act(gate) ⊙ up.

#include "core/explain.h"
#include "core/policy.h"
#include "dispatch/gated.h"
#include "dispatch/operators.h"
#include "reference/gated.h"

#include <torch/library.h>

namespace fused::dispatch {

template <class Backend>
struct GatedKernels : GatedWithoutGradient {
  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation) {
    const explain::Row row("_glu", gate, {});
    gated::check_halves(row.op, gate, up);
    return under_policy<Backend, reference::Glu>(
        row.op, gate, [&](auto w) { return w.glu(gate, up, activation); });
  }

  static Triple linear_glu_aux(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                               const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                               Activation activation, bool keeps) {
    constexpr auto op = "_linear_glu_aux";
    const gated::Layer layer{input, gate, up, gate_bias, up_bias};
    gated::check(op, layer);
    const auto whole = [&](auto w) -> std::optional<Triple> {
      using Way = decltype(w);
      if constexpr (requires { &Way::linear_glu; }) {
        if (gated::objection(layer, {})) return std::nullopt;
        return Way::linear_glu(layer, activation, keeps);
      }
      return std::nullopt;
    };
    if (auto done = under_policy<Backend, reference::Glu>(op, input, whole))
      return std::move(*done);
    auto [hidden, gate_z, up_z] = products_and_glu(layer, activation, keeps);
    const auto or_none = [&](Tensor& z) {
      return z.defined() ? std::move(z) : at::empty_symint({0}, input.options());
    };
    return {std::move(hidden), or_none(gate_z), or_none(up_z)};
  }

  static Quintuple glu_backward(const steps::GluBackward& step) {
    const explain::Row row("_glu_backward", step.gate, {});
    gated::check_glu_backward(row.op, step);
    return under_policy<Backend, reference::Glu>(row.op, step.gate, [&](auto w) -> Quintuple {
      using Way = decltype(w);
      constexpr bool takes_down = requires { Way::takes_down; };
      if (takes_down || !has_value(step.down)) return Way::glu_backward(step);
      explain::append("ATen mm");
      return reference::through_down(step, Way::glu_backward);
    });
  }
};

template <class Backend>
void register_gated(torch::Library& m) {
  put<GatedOperators, GatedKernels<Backend>>(m);
  put<GatedSteps, GatedKernels<Backend>>(m);
}

}  // namespace fused::dispatch
