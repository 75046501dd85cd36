#pragma once

// oneDNN by way of PyTorch: when it keeps this package's promises, and the calls.

#include "core/check.h"

#include <c10/util/FunctionRef.h>

#include <vector>

namespace fused::cpu::onednn {

// act(x Wᵀ + b) in one call: GELU in fp32 with few inputs, and in bf16.
bool takes_linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       Activation activation);
Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   Activation activation);

// Takes every activation in bf16, where the weight is packed (packed_weights.h) and large enough.
bool takes_packed_linear(const Tensor& input, const Tensor& weight);
Tensor packed_linear(const Tensor& input, const Tensor& packed_weight, const OptionalTensor& bias,
                     Activation activation);

// Multiplies in fp32, in sums short enough to be as exact as PyTorch's own.
bool takes_product(at::ScalarType type, int64_t rows, int64_t inner, int64_t columns);

// Splits right, [columns, inner], into parts of nearly equal size, in whole vectors, and copies
// them, because oneDNN is too slow for rows with gaps between them.
std::vector<Tensor> parts_of(const Tensor& right);
std::vector<Tensor> pack(std::vector<Tensor> parts, int64_t rows);

// Computes rows of left's product with right in blocks that fit the cache. Any thread may call it.
using Finish = c10::function_ref<void(const Tensor& rows, int64_t first)>;
void product(const Tensor& left, const std::vector<Tensor>& parts, const OptionalTensor& bias,
             Finish finish);

}  // namespace fused::cpu::onednn
