#pragma once

// relu(conv2d(input, weight) + bias) in ATen: `ConvFormula` is the definition, differentiable, and
// `Conv` the same as kernels.

#include "core/conv.h"

#include <tuple>

namespace fused::reference {

struct ConvFormula {
  static constexpr bool obeys_policy = false;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const conv::Geometry& geometry);

  // -> grad_output where output > 0 or NaN, else 0; and, wanted or [0], its sum for each channel
  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad);
};

// In the layout that is promised. What runs on the CPU, under the policy "eager", and where a CUDA
// kernel has to give up.
struct Conv {
  static constexpr bool obeys_policy = true;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const conv::Geometry& geometry);
  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad);
};

// By torch's own functions (reference/linear.h).
Tensor conv_as_torch_does(const char* objection, const Tensor& input, const Tensor& weight,
                          const OptionalTensor& bias, const conv::Geometry& geometry);

// Without bias and ReLU's share: at::convolution.
Tensor convolution(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const conv::Geometry& geometry);

}  // namespace fused::reference
