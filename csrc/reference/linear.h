#pragma once

// The definition of every operator, in differentiable ATen. It is the reference, and the way out
// wherever a fused kernel cannot go: double backward, torch.func, forward AD.

#include "core/activation.h"
#include "core/check.h"

#include <array>
#include <tuple>

namespace fused {

struct Composite {
  static constexpr bool obeys_policy = false;

  static Tensor activate(const Tensor& preactivation, Activation activation);

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation);

  // -> output and, for ReLU, the bit mask; for GELU the pre-activation
  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation);

  // The bit mask by which ReLU's backward follows torch's rule: 0 where output <= 0, so that at 0
  // no gradient passes, and at NaN it does.
  static Tensor relu_mask(const Tensor& output);

  // act'(saved) · grad_output. saved is ReLU's output or bit mask (uint8), GELU's pre-activation.
  static Tensor activation_gradient(const Tensor& grad_output, const Tensor& saved,
                                    Activation activation);

  // The same, and its sum over all rows.
  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad);

  // -> gradients of input, weight, bias
  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask);

  // The same, and on into the layer before: -> its dz, gradients of weight and bias, its bias
  // gradient
  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, Activation previous, bool previous_bias_grad);

  // Layers with the activation between them and none after the last.
  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, Activation activation);
};

// The same as kernels: every result in the layout that meta.cpp promises, nothing aliased. What
// runs under the policy "eager", on the CPU, and where a CUDA kernel has to give up.
struct Reference {
  static constexpr bool obeys_policy = true;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation);

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation);

  static Tensor relu_mask(const Tensor& output);

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad);

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask);

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, Activation previous, bool previous_bias_grad);
};

// One bit per element, eight to a byte, lowest first, rows padded with zeros to 128 bits: the
// layout that cuBLASLt's RELU_AUX writes.
Tensor pack_mask(const Tensor& positive);                             // [*, n] bool
Tensor unpack_mask(const Tensor& mask, const c10::SymInt& features);  // [*, features] bool

// The pre-activation as it is saved everywhere: [*, features] with rows padded to 8 elements, which
// is what cuBLASLt's GELU_AUX writes. The padding is zero.
Tensor pad_rows(const Tensor& tensor);

// What stands in for a gradient that nobody asked for.
inline Tensor unwanted(const Tensor& like) { return at::empty({0}, like.options()); }

// [*, features] -> [rows, features]
inline Tensor as_rows(const Tensor& tensor) {
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
}

// oneDNN, which ATen calls for some of its operators, refuses strides that overlap.
inline Tensor dense(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}
inline OptionalTensor dense(const OptionalTensor& tensor) {
  return has_value(tensor) ? OptionalTensor(dense(*tensor)) : std::nullopt;
}

}  // namespace fused
