// What relu(conv2d(input, weight) + bias) is, in ATen; the shapes of its results; the CPU's
// kernels.

#include "dispatch/conv_kernels.h"

#include "reference/linear.h"

namespace fused::conv {
namespace {

using at::MemoryFormat;

const std::array<SymInt, 2> no_padding{0, 0};

Tensor convolution(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const Geometry& g) {
  return at::convolution_symint(image, weight, bias, g.stride, g.padding, g.dilation,
                                /*transposed=*/false, /*output_padding=*/no_padding, g.groups);
}

}  // namespace

Tensor Formula::forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Geometry& g) {
  return at::relu(
      at::conv2d_symint(input, weight, bias, g.stride, g.padding, g.dilation, g.groups));
}

std::tuple<Tensor, Tensor> Formula::relu_backward(const Tensor& grad_output, const Tensor& output,
                                                  bool bias_grad) {
  auto gradient = at::threshold_backward(grad_output, output, 0);
  auto grad_bias = bias_grad ? gradient.sum({0, 2, 3}) : unwanted(grad_output);
  return {std::move(gradient), std::move(grad_bias)};
}

// oneDNN's convolution with ReLU as a post-op is not used: it turns NaN into 0.
Tensor Reference::forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const Geometry& geometry) {
  explain::step("reference");
  const auto image = batched(input);
  const auto output =
      convolution(image, weight, bias, geometry).contiguous(format_of(image, weight));
  return like(input, output.relu_());
}

std::tuple<Tensor, Tensor> Reference::relu_backward(const Tensor& grad_output, const Tensor& output,
                                                    bool bias_grad) {
  explain::step("reference");
  const auto format = format_of(output);
  auto [gradient, grad_bias] =
      Formula::relu_backward(grad_output.contiguous(format), output.contiguous(format), bias_grad);
  return {gradient.contiguous(format), grad_bias};
}

namespace {

Tensor empty(SymIntArrayRef sizes, const Tensor& like, MemoryFormat format) {
  return at::empty_symint(sizes, like.options().memory_format(format));
}

struct Meta {
  static constexpr bool obeys_policy = false;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor&,
                        const Geometry& geometry) {
    const auto image = batched(input);
    return like(input,
                empty(output_sizes(image, weight, geometry), image, format_of(image, weight)));
  }

  static std::tuple<Tensor, Tensor> relu_backward(const Tensor& grad_output, const Tensor& output,
                                                  bool bias_grad) {
    const auto channels = bias_grad ? output.sym_size(1) : SymInt(0);
    return {empty(output.sym_sizes(), grad_output, format_of(output)),
            at::empty_symint({channels}, grad_output.options())};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { register_kernels<Reference>(m); }
TORCH_LIBRARY_IMPL(fused, Meta, m) { register_kernels<Meta>(m); }
// Under vmap torch's own rules batch the formula.
TORCH_LIBRARY_IMPL(fused, FuncTorchBatched, m) { register_kernels<Formula>(m); }

}  // namespace fused::conv
