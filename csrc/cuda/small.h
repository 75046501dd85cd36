#pragma once

// Small networks on a GPU by our own kernels, where measuring has found that to be faster.

#include "dispatch/operators.h"

namespace fused::cuda {

// See dispatch::MlpInOne; the pre-activations only where `keeps`.
std::vector<Tensor> mlp_in_one(const Tensor& input, at::TensorList weights,
                               const c10::List<std::optional<Tensor>>& biases,
                               Activation activation, bool keeps);

// See reference::LinearFormula.
dispatch::Pair ensemble(const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, Activation activation);
dispatch::Triple ensemble_backward(const steps::LinearBackward& layer);

}  // namespace fused::cuda
