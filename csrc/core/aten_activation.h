#pragma once

// act and act' in ATen: every room that computes them with ATen's operators calls these.

#include "core/activation.h"
#include "core/check.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace fused {

inline Tensor activate(const Tensor& preactivation, Activation activation) {
  switch (activation) {
    case Activation::none:
      break;
    case Activation::relu:
      return at::relu(preactivation);
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      return at::gelu(preactivation, approximate_of(activation));
    case Activation::silu:
      return at::silu(preactivation);
    case Activation::relu2:
      return at::relu(preactivation).square();
  }
  return preactivation;
}

// Into `output`, which may be the pre-activation itself.
inline void activate_out(Tensor output, const Tensor& preactivation, Activation activation) {
  switch (activation) {
    case Activation::none:
      if (!output.is_same(preactivation)) output.copy_(preactivation);
      return;
    case Activation::relu:
    case Activation::relu2:
      at::clamp_min_out(output, preactivation, 0);  // what at::relu is, with NaN passed on
      if (activation == Activation::relu2) output.mul_(output);
      return;
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      at::gelu_out(output, preactivation, approximate_of(activation));
      return;
    case Activation::silu:
      at::silu_out(output, preactivation);
      return;
  }
}

// Torch's own operator for it is not differentiable, and rounds only once.
inline Tensor silu_gradient(const Tensor& grad_output, const Tensor& preactivation) {
  if (!at::GradMode::is_enabled() && !has_tangent(grad_output) && !has_tangent(preactivation)) {
    return at::silu_backward(grad_output, preactivation);
  }
  const auto sigmoid = preactivation.sigmoid();
  return grad_output * sigmoid * (1 + preactivation * at::rsub(sigmoid, 1));
}

// act'(saved) · grad_output, differentiable; saved is what saved_for(activation) names.
inline Tensor activation_gradient(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation) {
  switch (activation) {
    case Activation::none:
      break;
    case Activation::relu:
      return at::threshold_backward(grad_output, saved, 0);
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      return at::gelu_backward(grad_output, saved, approximate_of(activation));
    case Activation::silu:
      return silu_gradient(grad_output, saved);
    case Activation::relu2:
      return at::threshold_backward(grad_output * (2 * saved), saved, 0);
  }
  return grad_output;
}

// Writes activation_gradient into `dz`, which may be grad_output itself.
inline void activation_gradient_out(Tensor dz, const Tensor& grad_output, const Tensor& saved,
                                    Activation activation) {
  switch (activation) {
    case Activation::none:
      if (!dz.is_same(grad_output)) dz.copy_(grad_output);
      return;
    case Activation::relu:
      at::threshold_backward_out(dz, grad_output, saved, 0);
      return;
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      at::gelu_backward_out(dz, grad_output, saved, approximate_of(activation));
      return;
    case Activation::silu:
      at::silu_backward_out(dz, grad_output, saved);
      return;
    case Activation::relu2:
      at::threshold_backward_out(dz, at::mul_out(dz, grad_output, 2 * saved), saved, 0);
      return;
  }
}

}  // namespace fused
