#pragma once

// Small networks on a GPU, where launches take the time (small_product.h).

#include "core/check.h"
#include "fused_linear.h"

#include <vector>

namespace fused::cuda::small {

// The results of the layers, and with `keeps` the pre-activations that a backward reads, where one
// launch makes all; else nothing.
std::vector<Tensor> mlp_in_one(const Tensor& input, at::TensorList weights,
                               const c10::List<OptionalTensor>& biases, Activation activation,
                               bool keeps);

// A layer of each member of an ensemble, and its backward: reference::LinearFormula's.
Pair ensemble(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              Activation activation);
Triple ensemble_backward(const steps::LinearBackward& layer);

}  // namespace fused::cuda::small
