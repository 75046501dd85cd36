#pragma once

// ReLU's bit mask of its output, in one pass over memory: ATen's formula takes six.

#include "check.h"

namespace fused {

// By torch's rule: 0 where output <= 0. Both contiguous; output [*, features], mask, of bytes,
// [*, gemm::mask_bits(features) / 8] (composite.h has the layout).
void write_relu_mask(const Tensor& mask, const Tensor& output);

}  // namespace fused
