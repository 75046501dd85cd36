#pragma once

// The C++ API of torch_fused_linear: act(x Wᵀ + b) and relu(conv2d), trainable. Every function goes
// through torch's dispatcher, so autograd, autocast, tracing and every device behave as for torch's
// own operators. Link or dlopen the package's library before the first call.
//
// memory: "default", or "low" to keep less for the backward, which then computes more.

#include "fused_activation.h"

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

// y = z sigmoid(z) with z = x Wᵀ + b
Tensor linear_silu(const Tensor& input,                     // [*, in]
                   const Tensor& weight,                    // [out, in]
                   const std::optional<Tensor>& bias = {},  // [out]
                   std::string_view memory = "default");

// y = max(x Wᵀ + b, 0)²
Tensor linear_relu2(const Tensor& input,                     // [*, in]
                    const Tensor& weight,                    // [out, in]
                    const std::optional<Tensor>& bias = {},  // [out]
                    std::string_view memory = "default");

// Linear layers with an activation between them ("relu", "gelu_tanh", "gelu_erf", "silu" or
// "relu2") and none after the last: one operator, one node.
Tensor mlp(const Tensor& input,                             // [*, in]
           at::TensorList weights,                          // [hidden, in], ..., [out, hidden]
           const c10::List<std::optional<Tensor>>& biases,  // [hidden], ..., [out], or None
           std::string_view activation, std::string_view memory = "default");

// A gated layer, y = act(x gateᵀ + gate_bias) ⊙ (x upᵀ + up_bias). Without up, gate holds both
// weights, [2 hidden, in], gate's rows first, and gate_bias both biases. activation is "silu",
// "gelu_tanh", "gelu_erf", "relu" or "relu2".
Tensor linear_glu(const Tensor& input,                          // [*, in]
                  const Tensor& gate,                           // [hidden, in]
                  const std::optional<Tensor>& up = {},         // [hidden, in]
                  const std::optional<Tensor>& gate_bias = {},  // [hidden]
                  const std::optional<Tensor>& up_bias = {},    // [hidden]
                  std::string_view activation = "silu", std::string_view memory = "default");

// The feed-forward block of language models: a gated layer and a linear layer after it, as one
// operator and one node.
Tensor gated_mlp(const Tensor& input,                          // [*, in]
                 const Tensor& gate,                           // [hidden, in]
                 const std::optional<Tensor>& up,              // [hidden, in]
                 const Tensor& down,                           // [out, hidden]
                 const std::optional<Tensor>& gate_bias = {},  // [hidden]
                 const std::optional<Tensor>& up_bias = {},    // [hidden]
                 const std::optional<Tensor>& down_bias = {},  // [out]
                 std::string_view activation = "silu", std::string_view memory = "default");

// The three in FP8: inputs and weights are cast to e4m3 and gradients to e5m2, with one scale for
// each tensor, by torchao's recipe `tensorwise`. bf16, fp16 and fp32, which weights and biases may
// have apart from the input; the output has the input's. Where FP8 cannot multiply (sizes that are
// no multiples of 16, devices without it) the layers run in the input's dtype.
Tensor float8_linear(const Tensor& input,                       // [*, in]
                     const Tensor& weight,                      // [out, in]
                     const std::optional<Tensor>& bias = {},    // [out]
                     std::string_view activation = "none");     // or as mlp's
Tensor float8_mlp(const Tensor& input, at::TensorList weights,  // as mlp
                  const c10::List<std::optional<Tensor>>& biases, std::string_view activation);
Tensor float8_gated_mlp(const Tensor& input, const Tensor& gate,  // as gated_mlp
                        const std::optional<Tensor>& up, const Tensor& down,
                        const std::optional<Tensor>& gate_bias = {},
                        const std::optional<Tensor>& up_bias = {},
                        const std::optional<Tensor>& down_bias = {},
                        std::string_view activation = "silu");

// y = max(conv2d(x, W) + b, 0); stride, padding and dilation are one number or (height, width)
Tensor conv2d_relu(const Tensor& input,   // [batch, in, height, width] or [in, height, width]
                   const Tensor& weight,  // [out, in / groups, kernel height, kernel width]
                   const std::optional<Tensor>& bias = {},  // [out]
                   at::IntArrayRef stride = 1, at::IntArrayRef padding = 0,
                   at::IntArrayRef dilation = 1, int64_t groups = 1);

// conv2d_relu for symbolic sizes
Tensor conv2d_relu_symint(const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          c10::SymInt groups);

// The steps of forward and backward, for a backward of your own.
namespace steps {

// -> output [*, out] and the tensor that its derivative is read from: for ReLU the bit mask of
// z >= 0, uint8 [*, roundup(out, 128) / 8], else the pre-activation [*, out], whose rows are padded
// to 8 elements
std::tuple<Tensor, Tensor> linear_aux(const Tensor& input, const Tensor& weight,
                                      const std::optional<Tensor>& bias, Activation activation);

// ReLU's bit mask of its output, by torch's rule: 0 where output <= 0, so that at exactly 0 no
// gradient passes (linear_aux's mask lets it pass) and at NaN it does.
// -> uint8 [*, roundup(out, 128) / 8]
Tensor relu_mask(const Tensor& output);  // [*, out]

// linear_relu and its relu_mask
std::tuple<Tensor, Tensor> linear_relu_bits(const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& bias = {});

// dz = act'(saved) · grad_output and, wanted or [0], its sum over all rows: the bias gradient.
std::tuple<Tensor, Tensor> activation_backward(
    const Tensor& grad_output,  // [*, out]
    const Tensor& saved,        // ReLU's output or bit mask, else the pre-activation
    Activation activation, bool bias_grad);

// activation_backward for a convolution with ReLU: one sum for each channel. dz is channels-last if
// output is.
std::tuple<Tensor, Tensor> channels_relu_backward(
    const Tensor& grad_output,  // [batch, out, height, width]
    const Tensor& output,       // [batch, out, height, width]
    bool bias_grad);

// The arguments of a layer's backward. Refers to the caller's tensors.
struct LinearBackward {
  const Tensor& grad_output;           // [*, out]
  const Tensor& input;                 // [*, in]
  const Tensor& weight;                // [out, in]
  const std::optional<Tensor>& saved;  // as above; not read for Activation::none
  Activation activation = Activation::none;
  std::array<bool, 3> wanted{true, true, true};  // gradients of input, weight, bias
};

// The layer before, whose output is the input.
struct PreviousLayer {
  const Tensor& saved;  // [*, in]
  Activation activation;
  bool bias_grad;
};

// -> gradients of input, weight and bias; unwanted ones are [0]
std::tuple<Tensor, Tensor, Tensor> linear_backward(const LinearBackward& layer);

// Computes the weight's gradient alone, gradᵀ · input, and adds it to `into` or overwrites it.
// Without input it is the bias's gradient, the sum of grad's rows.
void weight_gradient(const Tensor& grad_output,           // [*, out]
                     const std::optional<Tensor>& input,  // [*, in]
                     const Tensor& into,  // [out, in] or [out], of their dtype or fp32
                     bool adds);

// linear_backward that goes on into the previous layer: it applies that layer's act' to the
// gradient of input, and sums it over all rows, as cuBLASLt's DRELU_BGRAD and DGELU_BGRAD do.
// wanted[0] is not read.
// -> dz of the previous layer, gradients of weight and bias, bias gradient of the previous layer
std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(const LinearBackward& layer,
                                                                  const PreviousLayer& previous);

// Computes act(gate) ⊙ up of pre-activations in one pass over memory. Without up, gate holds both,
// [*, 2 hidden], gate's features first.
Tensor glu(const Tensor& gate, const std::optional<Tensor>& up, Activation activation);

// A gated layer -> its output [*, hidden] and the pre-activations, or [0] if they are not kept.
// Without up, gate holds both weights, and the first pre-activation holds both, the second is [0].
std::tuple<Tensor, Tensor, Tensor> linear_glu_aux(const Tensor& input, const Tensor& gate,
                                                  const std::optional<Tensor>& up,
                                                  const std::optional<Tensor>& gate_bias,
                                                  const std::optional<Tensor>& up_bias,
                                                  Activation activation, bool keeps);

struct GluBackward {
  const Tensor& grad_output;        // [*, hidden], or with down [*, out]
  const Tensor& gate;               // pre-activations, as above
  const std::optional<Tensor>& up;  //
  Activation activation;
  // gradients of gate, up, gate's bias, up's bias; the result of glu
  std::array<bool, 5> wanted{true, true, true, true, true};
  // The weight of the layer after it, [out, hidden]: grad_output is then of that layer's output.
  std::optional<Tensor> down = {};
};

// Computes the gradients of the pre-activations, their sums over all rows and the result of glu
// again, in one pass over memory. Unwanted ones are [0]; without up the first and third hold both.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> glu_backward(const GluBackward& step);

}  // namespace steps
}  // namespace fused
