#pragma once

// The forward calls of operators that need a gradient. Each makes one node.

#include "core/gated.h"

namespace fused::autograd {

// A layer.
Tensor linear_with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            Activation activation, Memory memory);

// Runs a layer's forward for training below autograd. Returns the output and the tensor that the
// activation's derivative is read from (undefined for none).
Pair forward_for_training(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation, Memory memory);

// Applies ATen's activation to a rounded pre-activation. With memory="low" only the pre-activation
// is saved; the backward applies the activation again and gets the same bits.
enum class Time { first, again };
Tensor activated(const Tensor& preactivation, Activation activation, Time time);

// Runs the forward without a gradient, which saves nothing.
Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation);

// A chain of layers.
Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation,
                         Memory memory);

// A gated layer, with the layer after it if there is one.
Tensor gated_with_gradient(const gated::Layer& layer, const gated::Down& down,
                           Activation activation, Memory memory);

}  // namespace fused::autograd
