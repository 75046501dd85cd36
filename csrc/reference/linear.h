#pragma once

// act(x Wᵀ + b) and its gradients in ATen. `LinearFormula` is the definition, differentiable: the
// reference of the tests, and the way wherever a fused kernel cannot go (double backward,
// torch.func, forward AD). `Linear` gives the same as kernels do.

#include "core/activation.h"
#include "core/check.h"
#include "core/shapes.h"

#include <tuple>

namespace fused::reference {

struct LinearFormula {
  static constexpr bool obeys_policy = false;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation);

  // -> output and, for ReLU, the bit mask; for GELU the pre-activation
  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation);

  // By torch's rule: 0 where output <= 0, so that at 0 no gradient passes, and at NaN it does.
  static Tensor relu_mask(const Tensor& output);

  // dz = act'(saved) · grad_output and its sum over all rows.
  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad);

  // -> gradients of input, weight, bias
  static Triple linear_backward(const steps::LinearBackward& layer);

  // gradᵀ · input, added to `into` or written there
  static void weight_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& into,
                              bool adds);

  // -> dz of the previous layer, gradients of weight and bias, bias gradient of the previous layer
  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous);

  // A layer of each member of an ensemble; what linear_backward takes, with a weight of this form.
  // -> output [members, tokens, out] and, where act' is read from it, the pre-activation
  static Pair ensemble(const Tensor& input,         // [members, tokens, in]
                       const Tensor& weight,        // [members, out, in]
                       const OptionalTensor& bias,  // [members, out]
                       Activation activation);
};

// The same as kernels: every result in the layout of core/shapes.h, nothing aliased. What runs
// under the policy "eager", on the CPU, and where a CUDA kernel has to give up.
struct Linear {
  static constexpr bool obeys_policy = true;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation);
  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation);
  static Tensor relu_mask(const Tensor& output);
  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad);
  static Triple linear_backward(const steps::LinearBackward& layer);
  static void weight_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& into,
                              bool adds);
  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous);
};

// What no kernel of ours takes, for the reason that objection() gave, or what torch has to
// differentiate (nullptr): by torch's own functions. What they refuse raises their error, with the
// arguments besides. A row of explain.
Tensor as_torch_does(const char* op, const char* objection, const Tensor& input,
                     const Tensor& weight, const OptionalTensor& bias, Activation activation);
Tensor mlp_as_torch_does(const char* objection, const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation);

// act'(saved) · grad_output, where saved may also be ReLU's bit mask (uint8).
Tensor gradient_from_saved(const Tensor& grad_output, const Tensor& saved, Activation activation);

// ReLU's bit mask as booleans, [*, features]. One bit for each element, eight to a byte, lowest
// first, rows padded with zeros to 128 bits: the layout that cuBLASLt's RELU_AUX writes.
Tensor unpack_mask(const Tensor& mask, const c10::SymInt& features);

// The pre-activation as it is saved everywhere: rows padded with zeros to 8 elements, which is what
// cuBLASLt's GELU_AUX writes.
Tensor pad_rows(const Tensor& tensor);

// What stands in for a gradient that nobody asked for.
inline Tensor unwanted(const Tensor& like) { return at::empty({0}, like.options()); }

// [*, features] -> [rows, features]. By reshape, as batched gradients have no rule for flatten.
inline Tensor as_rows(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows *= tensor.sym_size(d);
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

// gradᵀ · input, [out, in], and grad · weight, [*, in]: the products whose sums torch's own
// backward takes for a weight and an input of these layouts.
inline Tensor weight_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight) {
  return grad_lies_by_columns(weight) ? at::mm(input.t(), grad).t() : at::mm(grad.t(), input);
}
inline Tensor input_gradient(const Tensor& grad, const Tensor& weight, const Tensor& input) {
  if (!lies_by_columns(input)) return at::matmul(grad, weight);
  return at::mm(weight.t(), as_rows(grad).t()).t().view_symint(input.sym_sizes());
}

// oneDNN, which ATen calls for some of its operators, refuses strides that overlap.
inline Tensor dense(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}
inline OptionalTensor dense(const OptionalTensor& tensor) {
  return has_value(tensor) ? OptionalTensor(dense(*tensor)) : std::nullopt;
}

}  // namespace fused::reference
