#pragma once

// `Formula` is the definition in ATen, differentiable, and `Reference` the same as kernels.

#include "conv/arguments.h"
#include "reference/linear.h"

#include <c10/util/strides.h>

namespace fused::conv {

using reference::unwanted;

inline Tensor convolution(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                          const Geometry& g) {
  return at::convolution_symint(image, weight, bias, g.stride, g.padding, g.dilation,
                                /*transposed=*/false, /*output_padding=*/no_padding, g.groups);
}

struct Formula {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Geometry& g) {
    return at::relu(
        at::conv2d_symint(input, weight, bias, g.stride, g.padding, g.dilation, g.groups));
  }

  // -> grad_output where output > 0 or NaN, else 0; and, wanted or [0], its sum for each channel
  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
    auto gradient = at::threshold_backward(grad_output, output, 0);
    auto grad_bias = bias_grad ? gradient.sum({0, 2, 3}) : unwanted(grad_output);
    return {std::move(gradient), std::move(grad_bias)};
  }
};

// Gives the promised layout, on the CPU, under the policy "eager", and where a kernel gives up.
struct Reference {
  static constexpr bool obeys_policy = true;

  // oneDNN's convolution with ReLU as a post-op is not used: it turns NaN into 0.
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Geometry& geometry) {
    explain::append(explain::not_fused);
    const auto image = batched(input);
    auto output = convolution(image, weight, bias, geometry).contiguous(format_of(image, weight));
    // One channel lies alike in both formats, but oneDNN's next convolution reads what nobody has
    // written in the strides of channels-last.
    if (output.size(1) == 1) {
      output = output.as_strided(output.sizes(), c10::contiguous_strides(output.sizes()));
    }
    return like(input, output.relu_());
  }

  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
    explain::append(explain::not_fused);
    const auto format = format_of(output);
    auto [gradient, grad_bias] = Formula::relu_backward(grad_output.contiguous(format),
                                                        output.contiguous(format), bias_grad);
    return {gradient.contiguous(format), grad_bias};
  }
};

inline Tensor as_torch_does(const char* objection, const Tensor& input, const Tensor& weight,
                            const OptionalTensor& bias, const Geometry& geometry) {
  const explain::Row row(op_name, input, weight);
  explain::append(objection);
  explain::append(explain::not_fused);
  check_devices(op_name, input, weight, bias);
  refuse_batch_dependence(op_name, input);
  return in_context([&] { return Formula::forward(input, weight, bias, geometry); },
                    [&] {
                      return std::string(op_name) + ": got input " + describe(input) + ", weight " +
                             describe(weight) + ", bias " + describe(bias);
                    });
}

}  // namespace fused::conv
