#pragma once

// oneDNN, as PyTorch offers it: what it may be asked for without breaking a promise, and the calls.

#include "core/activation.h"
#include "core/check.h"

#include <c10/util/FunctionRef.h>

#include <vector>

namespace fused::cpu::onednn {

// act(x Wᵀ + b) in one call: GELU in fp32 with few inputs, and in bf16.
bool takes_linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       Activation activation);
Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   Activation activation);

// The same in bf16 for every activation, if the weight is packed (packed_weights.h) and large
// enough.
bool takes_packed_linear(const Tensor& input, const Tensor& weight);
Tensor packed_linear(const Tensor& input, const Tensor& packed_weight, const OptionalTensor& bias,
                     Activation activation);

// left · rightᵀ + bias in fp32, the sums taken in parts short enough to be as exact as PyTorch's
// own. Rows come in blocks that fit a cache, on any thread, to whoever has something to do to them
// there.
using Finish = c10::function_ref<void(const Tensor& rows, int64_t first)>;
bool takes_product(at::ScalarType type, int64_t rows, int64_t inner, int64_t columns);
std::vector<Tensor> parts_of(const Tensor& right);  // [columns, inner] by the inner dimension
void product(const Tensor& left,                    // [rows, inner]
             const std::vector<Tensor>& parts,      // of right, packed or not
             const OptionalTensor& bias, Finish finish);

// In oneDNN's own layout, which products of about so many rows like best.
std::vector<Tensor> pack(std::vector<Tensor> parts, int64_t rows);

}  // namespace fused::cpu::onednn
