#pragma once

// Small networks on a GPU, whose time is that of launches (small_product.h).

#include "core/check.h"
#include "fused_linear.h"

#include <vector>

namespace fused::cuda::small {

// Computes the results of all layers in one launch, and with `keeps` the pre-activations that a
// backward reads. Empty if one launch cannot do it.
std::vector<Tensor> mlp_in_one(const Tensor& input, at::TensorList weights,
                               const c10::List<OptionalTensor>& biases, Activation activation,
                               bool keeps);

// A layer of each member of an ensemble, and its backward: reference::LinearFormula's.
Pair ensemble(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              Activation activation);
Triple ensemble_backward(const steps::LinearBackward& layer);

}  // namespace fused::cuda::small
