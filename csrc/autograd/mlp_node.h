#pragma once

#include "core/activation.h"
#include "core/check.h"
#include "core/memory.h"

namespace fused::autograd {

// fused::mlp with autograd: one node for the whole chain.
Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation,
                         Memory memory);

}  // namespace fused::autograd
