#pragma once

// The convolution's kernels, as the dispatcher calls them, of a backend like reference::Conv.

#include "core/explain.h"
#include "core/policy.h"
#include "dispatch/operators.h"
#include "reference/conv.h"

#include <torch/library.h>

#include <tuple>

namespace fused::dispatch {

template <class Backend>
struct ConvKernels {
  template <typename Fn>
  static auto way(const char* op, const Tensor& like, const Fn& fn) {
    return under_policy<Backend, reference::Conv>(op, like, fn);
  }

  static Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const conv::Geometry& geometry) {
    if (const char* why = conv::objection(input, weight, bias)) {
      return reference::conv_as_torch_does(why, input, weight, bias, geometry);
    }
    const explain::Row row(conv::op_name, input, weight);
    conv::check(input, weight, bias, geometry);
    return way(row.op, input, [&](auto w) { return w.forward(input, weight, bias, geometry); });
  }

  static Pair channels_relu_backward(const Tensor& grad_output, const Tensor& output,
                                     bool bias_grad) {
    const explain::Row row("_channels_relu_backward", grad_output, {});
    conv::check_backward(row.op, grad_output, output);
    return way(row.op, grad_output,
               [&](auto w) { return w.relu_backward(grad_output, output, bias_grad); });
  }
};

template <class Backend>
void register_conv(torch::Library& m) {
  put<std::tuple<Conv2dRelu, ChannelsReluBackward>, ConvKernels<Backend>>(m);
}

}  // namespace fused::dispatch
