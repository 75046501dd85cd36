#pragma once

// The autograd node of one layer. The activation is a value: one class serves them all.

#include "core/activation.h"
#include "core/check.h"
#include "core/memory.h"

#include <torch/csrc/autograd/custom_function.h>

namespace fused::autograd {

struct LinearActivation : torch::autograd::Function<LinearActivation> {
  // Edges of the node, in the order of the tensor arguments.
  enum Edge { input_edge, weight_edge, bias_edge };
  static constexpr size_t arguments = 5;

  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias, Activation activation,
                        Memory memory);

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads);
};

// One layer's forward for training, as a node runs it: the output, and what its activation's
// derivative will be read from (undefined for none). Of tensors without autograd.
std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation,
                                                Memory memory);

// The same where nobody wants a gradient: nothing is kept.
Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation);

// GELU of the pre-activation that a node keeps. With low memory the forward takes the same way as
// the backward, so that what the latter recomputes has the same bits.
Tensor gelu(const Tensor& preactivation, Activation activation, const char* how);

}  // namespace fused::autograd
