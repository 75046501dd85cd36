// The convolution's operators in torch's dispatcher and the C++ API, and their kernels but those of
// autograd (node.cpp) and of a GPU (cuda/conv.cpp).

#include "conv/operators.h"
#include "conv/kernels.h"
#include "core/shapes.h"
#include "dispatch/autocast.h"
#include "dispatch/elsewhere.h"
#include "dispatch/subclasses.h"
#include "fused_linear.h"

#include <utility>

namespace fused {

Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   int64_t groups) {
  return conv2d_relu_symint(input, weight, bias, c10::fromIntArrayRefSlow(stride),
                            c10::fromIntArrayRefSlow(padding), c10::fromIntArrayRefSlow(dilation),
                            groups);
}

Tensor conv2d_relu_symint(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                          c10::SymIntArrayRef dilation, c10::SymInt groups) {
  return conv::Conv2dRelu::call(input, weight, bias, stride, padding, dilation, std::move(groups));
}

namespace steps {

Pair channels_relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
  return conv::ChannelsReluBackward::call(grad_output, output, bias_grad);
}

}  // namespace steps

namespace conv {
namespace {

using S = Shapes<SymbolicAllocator>;

// Shapes and formats without data.
struct Meta {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor&,
                        const Geometry& geometry) {
    const auto image = batched(input);
    return like(input,
                empty(output_sizes(image, weight, geometry), image, format_of(image, weight)));
  }

  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
    return {empty(output.sym_sizes(), grad_output, format_of(output)),
            S::vector(grad_output, output.sym_size(1), bias_grad)};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(fused, m) {
  dispatch::define<Public, Steps>(m);
  m.def(Conv2dBackward::schema, dispatch::tags());
}

TORCH_LIBRARY_IMPL(fused, Meta, m) { register_kernels<Meta>(m); }
TORCH_LIBRARY_IMPL(fused, CPU, m) { register_kernels<Reference>(m); }  // ATen's
TORCH_LIBRARY_IMPL(fused, FuncTorchBatched, m) { register_kernels<Formula>(m); }
FUSED_REGISTER_ELSEWHERE(register_kernels<Formula>)

TORCH_LIBRARY_IMPL(fused, AutocastCUDA, m) {
  dispatch::register_autocast<c10::kCUDA, Public, Steps>(m);
}
TORCH_LIBRARY_IMPL(fused, AutocastCPU, m) {
  dispatch::register_autocast<c10::kCPU, Public, Steps>(m);
}
TORCH_LIBRARY_IMPL(fused, PythonTLSSnapshot, m) { dispatch::register_for_subclasses<Public>(m); }

}  // namespace conv
}  // namespace fused
