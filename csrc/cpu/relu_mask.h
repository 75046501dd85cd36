#pragma once

// ReLU's bit mask: made of its output, and applied to a gradient, in one pass over memory each.
// ATen's formulas take six.

#include "core/check.h"

namespace fused::cpu {

// By torch's rule: 0 where output <= 0. Both contiguous; output [*, features], mask, of bytes,
// [*, mask_bytes(features)] (reference/linear.h has the layout).
void write_relu_mask(const Tensor& mask, const Tensor& output);

// dz = grad where the bit is 1, else 0. All contiguous.
void apply_relu_mask(const Tensor& dz, const Tensor& grad, const Tensor& mask);

}  // namespace fused::cpu
