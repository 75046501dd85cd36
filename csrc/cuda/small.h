#pragma once

// Small networks on a GPU by our own kernels, where measuring has found that to be faster.

#include "dispatch/operators.h"

namespace fused::cuda {

// See dispatch::MlpInOne; the pre-activations only where `keeps`.
std::vector<Tensor> mlp_in_one(const Tensor& input, at::TensorList weights,
                               const c10::List<OptionalTensor>& biases, Activation activation,
                               bool keeps);

// See reference::LinearFormula.
Pair ensemble(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              Activation activation);
Triple ensemble_backward(const steps::LinearBackward& layer);

}  // namespace fused::cuda
