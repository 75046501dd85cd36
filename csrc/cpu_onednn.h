#pragma once

// oneDNN, as PyTorch offers it: what it may be asked for without breaking a promise, and the calls.

#include "activation.h"
#include "check.h"

#include <c10/util/FunctionRef.h>

namespace fused::onednn {

// act(x Wᵀ + b) in one call: GELU in fp32 with few inputs, and in bf16.
bool takes_linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       Activation activation);
Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   Activation activation);

// left · rightᵀ + bias in fp32, the sums taken in parts short enough to be as exact as PyTorch's
// own. Rows come in blocks that fit a cache, on any thread, to whoever has something to do to them
// there.
using Finish = c10::function_ref<void(const Tensor& rows, int64_t first)>;
bool takes_product(at::ScalarType type, int64_t rows, int64_t inner, int64_t columns);
void product(const Tensor& left,   // [rows, inner]
             const Tensor& right,  // [columns, inner]
             const OptionalTensor& bias, Finish finish);

}  // namespace fused::onednn
