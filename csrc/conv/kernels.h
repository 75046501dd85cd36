#pragma once

// The convolution's kernels, as the dispatcher calls them, of a backend like Reference.

#include "conv/formula.h"
#include "conv/operators.h"
#include "core/explain.h"
#include "core/policy.h"
#include "dispatch/operators.h"

#include <torch/library.h>

#include <tuple>

namespace fused::conv {

template <class Backend>
struct Kernels {
  template <typename Fn>
  static auto way(const char* op, const Tensor& like, const Fn& fn) {
    return under_policy<Backend, Reference>(op, like, fn);
  }

  static Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Geometry& geometry) {
    if (const char* why = objection(input, weight, bias)) {
      return as_torch_does(why, input, weight, bias, geometry);
    }
    const explain::Row row(op_name, input, weight);
    check(input, weight, bias, geometry);
    return way(row.op, input, [&](auto w) { return w.forward(input, weight, bias, geometry); });
  }

  static Pair channels_relu_backward(const Tensor& grad_output, const Tensor& output,
                                     bool bias_grad) {
    const explain::Row row("_channels_relu_backward", grad_output, {});
    check_backward(row.op, grad_output, output);
    return way(row.op, grad_output,
               [&](auto w) { return w.relu_backward(grad_output, output, bias_grad); });
  }
};

template <class Backend>
void register_kernels(torch::Library& m) {
  dispatch::put<Public, Kernels<Backend>>(m);
  dispatch::put<Steps, Kernels<Backend>>(m);
}

}  // namespace fused::conv
