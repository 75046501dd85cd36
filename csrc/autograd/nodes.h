#pragma once

// Calls of which a gradient is wanted, one node each.

#include "core/gated.h"

namespace fused::autograd {

// A layer.
Tensor linear_with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            Activation activation, Memory memory);

// Its forward for training, as a node runs it: the output, and what its activation's derivative
// will be read from (undefined for none). Of tensors without autograd.
Pair forward_for_training(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation, Memory memory);

// ATen's activation of a rounded pre-activation. Low memory keeps only the pre-activation, and the
// backward applies the activation again, for the same bits.
enum class Time { first, again };
Tensor activated(const Tensor& preactivation, Activation activation, Time time);

// The forward where nobody wants a gradient: nothing is kept.
Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation);

// A chain of layers.
Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation,
                         Memory memory);

// A gated layer, and the one after it where there is one.
Tensor gated_with_gradient(const gated::Layer& layer, const gated::Down& down,
                           Activation activation, Memory memory);

}  // namespace fused::autograd
