// Shapes, dtypes and strides without data, for the compiler and export.

#include "core/shapes.h"
#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"

namespace fused::dispatch {
namespace {

using S = Shapes<SymbolicAllocator>;

struct MetaLinear {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor&,
                        Activation) {
    return S::output(input, weight);
  }

  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor&,
                          Activation activation) {
    auto output = S::output(input, weight);
    auto aux = S::aux(output, activation);
    return {std::move(output), std::move(aux)};
  }

  static Tensor relu_mask(const Tensor& output) { return S::mask(output); }

  static Pair activation_backward(const Tensor& grad_output, const Tensor&, Activation,
                                  bool bias_grad) {
    return {S::grad_input(grad_output, true),
            S::vector(grad_output, grad_output.sym_size(-1), bias_grad)};
  }

  static Triple linear_backward(const steps::LinearBackward& layer) {
    return {S::grad_layer_input(layer.input, layer.wanted[0]),
            S::grad_weight(layer.weight, layer.wanted[1]),
            S::grad_bias(layer.weight, layer.wanted[2])};
  }

  static void weight_gradient(const Tensor&, const OptionalTensor&, const Tensor&, bool) {}

  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous) {
    return {S::grad_input(layer.input, true), S::grad_weight(layer.weight, layer.wanted[1]),
            S::grad_bias(layer.weight, layer.wanted[2]),
            S::vector(layer.input, layer.input.sym_size(-1), previous.bias_grad)};
  }
};

struct MetaGlu {
  static constexpr bool takes_down = true;

  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation) {
    const auto features = gate.sym_size(-1);
    return S::rows(gate, has_value(up) ? features : features / 2);
  }

  static Quintuple glu_backward(const steps::GluBackward& step) {
    const auto& wanted = step.wanted;
    const bool apart = has_value(step.up);
    const auto features = step.gate.sym_size(-1);
    return {
        S::grad_input(step.gate, wanted[0]), S::grad_input(step.gate, apart && wanted[1]),
        S::vector(step.gate, features, wanted[2]),
        S::vector(step.gate, features, apart && wanted[3]),
        wanted[4] ? S::rows(step.gate, apart ? features : features / 2) : S::unwanted(step.gate)};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, Meta, m) {
  register_linear<MetaLinear>(m);
  register_gated<MetaGlu>(m);
}

}  // namespace fused::dispatch
