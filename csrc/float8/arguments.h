#pragma once

// Checks of what users give to the public operators. Weights and biases may have another of the
// dtypes than the input: master weights in fp32 are cast to FP8 as they are.

#include "core/check.h"

namespace fused::float8 {

void check_input(const char* op, const Tensor& input);

// `what` names the weight: "weight", "weights[1]", "gate".
void check_layer(const char* op, const std::string& what, const Tensor& input,
                 const c10::SymInt& features, const Tensor& weight, const OptionalTensor& bias);

}  // namespace fused::float8
