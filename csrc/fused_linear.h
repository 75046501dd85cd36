#pragma once

// The C++ API of torch_fused_linear: act(x Wᵀ + b) and relu(conv2d), trainable. Every function goes
// through torch's dispatcher, so autograd, autocast, tracing and every device behave as for torch's
// own operators. Link or dlopen the package's library before the first call.
//
// memory: "default", or "low" to keep less for the backward, which then computes more.

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace fused {

using at::Tensor;

// y = x Wᵀ + b
Tensor linear(const Tensor& input,                      // [*, in]
              const Tensor& weight,                     // [out, in]
              const std::optional<Tensor>& bias = {});  // [out]

// y = max(x Wᵀ + b, 0)
Tensor linear_relu(const Tensor& input,                     // [*, in]
                   const Tensor& weight,                    // [out, in]
                   const std::optional<Tensor>& bias = {},  // [out]
                   std::string_view memory = "default");

// y = gelu(x Wᵀ + b); approximate is "tanh" or "none" (erf)
Tensor linear_gelu(const Tensor& input,                     // [*, in]
                   const Tensor& weight,                    // [out, in]
                   const std::optional<Tensor>& bias = {},  // [out]
                   std::string_view approximate = "tanh", std::string_view memory = "default");

// Layers in a chain, the activation ("relu", "gelu_tanh" or "gelu_erf") between them and none after
// the last: one operator, one node.
Tensor mlp(const Tensor& input,                             // [*, in]
           at::TensorList weights,                          // [hidden, in], ..., [out, hidden]
           const c10::List<std::optional<Tensor>>& biases,  // [hidden], ..., [out], or None
           std::string_view activation, std::string_view memory = "default");

// y = max(conv2d(x, W) + b, 0); stride, padding and dilation are one number or (height, width)
Tensor conv2d_relu(const Tensor& input,   // [batch, in, height, width] or [in, height, width]
                   const Tensor& weight,  // [out, in / groups, kernel height, kernel width]
                   const std::optional<Tensor>& bias = {},  // [out]
                   at::IntArrayRef stride = 1, at::IntArrayRef padding = 0,
                   at::IntArrayRef dilation = 1, int64_t groups = 1);

// The same where sizes may be symbols
Tensor conv2d_relu_symint(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          c10::SymInt groups);

// The steps that autograd is made of, for who writes a backward by hand.
namespace steps {

// -> output [*, out] and the bit mask of z >= 0, uint8 [*, roundup(out, 128) / 8]
std::tuple<Tensor, Tensor> linear_relu_aux(const Tensor& input, const Tensor& weight,
                                           const std::optional<Tensor>& bias = {});

// -> output [*, out] and the pre-activation [*, out], whose rows are padded to 8 elements
std::tuple<Tensor, Tensor> linear_gelu_aux(const Tensor& input, const Tensor& weight,
                                           const std::optional<Tensor>& bias = {},
                                           std::string_view approximate = "tanh");

// ReLU's bit mask of its output, by torch's rule: 0 where output <= 0, so that at exactly 0 no
// gradient passes (linear_relu_aux's mask lets it pass) and at NaN it does.
// -> uint8 [*, roundup(out, 128) / 8]
Tensor relu_mask(const Tensor& output);  // [*, out]

// dz = act'(saved) · grad_output and, wanted or [0], its sum over all rows: the bias gradient.
// saved: ReLU's output or bit mask, GELU's pre-activation.
std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,  // [*, out]
                                               const Tensor& saved, std::string_view activation,
                                               bool bias_grad);

// The same for a convolution with ReLU: the sum is one for each channel. dz is channels-last where
// output is.
std::tuple<Tensor, Tensor> channels_relu_backward(
    const Tensor& grad_output,  // [batch, out, height, width]
    const Tensor& output,       // [batch, out, height, width]
    bool bias_grad);

// -> gradients of input, weight and bias; those not wanted are [0]
std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_output,  // [*, out]
                                                   const Tensor& input,        // [*, in]
                                                   const Tensor& weight,       // [out, in]
                                                   const std::optional<Tensor>& saved,
                                                   std::string_view activation,
                                                   std::array<bool, 3> output_mask);

// linear_backward, and on into the layer before: act'(previous_saved) is applied to the gradient of
// input, which is that layer's output, and summed over all rows. What cuBLASLt's DRELU_BGRAD and
// DGELU_BGRAD are made for.
// -> dz of the layer before, gradients of weight and bias, bias gradient of the layer before
std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
    const Tensor& grad_output,  // [*, out]
    const Tensor& input,        // [*, in], the output of the layer before
    const Tensor& weight,       // [out, in]
    const std::optional<Tensor>& saved, std::string_view activation,
    std::array<bool, 3> output_mask,  // its first is not read: dz is what this is called for
    const Tensor& previous_saved,     // [*, in]
    std::string_view previous_activation, bool previous_bias_grad);

}  // namespace steps
}  // namespace fused
