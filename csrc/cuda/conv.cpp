// CUDA kernels of fused::conv2d_relu. The convolution itself, forward and backward, is cuDNN's,
// through ATen; what stands around it is done in one pass.

#include "cuda/conv.h"

#include "core/explain.h"
#include "cuda/kernels/conv.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "dispatch/conv_kernels.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fused::cuda {
namespace {

using at::MemoryFormat;
using conv::Geometry, conv::batched, conv::format_of, conv::like;

kernels::Image image_of(const Tensor& tensor) {
  return {*gemm_type(tensor.scalar_type()), tensor.size(0), tensor.size(1),
          tensor.size(2) * tensor.size(3)};
}

struct Conv {
  static constexpr bool obeys_policy = true;
  static bool is_usable(const Tensor& like) { return has_code_for(like.get_device()); }

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Geometry& geometry) {
    const c10::cuda::CUDAGuard guard(input.device());
    const auto image = batched(input);
    if (image.numel() == 0) {
      const auto options = image.options().memory_format(format_of(image, weight));
      return like(input, at::empty_symint(conv::output_sizes(image, weight, geometry), options));
    }
    return like(input, forward_in_best_way(image, weight, bias, geometry));
  }

  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    const auto format = format_of(output);
    const auto grad = grad_output.contiguous(format), saved = output.contiguous(format);
    const auto image = image_of(saved);
    auto dz = empty(saved.sizes(), grad, {}, format);
    auto grad_bias = empty({bias_grad ? image.channels : 0}, grad);
    if (dz.numel() == 0) return {dz, grad_bias.zero_()};
    auto* sums = bias_grad ? grad_bias.data_ptr() : nullptr;
    if (format == MemoryFormat::ChannelsLast) {
      one_pass(rows(grad, image), rows(saved, image), /*mask=*/false, Activation::relu, image.type,
               dz.data_ptr(), sums);
      return {dz, grad_bias};
    }
    kernels::PlanesBackward args;
    args.image = image;
    const auto* device = at::cuda::getCurrentDeviceProperties();
    args.processors = device->multiProcessorCount;
    args.arch = device->major * 10 + device->minor;
    args.grad = grad.const_data_ptr(), args.output = saved.const_data_ptr();
    args.dz = dz.data_ptr(), args.grad_bias = sums;
    explain::append("own one-pass kernel");
    const Workspace scratch(kernels::scratch_bytes(args));
    kernels::relu_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
    return {dz, grad_bias};
  }

 private:
  // Channels-last, a linear layer's rows: one for each pixel.
  static gemm::Matrix rows(const Tensor& tensor, const kernels::Image& image) {
    return {image.batch * image.plane, image.channels, image.channels, false,
            const_cast<void*>(tensor.const_data_ptr())};
  }
};

Tensor convolution(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const Geometry& g) {
  explain::append("ATen convolution");
  return reference::convolution(image, weight, bias, g).contiguous(format_of(image, weight));
}

}  // namespace

Tensor aten_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                    const Geometry& geometry) {
  const auto output = convolution(image, weight, bias, geometry);
  explain::append("ATen ReLU in place");
  return output.relu_();
}

Tensor own_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const Geometry& geometry) {
  if (!has_value(bias)) return aten_forward(image, weight, bias, geometry);
  const auto output = convolution(image, weight, {}, geometry);
  explain::append("own bias and ReLU kernel");
  const bool last = format_of(image, weight) == MemoryFormat::ChannelsLast;
  const auto added = bias->contiguous();
  kernels::bias_relu(image_of(output), last, added.const_data_ptr(), output.data_ptr(),
                     at::cuda::getCurrentCUDAStream());
  return output;
}

TORCH_LIBRARY_IMPL(fused, CUDA, m) { dispatch::register_conv<Conv>(m); }

}  // namespace fused::cuda
