#pragma once

// Writes and reads ReLU's bit mask in one sweep over memory each; ATen's formulas take six.
// reference/linear.h describes the layout.

#include "core/check.h"

namespace fused::cpu {

// Writes a bit for each element: 0 where output <= 0, by torch's rule. Both are contiguous.
void write_relu_mask(const Tensor& mask, const Tensor& output);

// Computes dz = grad where the mask's bit is set, else 0. All are contiguous.
void apply_relu_mask(const Tensor& dz, const Tensor& grad, const Tensor& mask);

}  // namespace fused::cpu
