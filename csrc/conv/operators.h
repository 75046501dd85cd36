#pragma once

// The operators of the convolution, as rows like those of dispatch/operators.h.

#include "conv/arguments.h"
#include "dispatch/operators.h"

#include <array>
#include <tuple>

namespace fused::conv {

using dispatch::Operator;

struct Conv2dRelu
    : Operator<
          "conv2d_relu(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
          "SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
          decltype(fused::conv2d_relu_symint)> {
  template <class Kernels>
  static constexpr auto in = &Kernels::conv2d_relu;

  template <auto fn>
  static Tensor flat(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                     c10::SymIntArrayRef dilation, c10::SymInt groups) {
    return fn(input, weight, bias, {stride, padding, dilation, groups});
  }
};

// _activation_backward for ReLU's output of a convolution, summed for each channel
struct ChannelsReluBackward
    : Operator<
          "_channels_relu_backward(Tensor grad_output, Tensor output, bool bias_grad) -> "
          "(Tensor grad_preactivation, Tensor grad_bias)",
          decltype(steps::channels_relu_backward)> {
  static constexpr auto step = &steps::channels_relu_backward;
  template <class Kernels>
  static constexpr auto in = &Kernels::channels_relu_backward;
};

// The convolution's own backward on sharded tensors, for which torch's rule knows one layout.
using Conv2dBackward = Operator<
    "_conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[2] stride, "
    "SymInt[2] padding, SymInt[2] dilation, SymInt groups, bool[3] output_mask) -> "
    "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    Triple(const Tensor&, const Tensor&, const Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef,
           c10::SymIntArrayRef, c10::SymInt, std::array<bool, 3>)>;

using Public = std::tuple<Conv2dRelu>;
using Steps = std::tuple<ChannelsReluBackward>;

}  // namespace fused::conv
